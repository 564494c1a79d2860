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

    def duplicates(self, read: Callable[[int], str]) -> tuple[Positions, Positions]:
        """Return the positions of later requests with an id that an earlier one has, ascending, and of the first ones.

        `read` returns the id of the request at a position, counted from 0 in the order in which they were added.
        """
        hashes = np.frombuffer(self._hashes, dtype=np.uint64)
        later: array[int] = array("q")
        first: array[int] = array("q")
        for part in range(_PARTS):
            where = np.flatnonzero((hashes >> np.uint64(60)) == part)
            where = where[np.argsort(hashes[where], kind="stable")]
            same = hashes[where[1:]] == hashes[where[:-1]]
            for start, end in _runs(same):
                _compare(where[start : end + 1], read, later, first)
        order = np.argsort(np.frombuffer(later, dtype=np.int64), kind="stable")
        return np.frombuffer(later, dtype=np.int64)[order], np.frombuffer(first, dtype=np.int64)[order]


def _runs(same: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield where runs of equal neighbours start and end."""
    if same.any():
        edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
        for edge in range(0, len(edges), 2):
            yield int(edges[edge]), int(edges[edge + 1])


def _compare(positions: Positions, read: Callable[[int], str], later: array[int], first: array[int]) -> None:
    seen: dict[str, int] = {}
    for start in range(0, len(positions), _SLICE):
        for position in positions[start : start + _SLICE].tolist():
            earlier = seen.setdefault(read(position), position)
            if earlier != position:
                later.append(position)
                first.append(earlier)
