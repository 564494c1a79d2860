"""The parts of the service as one Dagster resource: configuration, ledger and object store.

The object store's client is that of dagster-aws's S3Resource, so that credentials and endpoint are seen and overridden
where Dagster's users expect them.
"""

import os
import threading
from typing import Any, NamedTuple

import dagster as dg
import msgspec
from dagster_aws.s3 import S3Resource

from batch_pipeline import settings as configuration
from batch_pipeline.ledger import Ledger
from batch_pipeline.store import ObjectStore

KEY_VARIABLE = "BATCH_PIPELINE_S3_KEY"
"""Where the resource finds the store's secret: by name, so that the UI shows the name and not the secret. It is not one
of the variables that override the configuration: set here, it must not reach whoever reads that afterwards."""


class Parts(NamedTuple):
    """What the domain's functions are called with."""

    settings: configuration.Settings
    ledger: Ledger
    store: ObjectStore


_opened: dict[bytes, Parts] = {}
"""The parts that this process has opened, by configuration: Dagster makes a new resource for every tick and run."""
_opening = threading.Lock()


class S3(S3Resource):
    """dagster-aws's resource, but for a client that it makes by itself whenever it is set up.

    Dagster sets it up for every tick and run, and a client costs 0.1 s of processor: most of what a tick costs.
    """

    def get_object_to_set_on_execution_context(self) -> Any:
        """Return what a function that asks for it is given: the resource, whose `get_client` makes a client."""
        return self


class Service(dg.ConfigurableResource[Parts]):
    """The service's parts. `open` gives them; they are made once a process."""

    s3: dg.ResourceDependency[S3]

    def open(self) -> Parts:
        """Return the parts. Raises SettingsError or OperatorError with one clear line."""
        settings = configuration.load()
        key = msgspec.json.encode(settings)
        with _opening:
            if key not in _opened:
                store = ObjectStore(self.s3.get_client(), settings.store.bucket)
                _opened[key] = Parts(settings, Ledger.from_settings(settings), store)
            return _opened[key]


def make_resources(settings: configuration.Settings) -> dict[str, dg.ConfigurableResource[object]]:
    """Return the resources of the code location."""
    store = settings.store
    secret: dg.EnvVar | None = None
    if store.secret_access_key is not None:
        os.environ[KEY_VARIABLE] = store.secret_access_key
        secret = dg.EnvVar(KEY_VARIABLE)
    s3 = S3(
        endpoint_url=store.endpoint_url,
        region_name=store.region,
        aws_access_key_id=store.access_key_id,
        aws_secret_access_key=secret,
    )
    return {"s3": s3, "service": Service(s3=s3)}
