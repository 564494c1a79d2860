"""boto3's client as this service uses it, and its exceptions as ours."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import boto3
from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

from batch_pipeline import settings
from batch_pipeline.errors import StoreError
from batch_pipeline.plain import one_line

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

MISSING = {"404", "NoSuchKey", "NotFound", "NoSuchUpload"}
_PRECONDITION = {"412", "PreconditionFailed", "409", "ConditionalRequestConflict"}


class PreconditionFailed(StoreError):
    """A conditional write or copy found another object than expected. Nothing was written."""


class ObjectMissing(StoreError):
    """There is no object at the key."""


def make_client(store: settings.Store) -> S3Client:
    """Return a boto3 client for the configured store, with bounded retries and time-outs."""
    return boto3.client(
        "s3",
        endpoint_url=store.endpoint_url,
        region_name=store.region,
        aws_access_key_id=store.access_key_id,
        aws_secret_access_key=store.secret_access_key,
        config=Config(
            connect_timeout=5,
            read_timeout=60,
            max_pool_connections=32,
            retries={"max_attempts": 4, "mode": "standard"},
            s3={"addressing_style": "path"} if store.endpoint_url else {},
        ),
    )


class translated:  # noqa: N801 - reads as a word where it is used
    """Turn boto3's exceptions into ours, with what was being done in the message."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Boto3Error) and isinstance(error.__context__, ClientError):
            # What boto3's transfers make of a refusal.
            error = error.__context__
        if isinstance(error, ClientError):
            code = error.response.get("Error", {}).get("Code", "")
            if code in MISSING:
                raise ObjectMissing(f"{self._doing}: no such object") from error
            if code in _PRECONDITION:
                raise PreconditionFailed(f"{self._doing}: the object is not the one expected") from error
            raise StoreError(f"{self._doing}: the object store answered {code}: {one_line(str(error))}") from error
        if isinstance(error, ParamValidationError):
            raise StoreError(f"{self._doing}: not possible in S3: {one_line(str(error))}") from error
        if isinstance(error, BotoCoreError | Boto3Error):
            raise StoreError(f"{self._doing}: the object store cannot be reached: {one_line(str(error))}") from error
