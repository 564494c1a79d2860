"""Which requests have a `custom_id` that an earlier one has already: exact, in eight bytes a request.

Only hashes are kept. Requests whose hashes are equal are compared by their ids, which are read again from the file;
so a hash that two ids happen to share, or were made to share, costs a comparison and nothing else. The first request
that is valid keeps the id; one that cannot be run for another reason claims none.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

_PARTS = 16
"""Hashes are sorted in so many parts, by their value, so that sorting needs little memory beside them."""
_SLICE = 65_536
_SHIFT = 32
"""A pair of positions is one number of 64 bits; nobody takes files of four thousand million requests."""
_LOWER = (1 << _SHIFT) - 1

Positions = npt.NDArray[np.int64]


class CustomIds:
    """The custom_ids of a file's valid requests, in their order."""

    def __init__(self) -> None:
        self._hashes: array[int] = array("Q")

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, hashes: bytes) -> None:
        """Append the hashes of further requests, each a native unsigned number of 64 bits."""
        self._hashes.frombytes(hashes)

    def duplicates(self, read: Callable[[int], str]) -> Duplicates:
        """Return the later requests with an id that an earlier one has.

        `read` returns the id of the request at a position, counted from 0 in the order in which they were added.
        """
        hashes = np.frombuffer(self._hashes, dtype=np.uint64)
        found: array[int] = array("Q")
        for part in range(_PARTS):
            for positions in _equal(hashes, part):
                _compare(positions, read, found)
        return Duplicates(found)


class Duplicates:
    """Pairs of positions, in the order of the later one: a request, and the first one that has its id."""

    def __init__(self, pairs: array[int]) -> None:
        self._pairs = np.frombuffer(pairs, dtype=np.uint64)
        self._pairs.sort()

    def __len__(self) -> int:
        return len(self._pairs)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for start in range(0, len(self._pairs), _SLICE):
            for pair in self._pairs[start : start + _SLICE].tolist():
                yield pair >> _SHIFT, pair & _LOWER

    def between(self, start: int, end: int) -> Positions:
        """Return the positions of later requests from `start` to before `end`."""
        first, last = np.searchsorted(self._pairs, np.array([start << _SHIFT, end << _SHIFT], dtype=np.uint64))
        return (self._pairs[first:last] >> np.uint64(_SHIFT)).astype(np.int64)


def _equal(hashes: npt.NDArray[np.uint64], part: int) -> Iterator[Positions]:
    """Yield the positions, in their order, of each hash of this part that comes more than once."""
    where = np.flatnonzero((hashes >> np.uint64(60)) == part).astype(np.uint32)
    where = where[np.argsort(hashes[where], kind="stable")]
    ordered = hashes[where]
    same = ordered[1:] == ordered[:-1]
    del ordered
    if same.any():
        edges = np.flatnonzero(np.diff(same, prepend=False, append=False))
        for edge in range(0, len(edges), 2):
            yield where[int(edges[edge]) : int(edges[edge + 1]) + 1].astype(np.int64)


def _compare(positions: Positions, read: Callable[[int], str], found: array[int]) -> None:
    seen: dict[str, int] = {}
    for start in range(0, len(positions), _SLICE):
        for position in positions[start : start + _SLICE].tolist():
            earlier = seen.setdefault(read(position), position)
            if earlier != position:
                found.append(position << _SHIFT | earlier)
