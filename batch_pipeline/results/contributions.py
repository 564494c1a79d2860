"""What one chunk contributes to the final files, checked against what the ledger says of it.

A committed chunk contributes the object that its commit points at. A chunk that stopped without a commit contributes
what its checkpoints have, and an error line for each other request; that is put into the same form: output lines in
index order, then error lines in index order, and a table of them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batch_pipeline import ids
from batch_pipeline.errors import ProofFailed
from batch_pipeline.ledger.records import Batch, BatchStatus, Chunk, ChunkResult, ChunkState
from batch_pipeline.results.manifest import Usage
from batch_pipeline.store import ObjectStore
from batch_pipeline.wire import chunk_files, codes
from batch_pipeline.wire.chunk_files import FinishedRequest, LinesTable
from batch_pipeline.wire.lines import LineError, ResultLine, encode_result

_WHY_NOT = {
    ChunkState.CANCELLED: LineError(
        codes.BATCH_CANCELLED, "This request was not finished when its batch was cancelled. It is not billed."
    ),
    ChunkState.EXPIRED: LineError(
        codes.BATCH_EXPIRED, "This request was not finished before its batch's deadline. It is not billed."
    ),
    ChunkState.FAILED: LineError(
        codes.CHUNK_FAILED,
        "The service gave up on the group of requests that this one was in, after several attempts that failed. "
        "It is not billed; submit it again.",
    ),
}
_STRICT = LineError(
    codes.INVALID_LINES,
    "Not run: other lines of the file are invalid, and the batch was to fail then. "
    "Mend them, or submit with on-invalid skip, which runs the good lines.",
)


@dataclass(frozen=True)
class Contribution:
    """The lines of a chunk that stopped without a commit, in the form of a commit's."""

    data: bytes
    output_bytes: int
    table: LinesTable
    completed: int
    """Results that the checkpoints had; as is `failed`."""
    failed: int
    usage: Usage


def name_of(chunk: Chunk) -> str:
    """Return how messages call a chunk."""
    return f"chunk {chunk.chunk} of {chunk.batch_id}"


def of_stopped(batch: Batch, chunk: Chunk, store: ObjectStore) -> Contribution:
    """Return the lines of a chunk that is cancelled, expired or failed.

    A request that two checkpoints have counts once, with the first of them: the order of `chunk.parts` never
    changes, so the same lines are chosen by every merge. Raises ProofFailed where a checkpoint has a request that is
    not the chunk's. Memory: the chunk's lines.
    """
    table = chunk_files.read_chunk_input(store.get(chunk.input_key), ("index", "custom_id"))
    labels: dict[int, str] = dict(zip(table.column(0).to_pylist(), table.column(1).to_pylist(), strict=True))
    if len(labels) != chunk.requests:
        raise ProofFailed([f"{name_of(chunk)}: its input has {len(labels)} requests, the ledger {chunk.requests}"])
    finished: dict[int, FinishedRequest] = {}
    for key in dict.fromkeys(part.key for part in chunk.parts):
        for request in chunk_files.read_part(store.get(key)):
            if request.index not in labels:
                raise ProofFailed([f"{name_of(chunk)}: checkpoint {key} has request {request.index} of another chunk"])
            finished.setdefault(request.index, request)
    why = _why_failed(batch) if batch.outcome == BatchStatus.FAILED else _WHY_NOT[chunk.state]
    counts = chunk_files.count(finished.values())
    for index, label in labels.items():
        if index not in finished:
            line = encode_result(ResultLine(ids.request_id(chunk.batch_id, index), label, None, why))
            finished[index] = FinishedRequest(index, True, line, 0, 0, 0)
    ordered = sorted(finished.values(), key=lambda request: (request.is_error, request.index))
    lengths = np.array([len(request.line) for request in ordered], dtype=np.int32)
    lines = LinesTable(
        np.array([request.index for request in ordered], dtype=np.int64),
        np.array([request.is_error for request in ordered], dtype=np.bool_),
        lengths,
    )
    return Contribution(
        data=b"".join([request.line for request in ordered]),
        output_bytes=int(lengths[: counts.completed].sum(dtype=np.int64)),
        table=lines,
        completed=counts.completed,
        failed=counts.failed,
        usage=Usage(
            input_tokens=counts.input_tokens,
            cached_tokens=counts.cached_tokens,
            output_tokens=counts.output_tokens,
        ),
    )


def _why_failed(batch: Batch) -> LineError:
    """Return why a valid request of a batch that failed as a whole was not run."""
    over = [error.message for error in batch.errors if error.code == codes.TOKEN_LIMIT_EXCEEDED]
    return LineError(codes.TOKEN_LIMIT_EXCEEDED, f"Not run: {' '.join(over)}") if over else _STRICT


def committed_bytes(chunk: Chunk, store: ObjectStore) -> bytes:
    """Return the whole result object of a committed chunk. Raises ProofFailed where it is not the one committed."""
    result = result_of(chunk)
    data = store.get(result.result_key)
    check_hash(chunk, hashlib.sha256(data).hexdigest())
    return data


def committed_table(chunk: Chunk, store: ObjectStore) -> LinesTable:
    """Return the table of a committed chunk's lines. Raises ProofFailed where it does not fit what was committed."""
    result = result_of(chunk)
    table = chunk_files.read_lines_table(store.get(result.lines_key))
    check_table(chunk, table, result.output_bytes, result.error_bytes)
    return table


def check_hash(chunk: Chunk, sha256: str) -> None:
    """Raise ProofFailed where a committed chunk's object has another hash than was committed."""
    result = result_of(chunk)
    if sha256 != result.sha256:
        raise ProofFailed(
            [f"{name_of(chunk)}: {result.result_key} has sha256 {sha256}, its commit recorded {result.sha256}"]
        )


def check_table(chunk: Chunk, table: LinesTable, output_bytes: int, error_bytes: int) -> None:
    """Raise ProofFailed unless a table of lines has so many requests as the chunk, in order, in these bytes."""
    where = name_of(chunk)
    if len(table.index) != chunk.requests:
        raise ProofFailed([f"{where}: it has {len(table.index)} result lines for {chunk.requests} requests"])
    outputs = int(np.count_nonzero(~table.is_error))
    if table.is_error[:outputs].any():
        raise ProofFailed([f"{where}: an error line stands before an output line"])
    for kind, indexes in (("output", table.index[:outputs]), ("error", table.index[outputs:])):
        wrong = np.flatnonzero(np.diff(indexes) <= 0)
        if len(wrong):
            raise ProofFailed([f"{where}: its {kind} lines are double or out of order at request {indexes[wrong[0]]}"])
    outside = table.index[(table.index < chunk.first_index) | (table.index > chunk.last_index)]
    if len(outside):
        raise ProofFailed([f"{where}: it has a result for request {outside[0]}, which is not in it"])
    if (table.length <= 0).any() or (
        _bytes(table.length[:outputs]) != output_bytes or _bytes(table.length[outputs:]) != error_bytes
    ):
        raise ProofFailed(
            [f"{where}: the lengths of its lines do not add up to its {output_bytes} + {error_bytes} bytes"]
        )


def _bytes(lengths: npt.NDArray[np.int32]) -> int:
    return int(lengths.sum(dtype=np.int64))


def result_of(chunk: Chunk) -> ChunkResult:
    if chunk.result is None:
        raise ProofFailed([f"{name_of(chunk)}: it is {chunk.state} but has no result"])
    return chunk.result
