"""Lines of the local copy of a file, read and taken apart many at once, without an object for each of them."""

from __future__ import annotations

import os
from itertools import repeat

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batch_pipeline.errors import ProofFailed

Places = npt.NDArray[np.int64]

_GAP_BYTES = 4096
"""Lines that are no further apart are read in one piece, with what lies between them."""


class Lines:
    """Some lines of an open file, in memory. Raises ProofFailed where the file ends before one of them does.

    Memory: their bytes, and at most _GAP_BYTES more for each.
    """

    def __init__(self, descriptor: int, offsets: Places, lengths: Places) -> None:
        order = np.argsort(offsets, kind="stable")
        starts, ends = offsets[order], (offsets + lengths)[order]
        breaks = np.flatnonzero(starts[1:] - ends[:-1] > _GAP_BYTES) + 1
        firsts, lasts = np.concatenate(([0], breaks)), np.concatenate((breaks, [len(starts)])) - 1
        sizes = ends[lasts] - starts[firsts]
        data = b"".join(map(os.pread, repeat(descriptor), sizes.tolist(), starts[firsts].tolist()))
        if len(data) != sizes.sum():
            raise ProofFailed(["the input ends before the last of the lines that were validated"])
        shifts = np.cumsum(sizes) - sizes - starts[firsts]
        self._starts = np.empty_like(offsets)
        self._starts[order] = starts + np.repeat(shifts, lasts - firsts + 1)
        self._lengths = lengths
        self._data = data
        self._bytes = np.frombuffer(data, dtype=np.uint8)

    def line(self, row: int) -> bytes:
        """Return one line."""
        start = int(self._starts[row])
        return self._data[start : start + int(self._lengths[row])]

    def at(self, places: Places) -> npt.NDArray[np.uint8]:
        """Return of each line the byte at its own place."""
        found: npt.NDArray[np.uint8] = self._bytes[self._starts + places]
        return found

    def parts(self, starts: Places, lengths: Places) -> pa.Array:
        """Return a part of each line as an array of binary: `lengths` bytes from `starts`."""
        begin = self._starts + starts
        order = np.argsort(begin, kind="stable")
        # An array of the parts and of what lies between them needs no copy; every second element is a part.
        edges = np.column_stack((begin[order], (begin + lengths)[order])).reshape(-1)
        buffers = [None, pa.py_buffer(edges), pa.py_buffer(self._data)]
        pieces = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(edges) - 1, buffers)
        wanted = np.empty(len(begin), dtype=np.int64)
        wanted[order] = np.arange(0, len(edges), 2)
        return pieces.take(pa.array(wanted)).cast(pa.binary())
