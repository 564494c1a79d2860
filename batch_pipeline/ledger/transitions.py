"""What transitions of chunks have in common: the sums in their lane, and how a batch learns that its last chunk
stopped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa

from batch_pipeline.ledger import events
from batch_pipeline.ledger.database import Transaction
from batch_pipeline.ledger.records import BatchStatus, ChunkState, Part
from batch_pipeline.ledger.schema import batches, chunks, customers, lanes, service


def update_lane(tx: Transaction, batch_id: str, model: str, **changes: int) -> None:
    """Add `changes` to the sums of a lane."""
    values = {name: lanes.c[name] + change for name, change in changes.items()}
    tx.connection.execute(
        lanes.update()
        .where(lanes.c.batch_id == batch_id, lanes.c.model == model)
        .values(revision=lanes.c.revision + 1, **values)
    )


def lock_batch(tx: Transaction, batch_id: str) -> Any:
    """Return the batch's row, locked until the end of the transaction, or None where there is none."""
    return tx.connection.execute(
        sa.select(batches).where(batches.c.batch_id == batch_id).with_for_update()
    ).one_or_none()


def update_batch(tx: Transaction, batch_id: str, **values: Any) -> None:
    """Set columns of a batch's row."""
    tx.connection.execute(
        batches.update().where(batches.c.batch_id == batch_id).values(revision=batches.c.revision + 1, **values)
    )


def stop_pending(tx: Transaction, batch_id: str, state: ChunkState, actor: str) -> None:
    """pending -> cancelled | expired, for all pending chunks of a batch whose row is locked."""
    stopped = tx.connection.execute(
        chunks.update()
        .where(chunks.c.batch_id == batch_id, chunks.c.state == ChunkState.PENDING)
        .values(state=state)
        .returning(chunks.c.chunk, chunks.c.model, chunks.c.prompt_tokens + chunks.c.max_output_tokens)
    ).all()
    by_model: dict[str, tuple[int, int]] = {}
    for _, model, tokens in stopped:
        count, total = by_model.get(model, (0, 0))
        by_model[model] = (count + 1, total + tokens)
    for model, (count, total) in sorted(by_model.items()):
        update_lane(tx, batch_id, model, pending=-count, stopped=count, pending_tokens=-total)
    events.record_all(tx, [chunk_event(tx, batch_id, row[0], state, actor) for row in sorted(stopped)])


def settle(tx: Transaction, batch: Any, actor: str) -> bool:
    """in_progress | cancelling -> finalizing, where intake is done and no chunk is pending or leased any more.

    `batch` is the locked row. Returns whether this call made the transition: of several that race, one does.
    """
    if batch.status not in (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING) or batch.input_sha256 is None:
        return False
    open_chunks = tx.connection.execute(
        sa.select(sa.func.coalesce(sa.func.sum(lanes.c.pending + lanes.c.leased), 0)).where(
            lanes.c.batch_id == batch.batch_id
        )
    ).scalar_one()
    if open_chunks:
        return False
    outcome = batch.outcome or BatchStatus.COMPLETED
    update_batch(
        tx,
        batch.batch_id,
        status=BatchStatus.FINALIZING,
        outcome=outcome,
        finalizing_at=tx.now,
        run_due_at=0.0,
    )
    events.record(tx, batch.batch_id, "finalizing", actor, detail=f"towards {outcome}")
    return True


def join_queue(tx: Transaction, customer: str, model: str) -> None:
    """Lift a customer that comes back to a model's queue to the least served one that waits there: no credit is saved
    up.
    """
    waiting = (
        sa.select(sa.func.min(service.c.tokens))
        .select_from(
            service.join(batches, batches.c.customer == service.c.customer).join(
                lanes, (lanes.c.batch_id == batches.c.batch_id) & (lanes.c.model == service.c.model)
            )
        )
        .where(service.c.model == model, (lanes.c.pending + lanes.c.leased) > 0)
    )
    others = tx.connection.execute(waiting.where(service.c.customer != customer)).scalar_one_or_none()
    own = tx.connection.execute(waiting.where(service.c.customer == customer)).scalar_one_or_none()
    floor = others if own is None and others is not None else None
    existing = tx.connection.execute(
        sa.select(service.c.tokens).where(service.c.model == model, service.c.customer == customer).with_for_update()
    ).scalar_one_or_none()
    if existing is None:
        insert = insert_for(tx, service).values(model=model, customer=customer, tokens=floor or 0.0)
        tx.connection.execute(insert.on_conflict_do_nothing())
    elif floor is not None and floor > existing:
        tx.connection.execute(
            service.update().where(service.c.model == model, service.c.customer == customer).values(tokens=floor)
        )


def ensure_customer(tx: Transaction, customer: str) -> None:
    """Add the customer with the default weight where it is new."""
    insert = insert_for(tx, customers).values(customer=customer, weight=1.0, created_at=tx.now)
    tx.connection.execute(insert.on_conflict_do_nothing())


def insert_for(tx: Transaction, table: sa.Table) -> Any:
    """Return the dialect's INSERT, which has `on_conflict_do_nothing`."""
    if tx.connection.dialect.name == "sqlite":
        from sqlalchemy.dialects import sqlite

        return sqlite.insert(table)
    from sqlalchemy.dialects import postgresql

    return postgresql.insert(table)


def chunk_event(
    tx: Transaction,
    batch_id: str,
    chunk: int,
    event: str,
    actor: str,
    *,
    token: int | None = None,
    run_id: str | None = None,
    detail: str | None = None,
) -> dict[str, object]:
    """Return a chunk's event for `events.record_all`."""
    return {
        "at": tx.now,
        "batch_id": batch_id,
        "chunk": chunk,
        "event": str(event),
        "actor": actor,
        "token": token,
        "run_id": run_id,
        "detail": detail,
    }


def part_sums(parts: Iterable[Part]) -> tuple[int, int, int, int, int]:
    """Return (completed, failed, input, cached, output tokens) of checkpoints."""
    sums = [(p.completed, p.failed, p.input_tokens, p.cached_tokens, p.output_tokens) for p in parts]
    completed, failed, given, cached, made = (sum(column) for column in zip(*sums, strict=True)) if sums else (0,) * 5
    return completed, failed, given, cached, made
