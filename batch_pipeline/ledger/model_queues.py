"""The queue of one model as a whole, for estimates: what waits and runs, whose turn it is, and who works on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import sqlalchemy as sa

from batch_pipeline.ledger import rows
from batch_pipeline.ledger.database import Database, Transaction
from batch_pipeline.ledger.leasing import usage_ratio_in
from batch_pipeline.ledger.records import Worker
from batch_pipeline.ledger.schema import batches, customers, is_open, is_undecided, lanes, service, workers
from batch_pipeline.scheduling.finish import QueuedBatch
from batch_pipeline.scheduling.order import CustomerShare, WaitingBatch
from batch_pipeline.scheduling.supply import SPEEDS_COUNT_SECONDS

KEPT_SECONDS = 5.0
"""How long an answer stands before the queue is read again."""
_MOST_WORKERS = 2000

_QUEUED = (
    sa.select(
        batches.c.batch_id,
        batches.c.customer,
        batches.c.priority,
        batches.c.deadline_at,
        batches.c.created_at,
        lanes.c.pending,
        lanes.c.leased,
        lanes.c.pending_tokens,
        lanes.c.requests,
        lanes.c.tokens,
        (lanes.c.completed + lanes.c.failed).label("done"),
        lanes.c.completed.label("answered"),
        (lanes.c.input_tokens + lanes.c.output_tokens).label("used"),
        customers.c.weight,
        sa.func.coalesce(service.c.tokens, 0.0).label("served"),
        sa.func.coalesce(service.c.estimated_tokens, 0.0).label("estimated_before"),
        sa.func.coalesce(service.c.real_tokens, 0.0).label("used_before"),
    )
    .select_from(
        lanes.join(batches, batches.c.batch_id == lanes.c.batch_id)
        .join(customers, customers.c.customer == batches.c.customer)
        .outerjoin(service, (service.c.model == lanes.c.model) & (service.c.customer == batches.c.customer))
    )
    .where(
        lanes.c.model == sa.bindparam("of_model"),
        lanes.c.pending + lanes.c.leased > 0,
        is_open,
        is_undecided,
        batches.c.status == sa.literal_column("'in_progress'"),
    )
)
_Made = TypeVar("_Made")


@dataclass(frozen=True, eq=False)
class ModelQueue:
    """What the ledger knows of one model's queue at one moment."""

    model: str
    now: float
    queued: list[QueuedBatch]
    shares: dict[str, CustomerShare]
    workers: list[Worker]
    """Of all models, heard of in the last day, newest heartbeat first."""


class Queues:
    """Reading queues, not more often than is needed: each status asks for the same."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._made: dict[str, tuple[float, Any]] = {}

    def look(self, model: str, now: float, make: Callable[[ModelQueue], _Made]) -> _Made:
        """Return what `make` makes of a model's queue: anew where the last answer is older than KEPT_SECONDS.

        `now` is the database's time, or was a moment ago: who asks about many batches has read it once, before the
        queue was. `make` is always the same function. Cost then: the lanes of the open batches. Two threads at one
        moment may both make it.
        """
        at, made = self._made.get(model, (0.0, None))
        if made is not None and abs(now - at) < KEPT_SECONDS:
            return cast(_Made, made)
        with self._database.read() as tx:
            queue = _read(tx, model)
        fresh = make(queue)
        self._made[model] = queue.now, fresh
        return fresh


def _read(tx: Transaction, model: str) -> ModelQueue:
    # Put in order here: for an order of the batches' keys SQLite would read all batches there ever were.
    found = sorted(tx.connection.execute(_QUEUED, {"of_model": model}), key=lambda row: str(row.batch_id))
    known = (
        sa.select(workers)
        .where(workers.c.seen_at > tx.now - SPEEDS_COUNT_SECONDS)
        .order_by(workers.c.seen_at.desc())
        .limit(_MOST_WORKERS)
    )
    return ModelQueue(
        model=model,
        now=tx.now,
        queued=[_queued(row) for row in found],
        shares={row.customer: CustomerShare(weight=row.weight, served=row.served) for row in found},
        workers=[rows.worker(row) for row in tx.connection.execute(known)],
    )


def _queued(row: Any) -> QueuedBatch:
    ratio = usage_ratio_in(row)
    pending = float(row.pending_tokens)
    left = pending
    if row.leased and row.tokens and row.requests:
        # A chunk that came back is pending as a whole, though some of it may be done.
        left = max(float(row.tokens) * (row.requests - row.done) / row.requests, pending)
    return QueuedBatch(
        waiting=WaitingBatch(
            batch_id=row.batch_id,
            customer=row.customer,
            pending_chunks=row.pending,
            pending_tokens=pending * ratio,
            priority=row.priority,
            deadline_at=row.deadline_at,
            created_at=row.created_at,
        ),
        leased_chunks=row.leased,
        leased_tokens=(left - pending) * ratio,
    )
