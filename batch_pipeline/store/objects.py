"""The object store: S3 through boto3, with the few operations that the invariants rest on.

A put of one object is atomic: killed before or during it, nothing is visible; after it, the whole object is. A
multipart object is visible only once it is completed. Completing a multipart upload is never used to decide a race:
some stores ignore its condition (docs/decisions.md). Races are decided by `put(..., if_absent / if_match)` of a small
object, or by the ledger.
"""

from __future__ import annotations

import io
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

from batch_pipeline import settings
from batch_pipeline.errors import StoreError
from batch_pipeline.plain import one_line

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

MIN_PART_BYTES = 5 * 1024 * 1024
"""S3's smallest part, except for the last of an object."""
PART_BYTES = 16 * 1024 * 1024
MAX_COPY_BYTES = 1024**3
"""Larger objects are copied in parts, several at once: one call for each would take minutes (and S3 takes 5 GiB)."""
COPY_PART_BYTES = 256 * 1024 * 1024
COPY_THREADS = 8
MANY_PARTS = 5_000
"""Half of the parts that S3 allows: from there on parts are larger, so that 10,000 make more than 300 GB."""
LARGE_PART_BYTES = 64 * 1024 * 1024

UNSENT_BYTES = 64 * 1024 * 1024
"""Most bytes of a multipart upload that wait in memory while they are sent."""
MAX_UNSENT_PARTS = 8

MOST_DELETED = 1000
"""S3's most objects in one request to delete."""

_MISSING = {"404", "NoSuchKey", "NotFound", "NoSuchUpload"}
_PRECONDITION = {"412", "PreconditionFailed", "409", "ConditionalRequestConflict"}


class PreconditionFailed(StoreError):
    """A conditional write or copy found another object than expected. Nothing was written."""


class ObjectMissing(StoreError):
    """There is no object at the key."""


class ObjectInfo(NamedTuple):
    """What a listing or a HEAD tells. `modified_at` in UTC seconds since the epoch; `metadata` only from a HEAD."""

    key: str
    size: int
    etag: str
    modified_at: float
    metadata: dict[str, str]


class UploadInfo(NamedTuple):
    """A multipart upload that is under way, or was forgotten. `started_at` in UTC seconds since the epoch."""

    key: str
    upload_id: str
    started_at: float


class ObjectStore:
    """One bucket. Safe to use from several threads. Every method raises StoreError when the store cannot be used."""

    def __init__(self, client: S3Client, bucket: str) -> None:
        self._client = client
        self.bucket = bucket

    @classmethod
    def open(cls, store: settings.Store) -> ObjectStore:
        """Return the store of the configuration; opens no connection yet."""
        return cls(make_client(store), store.bucket)

    def get(self, key: str) -> bytes:
        """Return the whole object. Raises ObjectMissing."""
        return self.get_with_etag(key)[0]

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        """Return the object and its etag. Raises ObjectMissing."""
        with _translated(f"reading {key}"):
            answer = self._client.get_object(Bucket=self.bucket, Key=key)
            return answer["Body"].read(), answer["ETag"]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return `length` bytes from `start` (fewer at the end of the object); `length` must be above 0."""
        with _translated(f"reading {key}"):
            answer = self._client.get_object(Bucket=self.bucket, Key=key, Range=f"bytes={start}-{start + length - 1}")
            return answer["Body"].read()

    def iterate(self, key: str, chunk_bytes: int = 1024 * 1024) -> Iterator[bytes]:
        """Yield the object in pieces of about `chunk_bytes`, in bounded memory."""
        with _translated(f"reading {key}"):
            body = self._client.get_object(Bucket=self.bucket, Key=key)["Body"]
            try:
                while piece := body.read(chunk_bytes):
                    yield piece
            finally:
                body.close()

    def iterate_range(self, key: str, start: int, length: int, chunk_bytes: int = 1024 * 1024) -> Iterator[bytes]:
        """Yield `length` bytes from `start` in pieces, in bounded memory (fewer at the object's end). None for 0."""
        if length <= 0:
            return
        with _translated(f"reading {key}"):
            wanted = f"bytes={start}-{start + length - 1}"
            body = self._client.get_object(Bucket=self.bucket, Key=key, Range=wanted)["Body"]
            try:
                while piece := body.read(chunk_bytes):
                    yield piece
            finally:
                body.close()

    def download(self, key: str, path: Path) -> None:
        """Write the object to a local file, several ranges at once. Killed half-way it leaves no file at `path`."""
        with _translated(f"downloading {key}"):
            self._client.download_file(self.bucket, key, str(path), Config=_transfer())

    def put(
        self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None, content_type: str = ""
    ) -> str:
        """Write one object atomically and return its etag. Raises PreconditionFailed where a condition was not met."""
        options: dict[str, Any] = {}
        if if_absent:
            options["IfNoneMatch"] = "*"
        if if_match is not None:
            options["IfMatch"] = if_match
        if content_type:
            options["ContentType"] = content_type
        with _translated(f"writing {key}"):
            return self._client.put_object(Bucket=self.bucket, Key=key, Body=data, **options)["ETag"]

    def upload(self, path: Path, key: str, metadata: dict[str, str] | None = None) -> None:
        """Write a local file, in parts where it is large; visible only when it is whole."""
        extra: dict[str, Any] = {"Metadata": metadata} if metadata else {}
        with _translated(f"uploading {key}"):
            self._client.upload_file(str(path), self.bucket, key, ExtraArgs=extra, Config=_transfer())

    def head(self, key: str) -> ObjectInfo | None:
        """Return what is known of the object, or None where there is none."""
        try:
            with _translated(f"looking up {key}"):
                answer = self._client.head_object(Bucket=self.bucket, Key=key)
        except ObjectMissing:
            return None
        return ObjectInfo(
            key, answer["ContentLength"], answer["ETag"], answer["LastModified"].timestamp(), answer["Metadata"]
        )

    def list(self, prefix: str, page: int = 1000, *, recursive: bool = True) -> Iterator[ObjectInfo]:
        """Yield the objects below `prefix`, a page of requests at a time, in the store's own order.

        With `recursive` off, only those that lie in no folder below it.
        """
        with _translated(f"listing {prefix}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket,
                Prefix=prefix,
                Delimiter="" if recursive else "/",
                PaginationConfig={"PageSize": page},
            )
            for answer in pages:
                for entry in answer.get("Contents", []):
                    yield ObjectInfo(entry["Key"], entry["Size"], entry["ETag"], entry["LastModified"].timestamp(), {})

    def list_folders(self, prefix: str) -> Iterator[str]:
        """Yield the folders directly below `prefix`, each as a prefix that ends in `/`, without the objects beside."""
        with _translated(f"listing {prefix}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=prefix, Delimiter="/"
            )
            for answer in pages:
                for entry in answer.get("CommonPrefixes", []):
                    yield entry["Prefix"]

    def copy(self, source: ObjectInfo, target: str) -> None:
        """Copy inside the store, only if the source still has the etag of `source`; no byte passes through us.

        Killed before its end, the target has what it had before.
        Raises PreconditionFailed where the source was overwritten, ObjectMissing where it was deleted.
        """
        if source.size <= MAX_COPY_BYTES:
            with _translated(f"copying {source.key}"):
                self._client.copy_object(
                    Bucket=self.bucket,
                    Key=target,
                    CopySource={"Bucket": self.bucket, "Key": source.key},
                    CopySourceIfMatch=source.etag,
                    MetadataDirective="REPLACE",
                )
            return
        part = max(COPY_PART_BYTES, -(-source.size // (2 * MANY_PARTS)))
        with (
            ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="copy") as pool,
            self.multipart(target, pool) as writer,
        ):
            for start in range(0, source.size, part):
                writer.copy_part(source.key, start, min(part, source.size - start), if_match=source.etag)

    def multipart(self, key: str, pool: ThreadPoolExecutor | None = None) -> MultipartWriter:
        """Return a writer of a large object from bytes and from ranges of other objects.

        With a pool, several parts are on their way at once, and an error shows with a later call.
        """
        return MultipartWriter(self._client, self.bucket, key, pool)

    def delete(self, key: str, if_match: str | None = None) -> None:
        """Remove the object; removing what is not there is no error.

        With `if_match`, only if it still has that etag: else raises PreconditionFailed, where the store honours it.
        """
        options: dict[str, Any] = {} if if_match is None else {"IfMatch": if_match}
        with _translated(f"deleting {key}"):
            self._client.delete_object(Bucket=self.bucket, Key=key, **options)

    def delete_all(self, keys: Iterable[str]) -> int:
        """Remove objects, a thousand with each request; returns how many. What is not there is no error.

        Killed half-way, some are gone. Raises StoreError, naming the first one, where the store refuses some.
        """
        count = 0
        pending = iter(keys)
        while some := list(itertools.islice(pending, MOST_DELETED)):
            with _translated(f"deleting {some[0]} and {len(some) - 1} more"):
                answer = self._client.delete_objects(
                    Bucket=self.bucket, Delete={"Objects": [{"Key": key} for key in some], "Quiet": True}
                )
            refused = [error for error in answer.get("Errors", []) if error.get("Code") not in _MISSING]
            if refused:
                first = refused[0]
                raise StoreError(f"deleting {first.get('Key')}: the object store answered {first.get('Code')}")
            count += len(some)
        return count

    def uploads(self, prefix: str) -> Iterator[UploadInfo]:
        """Yield the multipart uploads below `prefix` that were begun and neither completed nor aborted."""
        with _translated(f"listing uploads of {prefix}"):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=prefix)
            for answer in pages:
                for entry in answer.get("Uploads", []):
                    if entry["Key"].startswith(prefix):
                        yield UploadInfo(entry["Key"], entry["UploadId"], entry["Initiated"].timestamp())

    def abort_upload(self, upload: UploadInfo) -> None:
        """Forget a multipart upload and its parts; one that is completed or aborted meanwhile is no error."""
        try:
            with _translated(f"aborting {upload.key}"):
                self._client.abort_multipart_upload(Bucket=self.bucket, Key=upload.key, UploadId=upload.upload_id)
        except ObjectMissing:
            return


class MultipartWriter:
    """Writes one object in parts, in order. As a context manager it completes on success and aborts on an exception.

    Killed before `complete` nothing is visible (the parts are garbage of the store's own lifecycle); after it all is.
    Memory: one part, and with a pool UNSENT_BYTES more. To be used from one thread at a time.
    """

    def __init__(self, client: S3Client, bucket: str, key: str, pool: ThreadPoolExecutor | None = None) -> None:
        self._client = client
        self._bucket = bucket
        self._pool = pool
        self.key = key
        with _translated(f"writing {key}"):
            self._upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
        self._parts: list[Future[str]] = []
        """Their etags, in the order of their numbers; a done one without a pool."""
        self._unsent: deque[tuple[Future[str], int]] = deque()
        """Parts that may be on their way, with their bytes in memory."""
        self._buffer = io.BytesIO()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._buffer.write(data)
        self.size += len(data)
        if self._buffer.tell() >= (PART_BYTES if len(self._parts) < MANY_PARTS else LARGE_PART_BYTES):
            self._flush()

    @property
    def smallest_copy(self) -> int:
        """Bytes from which on a range is worth a part of its own: 5 MiB, and more once many parts have been used."""
        return MIN_PART_BYTES if len(self._parts) < MANY_PARTS else LARGE_PART_BYTES

    @property
    def can_copy(self) -> bool:
        """Whether a copied part may follow now: what is buffered must be empty or large enough to be a part."""
        return self._buffer.tell() == 0 or self._buffer.tell() >= MIN_PART_BYTES

    @property
    def missing_to_copy(self) -> int:
        """Bytes that have to be written before a copied part may follow."""
        return 0 if self.can_copy else MIN_PART_BYTES - self._buffer.tell()

    def copy_part(self, key: str, start: int, length: int, if_match: str | None = None) -> None:
        """Append a range of another object without reading it: at least 5 MiB, unless it is the last part."""
        if not self.can_copy:
            raise ValueError(f"{self.missing_to_copy} bytes have to be written before a part can be copied")
        self._flush()
        number = len(self._parts) + 1
        options: dict[str, Any] = {"CopySourceIfMatch": if_match} if if_match is not None else {}

        def copy() -> str:
            with _translated(f"copying {key}"):
                answer = self._client.upload_part_copy(
                    Bucket=self._bucket,
                    Key=self.key,
                    UploadId=self._upload,
                    PartNumber=number,
                    CopySource={"Bucket": self._bucket, "Key": key},
                    CopySourceRange=f"bytes={start}-{start + length - 1}",
                    **options,
                )
            return answer["CopyPartResult"]["ETag"]

        self._send(copy, 0)
        self.size += length

    def complete(self) -> None:
        """Make the object visible. An object of no bytes is written as a plain empty one."""
        if not self._parts and self._buffer.tell() == 0:
            self.abort()
            with _translated(f"writing {self.key}"):
                self._client.put_object(Bucket=self._bucket, Key=self.key, Body=b"")
            return
        self._flush()
        parts: list[CompletedPartTypeDef] = [
            {"PartNumber": number, "ETag": part.result()} for number, part in enumerate(self._parts, 1)
        ]
        with _translated(f"writing {self.key}"):
            self._client.complete_multipart_upload(
                Bucket=self._bucket, Key=self.key, UploadId=self._upload, MultipartUpload={"Parts": parts}
            )

    def abort(self) -> None:
        """Forget the parts; nothing becomes visible."""
        # A part that arrives after the abort would stay for ever.
        wait([part for part in self._parts if not part.cancel()])
        with _translated(f"aborting {self.key}"):
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=self.key, UploadId=self._upload)

    def _flush(self) -> None:
        data = self._buffer.getvalue()
        if not data:
            return
        number = len(self._parts) + 1

        def upload() -> str:
            with _translated(f"writing {self.key}"):
                return self._client.upload_part(
                    Bucket=self._bucket, Key=self.key, UploadId=self._upload, PartNumber=number, Body=data
                )["ETag"]

        self._send(upload, len(data))
        self._buffer = io.BytesIO()

    def _send(self, send: Callable[[], str], size: int) -> None:
        """Send a part, at once or in the pool; wait until no more than UNSENT_BYTES are on their way."""
        part: Future[str]
        if self._pool is None:
            part = Future()
            part.set_result(send())
        else:
            part = self._pool.submit(send)
            self._unsent.append((part, size))
        self._parts.append(part)
        while len(self._unsent) > MAX_UNSENT_PARTS or sum(bytes_ for _, bytes_ in self._unsent) > UNSENT_BYTES:
            self._unsent.popleft()[0].result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.complete()
        else:
            self.abort()


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


class _translated:  # noqa: N801 - reads as a word where it is used
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
            if code in _MISSING:
                raise ObjectMissing(f"{self._doing}: no such object") from error
            if code in _PRECONDITION:
                raise PreconditionFailed(f"{self._doing}: the object is not the one expected") from error
            raise StoreError(f"{self._doing}: the object store answered {code}: {one_line(str(error))}") from error
        if isinstance(error, ParamValidationError):
            raise StoreError(f"{self._doing}: not possible in S3: {one_line(str(error))}") from error
        if isinstance(error, BotoCoreError | Boto3Error):
            raise StoreError(f"{self._doing}: the object store cannot be reached: {one_line(str(error))}") from error


def _transfer() -> TransferConfig:
    return TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=4)


__all__ = ["MultipartWriter", "ObjectInfo", "ObjectMissing", "ObjectStore", "PreconditionFailed", "make_client"]
