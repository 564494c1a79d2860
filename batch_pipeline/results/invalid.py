"""The error lines that intake found, read in index order while the chunks' own error lines are written."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from batch_pipeline import ids
from batch_pipeline.errors import ProofFailed
from batch_pipeline.results.streams import split_lines
from batch_pipeline.results.writer import FileWriter
from batch_pipeline.store import ObjectStore


class _Identified(msgspec.Struct):
    """What tells a result line's request."""

    id: str


_decoder = msgspec.json.Decoder(_Identified)


class InvalidLines:
    """A cursor over the lines; nothing is read before it is needed, and what is left at the end need not be read at
    all.

    Memory: one block of the object.
    """

    def __init__(self, store: ObjectStore, batch_id: str, key: str | None) -> None:
        self._store = store
        self._batch_id = batch_id
        self._key = key
        self._lines: Iterator[bytes | None] | None = None
        self._line = b""
        self._index: int | None = None
        self._offset = 0
        """Of the current line in the object."""

    @property
    def index(self) -> int | None:
        """The request of the current line, or None where no line is left."""
        if self._key is not None and self._lines is None:
            self._lines = split_lines(self._store.iterate(self._key))
            self._step()
        return self._index

    def until(self, index: int, target: FileWriter) -> None:
        """Append the lines of requests below `index`."""
        while (current := self.index) is not None and current < index:
            target.write(self._line + b"\n")
            self._offset += len(self._line) + 1
            self._step()

    def rest(self, target: FileWriter) -> None:
        """Append all lines that are left, as one range. Raises ProofFailed where the object is gone."""
        if self._key is None or (self._lines is not None and self._index is None):
            return
        info = self._store.head(self._key)
        if info is None:
            raise ProofFailed([f"the invalid lines of {self._batch_id} are not at {self._key} any more"])
        target.append(self._key, self._offset, info.size - self._offset)

    def _step(self) -> None:
        before = self._index
        line = next(self._lines or iter(()), None)
        if line is None:
            self._index = None
            return
        self._line = line
        try:
            self._index = ids.index_of(self._batch_id, _decoder.decode(line).id)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._index = None
        if self._index is None or (before is not None and self._index <= before):
            raise ProofFailed([f"{self._key}: not a line of {self._batch_id}, or out of order, at byte {self._offset}"])
