"""Objects that are written in parts, some of which are copied inside the store."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from batch_pipeline.store.client import translated

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

MIN_PART_BYTES = 5 * 1024 * 1024
"""S3's smallest part, except for the last of an object."""
PART_BYTES = 16 * 1024 * 1024
MANY_PARTS = 5_000
"""Half of the parts that S3 allows: from there on parts are larger, so that 10,000 make more than 300 GB."""
LARGE_PART_BYTES = 64 * 1024 * 1024
UNSENT_BYTES = 64 * 1024 * 1024
"""Most bytes of a multipart upload that wait in memory while they are sent."""
MAX_UNSENT_PARTS = 8


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
        with translated(f"writing {key}"):
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
            with translated(f"copying {key}"):
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
            with translated(f"writing {self.key}"):
                self._client.put_object(Bucket=self._bucket, Key=self.key, Body=b"")
            return
        self._flush()
        parts: list[CompletedPartTypeDef] = [
            {"PartNumber": number, "ETag": part.result()} for number, part in enumerate(self._parts, 1)
        ]
        with translated(f"writing {self.key}"):
            self._client.complete_multipart_upload(
                Bucket=self._bucket, Key=self.key, UploadId=self._upload, MultipartUpload={"Parts": parts}
            )

    def abort(self) -> None:
        """Forget the parts; nothing becomes visible."""
        # A part that arrives after the abort would stay for ever.
        wait([part for part in self._parts if not part.cancel()])
        with translated(f"aborting {self.key}"):
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=self.key, UploadId=self._upload)

    def _flush(self) -> None:
        data = self._buffer.getvalue()
        if not data:
            return
        number = len(self._parts) + 1

        def upload() -> str:
            with translated(f"writing {self.key}"):
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
