"""Assembling output.jsonl and errors.jsonl in index order, in one pass over the chunks.

Chunks whose index ranges overlap form a group (see `scatter`); groups follow each other in index order. A group of a
single committed chunk gives its two sections as they are, copied inside the store where they are large enough. The
error lines that intake found are woven between the chunks' own.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batch_pipeline.errors import ProofFailed
from batch_pipeline.ledger.records import Batch, Chunk, ChunkState
from batch_pipeline.results import contributions
from batch_pipeline.results.contributions import Contribution
from batch_pipeline.results.invalid import InvalidLines
from batch_pipeline.results.scatter import Kept, SortedLines, scatter
from batch_pipeline.results.writer import FileWriter
from batch_pipeline.store import ObjectStore
from batch_pipeline.store.multipart import MIN_PART_BYTES
from batch_pipeline.wire.chunk_files import LinesTable

THREADS = 8
"""Reads of the store at once."""
_AHEAD = 16
"""Chunks that are read before their turn: with THREADS, what bounds memory to that many chunks."""
_BLOCK_BYTES = 4 * 1024 * 1024


class Section(NamedTuple):
    """A chunk that was taken as a whole: where its lines lie in both files, for the check of its hash afterwards."""

    chunk: Chunk
    output_start: int
    error_start: int


@dataclass
class Assembled:
    """What was written, and what the stopped chunks had kept (by chunk number)."""

    output_bytes: int
    error_bytes: int
    copied_bytes: int
    sections: list[Section]
    kept: dict[int, Kept]


def groups(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Return the chunks in index order, those with overlapping index ranges together."""
    found: list[list[Chunk]] = []
    last = -1
    for chunk in sorted(chunks, key=lambda chunk: (chunk.first_index, chunk.chunk)):
        if found and chunk.first_index <= last:
            found[-1].append(chunk)
        else:
            found.append([chunk])
        last = max(last, chunk.last_index)
    return found


def assemble(
    batch: Batch, chunks: Sequence[Chunk], *, store: ObjectStore, scratch: Path, output_key: str, error_key: str
) -> Assembled:
    """Write both files; one that has no line is not written.

    Killed at any time, each of the two keys has what it had before or the whole file. The bytes depend on the chunks
    alone, so that it does not matter how often, and by how many at once, this is done (invariant I5).
    Raises ProofFailed, naming the chunk, where a line would be missing or double.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(THREADS, thread_name_prefix="merge"))
        # On an error what has not begun is dropped, so that leaving the pool waits for what runs and no longer.
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        output = stack.enter_context(FileWriter(store, output_key, pool))
        errors = stack.enter_context(FileWriter(store, error_key, pool))
        assembler = _Assembler(batch, store, scratch=scratch, pool=pool, output=output, errors=errors)
        for group, ahead in _with_lookahead(batch, groups(chunks), store, pool):
            assembler.add(group, ahead)
        return assembler.finish()


class _Assembler:
    """The pass: one call of `add` for each group, in order."""

    def __init__(
        self,
        batch: Batch,
        store: ObjectStore,
        *,
        scratch: Path,
        pool: ThreadPoolExecutor,
        output: FileWriter,
        errors: FileWriter,
    ) -> None:
        self._batch = batch
        self._store = store
        self._scratch = scratch
        self._pool = pool
        self._output = output
        self._errors = errors
        self._invalid = InvalidLines(store, batch.batch_id, batch.invalid_key)
        self._sections: list[Section] = []
        self._kept: dict[int, Kept] = {}

    def add(self, group: Sequence[Chunk], ahead: bytes | Contribution | None) -> None:
        """Append a group's lines to both files; `ahead` is what was read of a single chunk before its turn."""
        if len(group) > 1:
            with scatter(self._batch, group, self._store, self._scratch, self._pool) as scattered:
                self._kept.update(scattered.kept)
                for block in iter(lambda: scattered.output.file.read(_BLOCK_BYTES), b""):
                    self._output.write(block)
                self._weave(scattered.errors, max(chunk.last_index for chunk in group))
            return
        (chunk,) = group
        if isinstance(ahead, Contribution):
            self._add_stopped(chunk, ahead)
        elif ahead is not None:
            self._add_small(chunk, ahead)
        else:
            self._add_large(chunk)

    def finish(self) -> Assembled:
        """Append the invalid lines that are left, and make both files visible."""
        self._invalid.rest(self._errors)
        self._output.finish()
        self._errors.finish()
        return Assembled(
            output_bytes=self._output.size,
            error_bytes=self._errors.size,
            copied_bytes=self._output.copied_bytes + self._errors.copied_bytes,
            sections=self._sections,
            kept=self._kept,
        )

    def _add_stopped(self, chunk: Chunk, stopped: Contribution) -> None:
        self._kept[chunk.chunk] = Kept(stopped.completed, stopped.failed, stopped.usage)
        data = memoryview(stopped.data)
        self._output.write(data[: stopped.output_bytes])
        self._weave(_error_lines(stopped.table, data[stopped.output_bytes :]), chunk.last_index)

    def _add_small(self, chunk: Chunk, data: bytes) -> None:
        output_bytes = contributions.result_of(chunk).output_bytes
        view = memoryview(data)
        self._output.write(view[:output_bytes])
        if self._has_errors_to_weave(chunk):
            table = contributions.committed_table(chunk, self._store)
            self._weave(_error_lines(table, view[output_bytes:]), chunk.last_index)
        else:
            self._errors.write(view[output_bytes:])

    def _add_large(self, chunk: Chunk) -> None:
        """Take both sections as they are, without reading them where they are large enough."""
        result = contributions.result_of(chunk)
        weave = self._has_errors_to_weave(chunk)
        if not weave:
            self._sections.append(Section(chunk, self._output.size, self._errors.size))
        self._output.append(result.result_key, 0, result.output_bytes)
        if weave:
            table = contributions.committed_table(chunk, self._store)
            section = self._store.get_range(result.result_key, result.output_bytes, result.error_bytes)
            self._weave(_error_lines(table, memoryview(section)), chunk.last_index)
        elif result.error_bytes:
            self._errors.append(result.result_key, result.output_bytes, result.error_bytes)

    def _has_errors_to_weave(self, chunk: Chunk) -> bool:
        """Whether invalid lines come between the chunk's error lines; those before all of them are written here."""
        if not contributions.result_of(chunk).error_bytes:
            return False
        self._invalid.until(chunk.first_index, self._errors)
        following = self._invalid.index
        return following is not None and following <= chunk.last_index

    def _weave(self, lines: SortedLines, last_index: int) -> None:
        """Append error lines of chunks, with the invalid lines up to `last_index` in their places between them."""
        if not len(lines.index):
            return
        ends = np.cumsum(lines.length, dtype=np.int64)
        written = 0
        while (index := self._invalid.index) is not None and index <= last_index:
            before = int(np.searchsorted(lines.index, index))
            if before < len(lines.index) and lines.index[before] == index:
                raise ProofFailed(
                    [f"request {index} of {self._batch.batch_id} is invalid, and yet a chunk has its result"]
                )
            if before == len(lines.index):
                break
            end = int(ends[before - 1]) if before else 0
            self._copy(lines, end - written)
            written = end
            # All invalid lines up to the next line of a chunk.
            self._invalid.until(int(lines.index[before]), self._errors)
        self._copy(lines, int(ends[-1]) - written)

    def _copy(self, lines: SortedLines, length: int) -> None:
        while length:
            block = lines.file.read(min(length, _BLOCK_BYTES))
            if not block:
                raise ProofFailed([f"the error lines of {self._batch.batch_id} end too early"])
            self._errors.write(block)
            length -= len(block)


def _error_lines(table: LinesTable, data: memoryview) -> SortedLines:
    index: npt.NDArray[np.int64] = table.index[table.is_error]
    return SortedLines(index, table.length[table.is_error], io.BytesIO(data))


def _with_lookahead(
    batch: Batch, ordered: Sequence[list[Chunk]], store: ObjectStore, pool: ThreadPoolExecutor
) -> Iterator[tuple[list[Chunk], bytes | Contribution | None]]:
    """Yield the groups with what could be read before their turn: small results, and what stopped chunks contribute."""

    def read(chunk: Chunk) -> bytes | Contribution:
        if chunk.state == ChunkState.COMMITTED:
            return contributions.committed_bytes(chunk, store)
        return contributions.of_stopped(batch, chunk, store)

    window: deque[tuple[list[Chunk], Future[bytes | Contribution] | None]] = deque()
    for group in ordered:
        ahead = pool.submit(read, group[0]) if len(group) == 1 and not _is_large(group[0]) else None
        window.append((group, ahead))
        if len(window) > _AHEAD:
            first, future = window.popleft()
            yield first, None if future is None else future.result()
    for first, future in window:
        yield first, None if future is None else future.result()


def _is_large(chunk: Chunk) -> bool:
    """Whether copying inside the store may be possible for a section of the chunk's result."""
    result = chunk.result
    return (
        chunk.state == ChunkState.COMMITTED
        and result is not None
        and (max(result.output_bytes, result.error_bytes) >= MIN_PART_BYTES)
    )
