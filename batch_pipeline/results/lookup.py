"""Finding one request's line in files of any size.

Result files are in index order and are searched by bisection; the input has no ids and is read from its beginning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from batch_pipeline import ids
from batch_pipeline.results.proof import label_of
from batch_pipeline.results.streams import HashedObject
from batch_pipeline.store import ObjectStore

_WINDOW_BYTES = 256 * 1024
"""First read of a probe; it is doubled until a line begins and ends inside."""
_ID = re.compile(rb'\{"id":"([A-Za-z0-9_]{1,200})"')


class Place(NamedTuple):
    """A line in an object: its bytes without the newline are at `offset`."""

    key: str
    offset: int
    data: bytes


class InputLine(msgspec.Struct, frozen=True):
    """A request's line in the input; `label` is its custom_id, None where it has none that can be read."""

    index: int
    label: str | None
    offset: int
    length: int


def find_result(store: ObjectStore, batch_id: str, key: str, index: int) -> Place | None:
    """Return the line of request `index` in a result file, or None where it is not where it belongs.

    Cost: about log2(size / 256 KiB) ranged reads. Raises StoreError.
    """
    info = store.head(key)
    # The line, if there is one, begins at `low` or after it and before `high`; at `low` a line begins.
    low, high = 0, 0 if info is None else info.size
    while high - low > _WINDOW_BYTES:
        middle = (low + high) // 2
        place = _first_line(store, key, middle, high)
        if place is None:
            high = middle
            continue
        found = _index_of(batch_id, place.data)
        if found is None:
            return None
        if found == index:
            return place
        if found < index:
            low = place.offset + len(place.data) + 1
        else:
            high = middle
    return _scan(store, batch_id, key, index, low=low, high=high)


def find_input(
    store: ObjectStore, key: str, *, custom_id: str | None = None, index: int | None = None
) -> Iterator[InputLine]:
    """Yield the input's lines with this custom_id (there may be duplicates, all but one invalid), or with this index.

    Reads the input up to the line with the index, or to its end. Blank lines are no requests.
    """
    offset = 0
    for number, line in enumerate(HashedObject(store, key).lines()):
        length = 0 if line is None else len(line)
        if line and not line.isspace() and (index is None or number == index):
            label = label_of(line)
            if index is not None or label == custom_id:
                yield InputLine(number, label, offset, length)
        if index is not None and number >= index:
            return
        offset += length + 1


def _scan(store: ObjectStore, batch_id: str, key: str, index: int, *, low: int, high: int) -> Place | None:
    """Look at every line that begins in a range of at most a window, at whose start a line begins."""
    size = high - low
    while size > 0:
        data = store.get_range(key, low, size)
        offset = 0
        while low + offset < high and (end := data.find(b"\n", offset)) >= 0:
            if _index_of(batch_id, data[offset:end]) == index:
                return Place(key, low + offset, data[offset:end])
            offset = end + 1
        if low + offset >= high or len(data) < size:
            return None
        # The last line goes on behind the range.
        size *= 2
    return None


def _first_line(store: ObjectStore, key: str, start: int, end: int) -> Place | None:
    """Return the first line that begins at `start` or after it and before `end`."""
    # One byte before: a line begins at `start` where that is a newline.
    begin = max(start - 1, 0)
    window = _WINDOW_BYTES
    while True:
        data = store.get_range(key, begin, window)
        first = 0 if start == 0 else data.find(b"\n") + 1
        if first or start == 0:
            if begin + first >= end:
                return None
            last = data.find(b"\n", first)
            if last >= 0:
                return Place(key, begin + first, data[first:last])
        if len(data) < window:
            return None
        window *= 2


def _index_of(batch_id: str, line: bytes) -> int | None:
    found = _ID.match(line)
    return None if found is None else ids.index_of(batch_id, found[1].decode())
