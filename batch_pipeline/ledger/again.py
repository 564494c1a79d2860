"""Chunks back to pending by an operator's word: those that were given up, or what was committed as well.

    failed ──want_again──> pending          committed | leased | failed ──run_again──> pending (nothing kept)

Both only while the batch is in progress: once its results are being assembled its status would have to go backwards,
which it never does (invariant I6). A chunk that is run again keeps its fencing token, and its next lease has a higher
one: whoever still works on the old lease is refused from then on (I3). What it had written is garbage (I4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from batch_pipeline.errors import NotAllowedInState, NotFound
from batch_pipeline.ledger import events, rows
from batch_pipeline.ledger.database import Transaction
from batch_pipeline.ledger.records import BatchStatus, ChunkState
from batch_pipeline.ledger.schema import chunks
from batch_pipeline.ledger.schema import events as events_table
from batch_pipeline.ledger.transitions import (
    chunk_event,
    join_queue,
    lock_batch,
    part_sums,
    queue_floor,
    update_lane,
)

RUN_AGAIN = "run_again"
"""The event of a batch whose chunks are run again; its run id is the operator's order."""
SUPERSEDED = "superseded"
"""The event of a chunk whose results, or checkpoints, do not count any more."""
_SUMS = ("completed", "failed", "input_tokens", "cached_tokens", "output_tokens")
_COUNTED_AS = {
    ChunkState.PENDING: "pending",
    ChunkState.LEASED: "leased",
    ChunkState.COMMITTED: "committed",
    ChunkState.FAILED: "stopped",
}


def want_again(tx: Transaction, batch_id: str, actor: str) -> int:
    """See `Chunks.want_again`."""
    batch = lock_batch(tx, batch_id)
    if batch is None:
        raise NotFound(f"no batch {batch_id}")
    if batch.status != BatchStatus.IN_PROGRESS or batch.outcome is not None:
        return 0
    wanted = tx.connection.execute(
        chunks.update()
        .where(chunks.c.batch_id == batch_id, chunks.c.state == ChunkState.FAILED)
        .values(state=ChunkState.PENDING, failures=0)
        .returning(chunks.c.chunk, chunks.c.model, chunks.c.prompt_tokens, chunks.c.max_output_tokens)
    ).all()
    events.record_all(tx, [chunk_event(tx, batch_id, row[0], "wanted_again", actor) for row in sorted(wanted)])
    changes: dict[str, Counter[str]] = {}
    for row in wanted:
        changes.setdefault(row.model, Counter()).update(stopped=-1, pending=1, pending_tokens=_tokens(row))
    _move_lanes(tx, batch, changes)
    return len(wanted)


def run_again(tx: Transaction, batch_id: str, actor: str, *, order: str, model_version: str | None) -> int:
    """See `Chunks.run_again`."""
    batch = lock_batch(tx, batch_id)
    if batch is None:
        raise NotFound(f"no batch {batch_id}")
    if _is_done(tx, batch_id, order):
        return 0
    if batch.status != BatchStatus.IN_PROGRESS or batch.outcome is not None:
        state = batch.status if batch.outcome is None else f"{batch.status}, on its way to {batch.outcome}"
        raise NotAllowedInState(
            f"batch {batch_id} is {state}: what is committed can be run again only while it is in_progress. Hand its "
            "requests in as a new batch instead (`batch-pipeline submit`, or a retry of those that failed)"
        )
    locked = tx.connection.execute(
        sa.select(chunks).where(chunks.c.batch_id == batch_id).order_by(chunks.c.chunk).with_for_update()
    ).all()
    anew = [row for row in locked if _starts_afresh(row, model_version)]
    for numbers in _pages([row.chunk for row in anew]):
        tx.connection.execute(
            chunks.update()
            .where(chunks.c.batch_id == batch_id, chunks.c.chunk.in_(numbers))
            .values(
                state=ChunkState.PENDING,
                failures=0,
                parts="[]",
                result=None,
                charged=None,
                committed_at=None,
                expires_at=None,
                last_error=None,
            )
        )
    told = [chunk_event(tx, batch_id, row.chunk, SUPERSEDED, actor, token=row.token, detail=row.state) for row in anew]
    what = f"{len(anew)} of {len(locked)} chunks"
    detail = what if model_version is None else f"{what}; committed ones of model version {model_version}"
    events.record(tx, batch_id, RUN_AGAIN, actor, run_id=order, detail=detail)
    events.record_all(tx, told)
    changes: dict[str, Counter[str]] = {}
    for row in anew:
        _count_out(changes.setdefault(row.model, Counter()), row)
    _move_lanes(tx, batch, changes)
    return len(anew)


def _is_done(tx: Transaction, batch_id: str, order: str) -> bool:
    """Whether this order was carried out already."""
    e = events_table.c
    query = sa.select(e.sequence).where(e.batch_id == batch_id, e.event == RUN_AGAIN, e.run_id == order).limit(1)
    return tx.connection.execute(query).first() is not None


def _starts_afresh(row: Any, model_version: str | None) -> bool:
    """Whether a chunk has something that does not count any more."""
    if row.state == ChunkState.COMMITTED:
        return model_version is None or rows.chunk_result(row.result).model_version == model_version
    has_parts = bool(rows.parts(row.parts))
    return row.state in (ChunkState.LEASED, ChunkState.FAILED) or (row.state == ChunkState.PENDING and has_parts)


def _count_out(change: Counter[str], row: Any) -> None:
    """Take what a chunk had brought out of the sums of its lane, and count it as pending."""
    if row.state == ChunkState.COMMITTED:
        result = rows.chunk_result(row.result)
        brought = [int(getattr(result, name)) for name in _SUMS]
    else:
        brought = list(part_sums(rows.parts(row.parts)))
    change.subtract(dict(zip(_SUMS, brought, strict=True)))
    if row.state != ChunkState.PENDING:
        change.update({_COUNTED_AS[ChunkState(row.state)]: -1, "pending": 1, "pending_tokens": _tokens(row)})


def _move_lanes(tx: Transaction, batch: Any, changes: dict[str, Counter[str]]) -> None:
    """Change the sums of the lanes, in the order of their keys; the customer comes to the queues anew."""
    floors = {model: queue_floor(tx, batch.customer, model) for model in sorted(changes)}
    for model in floors:
        update_lane(tx, batch.batch_id, model, **changes[model])
    for model, floor in floors.items():
        join_queue(tx, batch.customer, model, floor)


def _tokens(row: Any) -> int:
    return int(row.prompt_tokens + row.max_output_tokens)


def _pages(numbers: Sequence[int], size: int = 500) -> Iterable[Sequence[int]]:
    return (numbers[start : start + size] for start in range(0, len(numbers), size))
