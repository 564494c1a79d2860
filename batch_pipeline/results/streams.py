"""Lines of large objects, read once, in order, in bounded memory; their hash and size are known at the end."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

from batch_pipeline.store import ObjectStore

BLOCK_BYTES = 4 * 1024 * 1024
MAX_LINE_BYTES = 256 * 1024 * 1024
"""A longer line is reported as None: no such line was ever accepted or written, and memory stays bounded."""


class HashedObject:
    """One object of the store, read once from its beginning. `sha256`, `size` and `ends_whole` are those of what was
    read.

    `tap` sees every block, in order.
    """

    def __init__(self, store: ObjectStore, key: str, tap: Callable[[bytes], None] | None = None) -> None:
        self._store = store
        self._tap = tap
        self._hash = hashlib.sha256()
        self.key = key
        self.size = 0
        self.ends_whole = True
        """Whether the last byte was a newline (true of an object without bytes)."""

    @property
    def sha256(self) -> str:
        """Of the bytes read so far, in hexadecimal."""
        return self._hash.hexdigest()

    def blocks(self) -> Iterator[bytes]:
        """Yield the object's bytes. Raises ObjectMissing, StoreError."""
        for block in self._store.iterate(self.key, BLOCK_BYTES):
            self._hash.update(block)
            self.size += len(block)
            self.ends_whole = block.endswith(b"\n")
            if self._tap is not None:
                self._tap(block)
            yield block

    def lines(self) -> Iterator[bytes | None]:
        """Yield the lines without their newline; the last one may lack it. None stands for a line of absurd length."""
        return split_lines(self.blocks())


def split_lines(blocks: Iterator[bytes], limit: int = MAX_LINE_BYTES) -> Iterator[bytes | None]:
    """Yield the lines in a stream of bytes, without their newline; None for those of more than `limit` bytes.

    Only `\\n` ends a line, as in the file's line numbers. Memory: the longest line below the limit, and a block.
    """
    pending: list[bytes] = []
    size = 0
    for block in blocks:
        lines = block.split(b"\n")
        if len(lines) == 1:
            size += len(block)
            if size <= limit:
                pending.append(block)
            else:
                pending.clear()
            continue
        size += len(lines[0])
        pending.append(lines[0])
        yield b"".join(pending) if size <= limit else None
        for line in lines[1:-1]:
            yield line if len(line) <= limit else None
        pending = [lines[-1]]
        size = len(lines[-1])
    if size > limit:
        yield None
    elif size:
        yield b"".join(pending)
