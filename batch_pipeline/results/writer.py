"""Writing one final file from bytes and from ranges of other objects, copied inside the store where it allows that."""

from __future__ import annotations

import io
import itertools
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from batch_pipeline.errors import ProofFailed
from batch_pipeline.store import ObjectStore
from batch_pipeline.store.multipart import MIN_PART_BYTES, MultipartWriter
from batch_pipeline.store.objects import COPY_PART_BYTES

_READ_BYTES = 8 * 1024 * 1024


class FileWriter:
    """Writes the object at `key`. A file of few bytes is one put, a larger one a multipart upload; one of none is
    not written.

    Killed before `finish` has returned, the key is as it was before; afterwards it has the whole file. Parts of an
    upload that was never completed are the store's to collect. As a context manager it aborts on an exception.
    Memory: about two parts; with a pool, in which parts are then sent, `store.multipart.UNSENT_BYTES` more.
    """

    def __init__(self, store: ObjectStore, key: str, pool: ThreadPoolExecutor | None = None) -> None:
        self._store = store
        self._pool = pool
        self._small: io.BytesIO | None = io.BytesIO()
        self._parts: MultipartWriter | None = None
        self._is_open = True
        self.key = key
        self.size = 0
        self.copied_bytes = 0
        """Of `size`, the bytes that did not pass through here."""

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self.size += len(data)
        if self._small is not None:
            self._small.write(data)
            if self._small.tell() >= MIN_PART_BYTES:
                self._upload()
            return
        self._upload().write(data)

    def append(self, key: str, start: int, length: int) -> None:
        """Append a range of another object: without reading it, except for what is too small to be a part."""
        if length < MIN_PART_BYTES:
            self._stream(key, start, length)
            return
        parts = self._upload()
        head = parts.missing_to_copy
        if length - head < parts.smallest_copy:
            self._stream(key, start, length)
            return
        self._stream(key, start, head)
        start, length = start + head, length - head
        # Pieces of equal size, so that none of them is too small for a part.
        pieces = -(-length // COPY_PART_BYTES)
        bounds = [start + length * piece // pieces for piece in range(pieces + 1)]
        for begin, end in itertools.pairwise(bounds):
            parts.copy_part(key, begin, end - begin)
        self.size += length
        self.copied_bytes += length

    def finish(self) -> None:
        """Make the file visible. Nothing is written where it has no bytes."""
        if self._parts is not None:
            self._parts.complete()
            self._is_open = False
        elif self._small is not None and self.size:
            self._store.put(self.key, self._small.getvalue())

    def _upload(self) -> MultipartWriter:
        if self._parts is None:
            self._parts = self._store.multipart(self.key, self._pool)
        if self._small is not None:
            self._parts.write(self._small.getbuffer())
            self._small = None
        return self._parts

    def _stream(self, key: str, start: int, length: int) -> None:
        end = start + length
        while start < end:
            data = self._store.get_range(key, start, min(_READ_BYTES, end - start))
            if not data:
                raise ProofFailed([f"{key} ends before byte {end}"])
            self.write(data)
            start += len(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._parts is not None and self._is_open:
            self._parts.abort()
