"""Putting the lines of chunks that interleave into index order, on local disk.

Chunks are cut from requests that were ordered by prefix, so the index ranges of several may overlap (only inside one
segment of intake). Their tables of lines say where each line belongs: a cumulative sum over all lines in index order
gives every line's offset, each chunk's object is read once from its beginning, and its lines are written to their
offsets.

Memory: 17 bytes for each request of the group, and a block for each thread. Disk: the bytes of the group, in files
without a name, so that a process that is killed leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from batch_pipeline.errors import ProofFailed
from batch_pipeline.ledger.records import Batch, Chunk, ChunkState
from batch_pipeline.results import contributions
from batch_pipeline.results.manifest import Usage
from batch_pipeline.store import ObjectStore
from batch_pipeline.wire.chunk_files import LinesTable

_BLOCK_BYTES = 1024 * 1024
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True)
class SortedLines:
    """Lines in index order: which they are, how long each is, and a file positioned at the first of them."""

    index: npt.NDArray[np.int64]
    length: npt.NDArray[np.int32]
    file: IO[bytes]


class Kept(NamedTuple):
    """What the checkpoints of a stopped chunk had: for its entry in the manifest."""

    completed: int
    failed: int
    usage: Usage


class Scattered(NamedTuple):
    """The lines of a group for both files, and what the stopped chunks in it had kept, by chunk number."""

    output: SortedLines
    errors: SortedLines
    kept: dict[int, Kept]


class _Source(NamedTuple):
    """Where the lines of one chunk lie, in the order of its table; `local` is the offset in the group's local file."""

    chunk: Chunk
    table: LinesTable
    local: int | None
    kept: Kept | None


class _Runs(NamedTuple):
    """Byte runs of one source, in its order: each goes as a whole to one offset of one file."""

    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    is_error: npt.NDArray[np.bool_]


@contextmanager
def scatter(
    batch: Batch, chunks: Sequence[Chunk], store: ObjectStore, scratch: Path, pool: ThreadPoolExecutor
) -> Iterator[Scattered]:
    """Give the lines of `chunks` in index order, in files that live as long as the context.

    Raises ProofFailed, naming chunk and request, where a line is missing, double, or not what its commit recorded.
    """
    with (
        tempfile.TemporaryFile(dir=scratch) as local,
        tempfile.TemporaryFile(dir=scratch) as output,
        tempfile.TemporaryFile(dir=scratch) as errors,
    ):
        sources = _load(batch, chunks, store, local, pool)
        index = np.concatenate([source.table.index for source in sources])
        is_error = np.concatenate([source.table.is_error for source in sources])
        length = np.concatenate([source.table.length for source in sources])
        _refuse_doubles(index, sources)
        target = np.zeros(len(index), dtype=np.int64)
        sorted_lines = []
        for kind, file in ((False, output), (True, errors)):
            rows = np.flatnonzero(is_error == kind)
            rows = rows[np.argsort(index[rows], kind="stable")]
            ends = np.cumsum(length[rows], dtype=np.int64)
            target[rows] = ends - length[rows]
            sorted_lines.append(SortedLines(index[rows], length[rows], file))
        descriptors = (output.fileno(), errors.fileno())
        bounds = np.cumsum([0, *(len(source.table.index) for source in sources)])
        targets = [target[begin:end] for begin, end in itertools.pairwise(bounds)]

        def copy(job: tuple[_Source, npt.NDArray[np.int64]]) -> None:
            _copy(*job, descriptors, store, local.fileno())

        _run_all(pool, copy, list(zip(sources, targets, strict=True)))
        kept = {source.chunk.chunk: source.kept for source in sources if source.kept is not None}
        yield Scattered(sorted_lines[0], sorted_lines[1], kept)


def _load(
    batch: Batch, chunks: Sequence[Chunk], store: ObjectStore, local: IO[bytes], pool: ThreadPoolExecutor
) -> list[_Source]:
    """Read every chunk's table; the lines of stopped chunks go to the local file, to be read again from there."""
    lock = threading.Lock()

    def load(chunk: Chunk) -> _Source:
        if chunk.state == ChunkState.COMMITTED:
            return _Source(chunk, contributions.committed_table(chunk, store), None, None)
        stopped = contributions.of_stopped(batch, chunk, store)
        with lock:
            offset = local.seek(0, os.SEEK_END)
            local.write(stopped.data)
        return _Source(chunk, stopped.table, offset, Kept(stopped.completed, stopped.failed, stopped.usage))

    sources = _run_all(pool, load, chunks)
    local.flush()
    return sources


def _run_all(pool: ThreadPoolExecutor, work: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """Return the results, in order; on a failure raise it once none is running any more (they share open files)."""
    jobs = [pool.submit(work, item) for item in items]
    try:
        wait(jobs, return_when=FIRST_EXCEPTION)
    finally:
        for job in jobs:
            job.cancel()
        wait(jobs)
    failed = [job for job in jobs if not job.cancelled() and job.exception() is not None]
    return [job.result() for job in failed or jobs]


def _refuse_doubles(index: npt.NDArray[np.int64], sources: Sequence[_Source]) -> None:
    order = np.argsort(index, kind="stable")
    double = np.flatnonzero(np.diff(index[order]) == 0)
    if not len(double):
        return
    request = int(index[order[double[0]]])
    owners = [source.chunk.chunk for source in sources if request in source.table.index]
    raise ProofFailed(
        [f"request {request} of {sources[0].chunk.batch_id} has results from chunks {owners}, and must have one"]
    )


def _runs(table: LinesTable, target: npt.NDArray[np.int64]) -> _Runs:
    """Join lines that follow each other both in the source and in the target."""
    ends = np.cumsum(table.length, dtype=np.int64)
    starts = ends - table.length
    breaks = np.ones(len(target), dtype=np.bool_)
    breaks[1:] = (target[1:] != target[:-1] + table.length[:-1]) | (table.is_error[1:] != table.is_error[:-1])
    first = np.flatnonzero(breaks)
    last = np.append(first[1:], len(target)) - 1
    return _Runs(starts[first], ends[last] - starts[first], target[first], table.is_error[first])


def _copy(
    source: _Source, target: npt.NDArray[np.int64], descriptors: tuple[int, int], store: ObjectStore, local: int
) -> None:
    """Write every line of a source to its offset, reading the source once; check its hash and where its lines end."""
    runs = _runs(source.table, target)
    line_ends = np.cumsum(source.table.length, dtype=np.int64)
    digest = hashlib.sha256()
    position = run = 0
    for block in _blocks(source, store, local, int(line_ends[-1])):
        digest.update(block)
        begin, position = position, position + len(block)
        in_block = line_ends[np.searchsorted(line_ends, begin, "right") : np.searchsorted(line_ends, position, "right")]
        if (np.frombuffer(block, dtype=np.uint8)[in_block - begin - 1] != ord("\n")).any():
            raise ProofFailed([f"{contributions.name_of(source.chunk)}: its table of lines does not fit its lines"])
        view = memoryview(block)
        while run < len(runs.start):
            start, length = int(runs.start[run]), int(runs.length[run])
            low, high = max(start, begin), min(start + length, position)
            if low < high:
                offset = int(runs.target[run]) + low - start
                _write(descriptors[bool(runs.is_error[run])], view[low - begin : high - begin], offset)
            if start + length > position:
                break
            run += 1
    if source.local is None:
        contributions.check_hash(source.chunk, digest.hexdigest())


def _blocks(source: _Source, store: ObjectStore, local: int, size: int) -> Iterator[bytes]:
    """Yield the bytes of a source. Raises ProofFailed where it has more or fewer than its table says."""
    if source.local is None:
        key = contributions.result_of(source.chunk).result_key
        seen = 0
        for block in store.iterate(key, _BLOCK_BYTES):
            seen += len(block)
            if seen > size:
                break
            yield block
        if seen != size:
            where = contributions.name_of(source.chunk)
            raise ProofFailed([f"{where}: {key} does not have the {size} bytes of its lines"])
        return
    for start in range(0, size, _BLOCK_BYTES):
        yield os.pread(local, min(_BLOCK_BYTES, size - start), source.local + start)


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
