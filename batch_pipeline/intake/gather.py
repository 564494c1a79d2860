"""Parts of many lines taken out of the local copy of a file at once, without an object for each of them."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Places = npt.NDArray[np.int64]


class MappedFile:
    """A local file that is whole and does not change, mapped into memory; not of 0 bytes.

    What was read of it counts as memory of this process until `release`. It is unmapped once nobody refers to it.
    """

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        self._buffer = pa.py_buffer(self._map)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)

    @property
    def size(self) -> int:
        """Its bytes."""
        return len(self._bytes)

    def at(self, places: Places) -> npt.NDArray[np.uint8]:
        """Return the byte at each place. Raises IndexError for one that is not in the file."""
        return self._bytes[places]

    def read(self, start: int, length: int) -> bytes:
        """Return `length` bytes from `start`, fewer at the end of the file."""
        return self._map[start : start + length]

    def take(self, starts: Places, lengths: Places) -> pa.Array:
        """Return parts of the file, in the order given, as an array of binary. No two of them may overlap."""
        order = np.argsort(starts, kind="stable")
        # An array of the parts and of what lies between them needs no copy; every second element is a part.
        edges = np.column_stack((starts[order], (starts + lengths)[order])).reshape(-1)
        buffers = [None, pa.py_buffer(np.ascontiguousarray(edges, dtype=np.int64)), self._buffer]
        pieces = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(edges) - 1, buffers)
        wanted = np.empty(len(starts), dtype=np.int64)
        wanted[order] = np.arange(0, len(edges), 2)
        return pieces.take(pa.array(wanted)).cast(pa.binary())

    def release(self) -> None:
        """Give back the memory of what was read; reading it again is possible."""
        self._map.madvise(mmap.MADV_DONTNEED)
