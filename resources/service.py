"""The parts of the service as one Dagster resource: configuration, ledger and object store.

The object store's client is dagster-aws's S3Resource, so that credentials and endpoint are seen and overridden where
Dagster's users expect them.
"""

import os
from typing import NamedTuple

import dagster as dg
from dagster_aws.s3 import S3Resource
from pydantic import PrivateAttr

from batch_pipeline import settings as configuration
from batch_pipeline.ledger import Ledger
from batch_pipeline.store import ObjectStore

SECRET_VARIABLE = f"{configuration.OVERRIDE_PREFIX}STORE__SECRET_ACCESS_KEY"
"""Where the resource finds the store's secret: by name, so that the UI shows the name and not the secret."""


class Parts(NamedTuple):
    """What the domain's functions are called with."""

    settings: configuration.Settings
    ledger: Ledger
    store: ObjectStore


class Service(dg.ConfigurableResource[Parts]):
    """The service's parts. `open` gives them; they are made once a process."""

    s3: dg.ResourceDependency[S3Resource]
    bucket: str
    _parts: Parts | None = PrivateAttr(default=None)

    def open(self) -> Parts:
        """Return the parts. Raises SettingsError or OperatorError with one clear line."""
        if self._parts is None:
            settings = configuration.load()
            store = ObjectStore(self.s3.get_client(), self.bucket)
            self._parts = Parts(settings, Ledger.from_settings(settings), store)
        return self._parts


def make_resources(settings: configuration.Settings) -> dict[str, dg.ConfigurableResource[object]]:
    """Return the resources of the code location."""
    store = settings.store
    secret: dg.EnvVar | None = None
    if store.secret_access_key is not None:
        os.environ.setdefault(SECRET_VARIABLE, store.secret_access_key)
        secret = dg.EnvVar(SECRET_VARIABLE)
    s3 = S3Resource(
        endpoint_url=store.endpoint_url,
        region_name=store.region,
        aws_access_key_id=store.access_key_id,
        aws_secret_access_key=secret,
    )
    return {"s3": s3, "service": Service(s3=s3, bucket=store.bucket)}
