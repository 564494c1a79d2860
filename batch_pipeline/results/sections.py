"""Checking, while the final files are read back, that chunks that were copied as a whole are what their commits
recorded.

A commit's hash covers the chunk's output lines followed by its error lines; in the final files the two lie apart. The
hash goes on over the error lines when both have been read; until then those few are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from batch_pipeline.ledger.records import Chunk
from batch_pipeline.results.assemble import Section
from batch_pipeline.results.contributions import name_of, result_of


class SectionHashes:
    """Feed `output` and `errors` with the blocks of the two files, in order; `problems` then says which chunks differ.

    Memory: the error lines of one chunk and a block of either file.
    """

    def __init__(self, sections: Sequence[Section]) -> None:
        self._chunks = [section.chunk for section in sections]
        self._outputs = _Walk(
            [(section.output_start, result_of(section.chunk).output_bytes) for section in sections], self._add_output
        )
        self._errors = _Walk(
            [(section.error_start, result_of(section.chunk).error_bytes) for section in sections], self._add_error
        )
        self._hashes = [hashlib.sha256() for _ in sections]
        self._early: dict[int, list[bytes]] = {}

    def output(self, block: bytes) -> None:
        """See the next block of the output file."""
        self._outputs.feed(block)
        for number in [number for number in self._early if self._outputs.has_passed(number)]:
            self._drain(number)

    def errors(self, block: bytes) -> None:
        """See the next block of the error file."""
        self._errors.feed(block)

    def problems(self) -> list[str]:
        """Return the chunks whose bytes are not those of their commit, each as one sentence. Call it at the end."""
        for number in list(self._early):
            self._drain(number)
        return [
            f"{name_of(chunk)}: its lines in the final files do not have the sha256 that its commit recorded"
            for chunk, digest in zip(self._chunks, self._hashes, strict=True)
            if digest.hexdigest() != _expected(chunk)
        ]

    def _add_output(self, number: int, piece: memoryview) -> None:
        self._hashes[number].update(piece)

    def _add_error(self, number: int, piece: memoryview) -> None:
        if self._outputs.has_passed(number):
            self._hashes[number].update(piece)
        else:
            self._early.setdefault(number, []).append(bytes(piece))

    def _drain(self, number: int) -> None:
        for piece in self._early.pop(number, []):
            self._hashes[number].update(piece)


class _Walk:
    """Splits a stream of blocks at the bounds of sections (start, length) that are in order and do not overlap."""

    def __init__(self, sections: Sequence[tuple[int, int]], add: Callable[[int, memoryview], None]) -> None:
        self._sections = sections
        self._add = add
        self._position = 0
        self._current = 0

    def has_passed(self, number: int) -> bool:
        """Whether all bytes of a section have been seen."""
        start, length = self._sections[number]
        return self._position >= start + length

    def feed(self, block: bytes) -> None:
        """See the next block."""
        begin, end = self._position, self._position + len(block)
        view = memoryview(block)
        while self._current < len(self._sections):
            start, length = self._sections[self._current]
            low, high = max(start, begin), min(start + length, end)
            if low < high:
                self._add(self._current, view[low - begin : high - begin])
            if start + length > end:
                break
            self._current += 1
        self._position = end


def _expected(chunk: Chunk) -> str:
    return result_of(chunk).sha256
