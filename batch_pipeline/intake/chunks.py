"""The op `write_chunks`: the request table is ordered and cut, each chunk's input written, and the intake recorded.

    intake/requests.parquet + input.jsonl ──> chunks/NNNNNNNN/input.parquet ──> ledger: record_intake

The chunks are a function of table, input and configuration alone. Killed before the record, a repeated run writes the
same bytes to the same keys; after it, the batch is on its way and a repeated run changes nothing (invariant I2, fault
10).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from batch_pipeline.errors import ProofFailed
from batch_pipeline.intake import spool
from batch_pipeline.intake.bodies import FORWARDED
from batch_pipeline.intake.identical import first_twins
from batch_pipeline.intake.lines import readable_custom_id
from batch_pipeline.intake.options import shares_identical
from batch_pipeline.intake.order import Cut, cut
from batch_pipeline.intake.table import RequestTable
from batch_pipeline.intake.validate import awaits_intake
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, IntakeResult, NewChunk
from batch_pipeline.results.archived import all_chunks
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys
from batch_pipeline.wire.chunk_files import ChunkRequest, write_chunk_input

_WRITERS = 4
_SPAN_SHARE = 2
"""Bodies are read in one piece where the piece has at most so many times their bytes."""
_COLUMNS = (
    "index",
    "line_offset",
    "line_bytes",
    "body_start",
    "body_bytes",
    "id_start",
    "id_bytes",
    "rewrite",
    "prompt_tokens",
    "max_tokens",
)

_bodies = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Row(NamedTuple):
    """A row of the request table: the columns that a chunk's input is made from."""

    line_index: int
    line_offset: int
    line_bytes: int
    body_start: int
    body_bytes: int
    id_start: int
    id_bytes: int
    rewrite: bool
    prompt_tokens: int
    max_tokens: int
    twin: int
    """Equal for requests that share one call of the engine, another for each where none do."""


def write_chunks(
    batch_id: str, *, ledger: Ledger, store: ObjectStore, settings: Settings, run_id: str | None = None
) -> IntakeResult:
    """Cut a validated batch into chunks and record its intake. A batch whose intake is done is left alone.

    Returns what is recorded. Raises NotFound, StoreError (ObjectMissing where the batch was not validated),
    DamagedTable, ProofFailed where the chunks do not hold every valid request exactly once.
    """
    batch = ledger.batches.get(batch_id)
    if not awaits_intake(batch):
        return recorded(batch, ledger, store)
    scratch = settings.intake.scratch_dir
    try:
        with spool.workspace(scratch, batch_id) as folder:
            result = _write(batch, store, settings, folder)
        after = ledger.batches.record_intake(batch_id, result, run_id=run_id)
        return result if after.intake_run_id == run_id else recorded(after, ledger, store)
    finally:
        spool.discard(scratch, batch_id)


def recorded(batch: Batch, ledger: Ledger, store: ObjectStore) -> IntakeResult:
    """Return the intake that the ledger, or after the end the manifest, has of a batch.

    Raises NotAllowedInState where its files were removed.
    """
    chunks = [
        NewChunk(**{name: getattr(chunk, name) for name in NewChunk.__struct_fields__})
        for chunk in all_chunks(batch, ledger, store)
    ]
    return IntakeResult(
        total=batch.total,
        invalid=batch.invalid,
        input_sha256=batch.input_sha256 or "",
        invalid_key=batch.invalid_key,
        errors=batch.errors,
        chunks=chunks,
    )


def _write(batch: Batch, store: ObjectStore, settings: Settings, folder: Path) -> IntakeResult:
    path = folder / "requests.parquet"
    store.download(keys.request_table(batch.batch_id), path)
    table = RequestTable(path)
    found = table.summary
    chunks: list[NewChunk] = []
    if table.rows:
        scratch = settings.intake.scratch_dir
        with spool.open_copy(store, batch, scratch, folder) as file:
            chunks = _write_all(batch, table, file.fileno(), store, settings)
    table.close()
    if sum(chunk.requests for chunk in chunks) != table.rows or found.total != found.invalid + table.rows:
        raise ProofFailed([f"{found.total} requests are not {found.invalid} invalid and {table.rows} in chunks"])
    return IntakeResult(
        total=found.total,
        invalid=found.invalid,
        input_sha256=found.input_sha256,
        invalid_key=keys.invalid_lines(batch.batch_id) if found.invalid else None,
        errors=found.errors,
        chunks=chunks,
    )


def _write_all(
    batch: Batch, table: RequestTable, descriptor: int, store: ObjectStore, settings: Settings
) -> list[NewChunk]:
    """Write all chunk inputs, several at once; returns when the last one is stored. Memory: a segment, a few chunks."""
    chunks: list[NewChunk] = []
    with ThreadPoolExecutor(_WRITERS, thread_name_prefix="intake-write") as writers:
        under_way: deque[Future[None]] = deque()
        for model, rows in _cuts(batch, table, descriptor, settings):
            key = keys.chunk_input(batch.batch_id, len(chunks))
            chunks.append(_described(len(chunks), model, key, rows))
            if len(under_way) > _WRITERS:
                under_way.popleft().result()
            under_way.append(writers.submit(_put, store, key, rows, descriptor, batch.endpoint))
        for writing in under_way:
            writing.result()
    return chunks


def _cuts(batch: Batch, table: RequestTable, descriptor: int, settings: Settings) -> Iterator[tuple[str, list[_Row]]]:
    for segment in table.segments(settings.intake.segment_requests):
        segment = segment.combine_chunks()  # noqa: PLW2901 - the same rows, in one piece
        twins = first_twins(segment, descriptor, batch.endpoint) if shares_identical(batch.metadata) else None
        own = np.arange(segment.num_rows)
        columns = segment.select(list(_COLUMNS)).append_column("twin", pa.array(own if twins is None else twins))
        for chunk in cut(segment, settings.intake, twins):
            yield chunk.model, _rows(columns, chunk)


def _rows(columns: pa.Table, chunk: Cut) -> list[_Row]:
    taken = columns.take(pa.array(chunk.rows))
    return list(map(_Row._make, zip(*(column.to_pylist() for column in taken.columns), strict=True)))


def _described(number: int, model: str, key: str, rows: list[_Row]) -> NewChunk:
    return NewChunk(
        chunk=number,
        model=model,
        input_key=key,
        requests=len(rows),
        first_index=min(row.line_index for row in rows),
        last_index=max(row.line_index for row in rows),
        prompt_tokens=sum(row.prompt_tokens for row in rows),
        max_output_tokens=sum(row.max_tokens for row in rows),
    )


def _put(store: ObjectStore, key: str, rows: list[_Row], descriptor: int, endpoint: str) -> None:
    """Write one chunk's input. Killed before the end nothing is visible; a repetition writes the same bytes."""
    firsts: dict[int, int] = {}
    requests = []
    for row, line in zip(rows, _lines(rows, descriptor), strict=True):
        first = firsts.setdefault(row.twin, row.line_index)
        requests.append(_request(row, line, endpoint, -1 if first == row.line_index else first))
    store.put(key, write_chunk_input(requests))


def _lines(rows: list[_Row], descriptor: int) -> Iterator[bytes]:
    """Yield the line of each row, read in one piece where they lie close together."""
    start = min(row.line_offset for row in rows)
    span = max(row.line_offset + row.line_bytes for row in rows) - start
    if span <= _SPAN_SHARE * sum(row.line_bytes for row in rows):
        piece = os.pread(descriptor, span, start)
        for row in rows:
            offset = row.line_offset - start
            yield piece[offset : offset + row.line_bytes]
    else:
        for row in rows:
            yield os.pread(descriptor, row.line_bytes, row.line_offset)


def _request(row: _Row, line: bytes, endpoint: str, same_as: int) -> ChunkRequest:
    body = line[row.body_start : row.body_start + row.body_bytes]
    if not (len(line) == row.line_bytes and body.startswith(b"{") and body.endswith(b"}")):
        raise ProofFailed([f"the input has another line {row.line_index + 1} than the one that was validated"])
    if row.rewrite:
        body = _forwarded(body, endpoint)
    if row.id_start < 0:
        custom_id = readable_custom_id(line) or ""
    else:
        custom_id = line[row.id_start : row.id_start + row.id_bytes].decode()
    return ChunkRequest(row.line_index, custom_id, body, row.prompt_tokens, row.max_tokens, same_as)


def _forwarded(body: bytes, endpoint: str) -> bytes:
    """Return the body without what must not reach an engine; all else stays as it was written."""
    fields = {name: value for name, value in _bodies.decode(body).items() if name in FORWARDED[endpoint]}
    return msgspec.json.encode(fields)
