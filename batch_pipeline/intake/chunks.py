"""The op `write_chunks`: the request table is ordered and cut, each chunk's input written, and the intake recorded.

    intake/requests.parquet + input.jsonl ──> chunks/NNNNNNNN/input.parquet ──> ledger: record_intake

The chunks are a function of table, input and configuration alone. Killed before the record, a repeated run writes the
same bytes to the same keys; after it, the batch is on its way and a repeated run changes nothing (invariant I2, fault
10).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from batch_pipeline.errors import ProofFailed
from batch_pipeline.intake import spool
from batch_pipeline.intake.chunk_inputs import COLUMNS, TWIN, chunk_input
from batch_pipeline.intake.identical import first_twins
from batch_pipeline.intake.options import shares_identical
from batch_pipeline.intake.order import cut
from batch_pipeline.intake.table import RequestTable
from batch_pipeline.intake.validate import awaits_intake
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, IntakeResult, NewChunk
from batch_pipeline.results.archived import all_chunks
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys
from batch_pipeline.wire.chunk_files import write_chunk_input

_WRITERS = 4


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
    """Return the intake that the ledger, or after the end the manifest, has of a batch: that without prefix groups.

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
    prefixes: list[tuple[str, int] | None] = []
    with ThreadPoolExecutor(_WRITERS, thread_name_prefix="intake-write") as writers:
        under_way: deque[Future[None]] = deque()
        for model, prefix, rows in _cuts(batch, table, descriptor, settings):
            prefixes.append(None if prefix is None else (model, prefix))
            key = keys.chunk_input(batch.batch_id, len(chunks))
            chunks.append(_described(len(chunks), model, key, rows))
            if len(under_way) > _WRITERS:
                under_way.popleft().result()
            under_way.append(writers.submit(_put, store, key, rows, descriptor, batch.endpoint))
        for writing in under_way:
            writing.result()
    groups = prefix_groups(prefixes)
    return [
        chunk if group is None else msgspec.structs.replace(chunk, prefix_group=group)
        for chunk, group in zip(chunks, groups, strict=True)
    ]


def prefix_groups(prefixes: Sequence[tuple[str, int] | None]) -> list[int | None]:
    """Return the number of the first chunk with the same model and prefix, for each that has it with others."""
    first: dict[tuple[str, int], int] = {}
    for number, prefix in enumerate(prefixes):
        if prefix is not None:
            first.setdefault(prefix, number)
    sizes = Counter(prefixes)
    return [None if prefix is None or sizes[prefix] == 1 else first[prefix] for prefix in prefixes]


def _cuts(
    batch: Batch, table: RequestTable, descriptor: int, settings: Settings
) -> Iterator[tuple[str, int | None, pa.Table]]:
    """Yield model, long prefix and rows of each chunk."""
    for segment in table.segments(settings.intake.segment_requests):
        segment = segment.combine_chunks()  # noqa: PLW2901 - the same rows, in one piece
        twins = first_twins(segment, descriptor, batch.endpoint) if shares_identical(batch.metadata) else None
        columns = segment.select(list(COLUMNS))
        if twins is not None:
            columns = columns.append_column(TWIN, pa.array(twins))
        for chunk in cut(segment, settings.intake, twins):
            yield chunk.model, chunk.prefix, columns.take(pa.array(chunk.rows))


def _described(number: int, model: str, key: str, rows: pa.Table) -> NewChunk:
    def total(name: str) -> int:
        return int(rows.column(name).to_numpy().sum(dtype=np.int64))

    indexes = rows.column("index").to_numpy()
    return NewChunk(
        chunk=number,
        model=model,
        input_key=key,
        requests=rows.num_rows,
        first_index=int(indexes.min()),
        last_index=int(indexes.max()),
        prompt_tokens=total("prompt_tokens"),
        max_output_tokens=total("max_tokens"),
    )


def _put(store: ObjectStore, key: str, rows: pa.Table, descriptor: int, endpoint: str) -> None:
    """Write one chunk's input. Killed before the end nothing is visible; a repetition writes the same bytes."""
    store.put(key, write_chunk_input(chunk_input(rows, descriptor, endpoint)))
