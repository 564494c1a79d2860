"""The object store: S3 through boto3, with the few operations that the invariants rest on.

A put of one object is atomic: killed before or during it, nothing is visible; after it, the whole object is. A
multipart object is visible only once it is completed. Completing a multipart upload is never used to decide a race:
some stores ignore its condition (docs/decisions.md). Races are decided by `put(..., if_absent / if_match)` of a small
object, or by the ledger.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from boto3.s3.transfer import TransferConfig

from batch_pipeline import settings
from batch_pipeline.errors import StoreError
from batch_pipeline.store.client import MISSING, ObjectMissing, make_client, translated
from batch_pipeline.store.multipart import MANY_PARTS, PART_BYTES, MultipartWriter

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

MAX_COPY_BYTES = 1024**3
"""Larger objects are copied in parts, several at once: one call for each would take minutes (and S3 takes 5 GiB)."""
COPY_PART_BYTES = 256 * 1024 * 1024
COPY_THREADS = 8
MOST_DELETED = 1000
"""S3's most objects in one request to delete."""


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
        with translated(f"reading {key}"):
            answer = self._client.get_object(Bucket=self.bucket, Key=key)
            return answer["Body"].read(), answer["ETag"]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return `length` bytes from `start` (fewer at the end of the object); `length` must be above 0."""
        with translated(f"reading {key}"):
            answer = self._client.get_object(Bucket=self.bucket, Key=key, Range=f"bytes={start}-{start + length - 1}")
            return answer["Body"].read()

    def iterate(self, key: str, chunk_bytes: int = 1024 * 1024) -> Iterator[bytes]:
        """Yield the object in pieces of about `chunk_bytes`, in bounded memory."""
        with translated(f"reading {key}"):
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
        with translated(f"reading {key}"):
            wanted = f"bytes={start}-{start + length - 1}"
            body = self._client.get_object(Bucket=self.bucket, Key=key, Range=wanted)["Body"]
            try:
                while piece := body.read(chunk_bytes):
                    yield piece
            finally:
                body.close()

    def download(self, key: str, path: Path) -> None:
        """Write the object to a local file, several ranges at once. Killed half-way it leaves no file at `path`."""
        with translated(f"downloading {key}"):
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
        with translated(f"writing {key}"):
            return self._client.put_object(Bucket=self.bucket, Key=key, Body=data, **options)["ETag"]

    def upload(self, path: Path, key: str, metadata: dict[str, str] | None = None) -> None:
        """Write a local file, in parts where it is large; visible only when it is whole."""
        extra: dict[str, Any] = {"Metadata": metadata} if metadata else {}
        with translated(f"uploading {key}"):
            self._client.upload_file(str(path), self.bucket, key, ExtraArgs=extra, Config=_transfer())

    def head(self, key: str) -> ObjectInfo | None:
        """Return what is known of the object, or None where there is none."""
        try:
            with translated(f"looking up {key}"):
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
        with translated(f"listing {prefix}"):
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
        with translated(f"listing {prefix}"):
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
            with translated(f"copying {source.key}"):
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
        with translated(f"deleting {key}"):
            self._client.delete_object(Bucket=self.bucket, Key=key, **options)

    def delete_all(self, keys: Iterable[str]) -> int:
        """Remove objects, a thousand with each request; returns how many. What is not there is no error.

        Killed half-way, some are gone. Raises StoreError, naming the first one, where the store refuses some.
        """
        count = 0
        pending = iter(keys)
        while some := list(itertools.islice(pending, MOST_DELETED)):
            with translated(f"deleting {some[0]} and {len(some) - 1} more"):
                answer = self._client.delete_objects(
                    Bucket=self.bucket, Delete={"Objects": [{"Key": key} for key in some], "Quiet": True}
                )
            refused = [error for error in answer.get("Errors", []) if error.get("Code") not in MISSING]
            if refused:
                first = refused[0]
                raise StoreError(f"deleting {first.get('Key')}: the object store answered {first.get('Code')}")
            count += len(some)
        return count

    def uploads(self, prefix: str) -> Iterator[UploadInfo]:
        """Yield the multipart uploads below `prefix` that were begun and neither completed nor aborted."""
        with translated(f"listing uploads of {prefix}"):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=prefix)
            for answer in pages:
                for entry in answer.get("Uploads", []):
                    if entry["Key"].startswith(prefix):
                        yield UploadInfo(entry["Key"], entry["UploadId"], entry["Initiated"].timestamp())

    def abort_upload(self, upload: UploadInfo) -> None:
        """Forget a multipart upload and its parts; one that is completed or aborted meanwhile is no error."""
        try:
            with translated(f"aborting {upload.key}"):
                self._client.abort_multipart_upload(Bucket=self.bucket, Key=upload.key, UploadId=upload.upload_id)
        except ObjectMissing:
            return


def _transfer() -> TransferConfig:
    return TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=4)
