"""What transitions of chunks have in common: the sums in their lane, and how a batch learns that its last chunk
stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from batch_pipeline.ledger import events
from batch_pipeline.ledger.database import Transaction, execute_all
from batch_pipeline.ledger.records import BatchStatus, ChunkState, Part
from batch_pipeline.ledger.schema import (
    batches,
    chunks,
    customers,
    is_pending,
    is_waiting,
    lanes,
    quotas,
    service,
)

HOLDS_NOTHING = "{}"
"""The column `enqueued` of a batch that holds nothing of its customer's quotas."""

_LANE_SUMS = (
    *("pending", "leased", "committed", "stopped", "pending_tokens"),
    *("completed", "failed", "input_tokens", "cached_tokens", "output_tokens"),
)
_MOVE_LANE = (
    lanes.update()
    .where(lanes.c.batch_id == sa.bindparam("of_batch"), lanes.c.model == sa.bindparam("of_model"))
    .values(
        revision=lanes.c.revision + 1,
        **{name: lanes.c[name] + sa.bindparam(f"more_{name}", type_=lanes.c[name].type) for name in _LANE_SUMS},
    )
)
_MOVED = (
    *(lanes.c.batch_id, lanes.c.model, lanes.c.customer),
    (lanes.c.pending + lanes.c.leased).label("open_chunks"),
)
_MOVE_AND_LOOK = _MOVE_LANE.returning(*_MOVED)
_LOOK_AT_LANES = sa.select(*_MOVED).where(
    # Follows from the other condition: by that alone SQLite finds no index.
    lanes.c.batch_id.in_(sa.bindparam("batch_ids", expanding=True)),
    sa.tuple_(lanes.c.batch_id, lanes.c.model).in_(sa.bindparam("keys", expanding=True)),
)
_WAITS = (
    sa.select(lanes.c.batch_id)
    .where(lanes.c.model == service.c.model, lanes.c.customer == service.c.customer, is_waiting)
    .correlate(service)
    .exists()
)
_LEAST_SERVED = sa.select(
    sa.func.min(sa.case((service.c.customer != sa.bindparam("of_customer"), service.c.tokens))),
    sa.func.count(sa.case((service.c.customer == sa.bindparam("of_customer"), 1))),
).where(service.c.model == sa.bindparam("of_model"), _WAITS)
"""Of a model's queue: what the least served of the others has had, and whether a customer waits there itself."""
_NO_CHANGE = {f"more_{name}": 0 for name in _LANE_SUMS}


class LaneChange(NamedTuple):
    """What is to be added to the sums of a lane, by the names of their columns."""

    batch_id: str
    model: str
    more: Mapping[str, int]

    def parameters(self) -> dict[str, Any]:
        """Return it as the parameters of the update."""
        more = {f"more_{name}": change for name, change in self.more.items()}
        return {"of_batch": self.batch_id, "of_model": self.model, **_NO_CHANGE, **more}


def move_lanes(tx: Transaction, changes: Sequence[LaneChange]) -> None:
    """Add to the sums of several lanes, which the caller gives in the order of their keys."""
    execute_all(tx, _MOVE_LANE, [change.parameters() for change in changes])


class MovedLane(NamedTuple):
    """A lane after its sums were changed."""

    batch_id: str
    model: str
    customer: str
    open_chunks: int
    """Its chunks that are pending or leased now."""


def move_lanes_and_look(tx: Transaction, changes: Sequence[LaneChange]) -> list[MovedLane]:
    """Do as `move_lanes` does and return the lanes as they are then."""
    if not changes:
        return []
    if len(changes) == 1:
        moved = tx.connection.execute(_MOVE_AND_LOOK, changes[0].parameters())
    else:
        move_lanes(tx, changes)
        keys = [(change.batch_id, change.model) for change in changes]
        moved = tx.connection.execute(_LOOK_AT_LANES, {"keys": keys, "batch_ids": [key[0] for key in keys]})
    return [MovedLane(*row) for row in moved]


def update_lane(tx: Transaction, batch_id: str, model: str, **changes: int) -> int:
    """Add `changes` to the sums of a lane; returns its chunks that are pending or leased now."""
    (moved,) = move_lanes_and_look(tx, [LaneChange(batch_id, model, changes)])
    return moved.open_chunks


def open_chunks(tx: Transaction, batch_id: str) -> int:
    """Return a batch's chunks that are pending or leased."""
    query = sa.select(sa.func.sum(lanes.c.pending + lanes.c.leased)).where(lanes.c.batch_id == batch_id)
    return int(tx.connection.execute(query).scalar_one() or 0)


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
        .where(chunks.c.batch_id == batch_id, is_pending)
        .values(state=state)
        .returning(chunks.c.chunk, chunks.c.model, chunks.c.prompt_tokens + chunks.c.max_output_tokens)
    ).all()
    by_model: dict[str, tuple[int, int]] = {}
    for _, model, tokens in stopped:
        count, total = by_model.get(model, (0, 0))
        by_model[model] = (count + 1, total + tokens)
    events.record_all(tx, [chunk_event(tx, batch_id, row[0], state, actor) for row in sorted(stopped)])
    for model, (count, total) in sorted(by_model.items()):
        update_lane(tx, batch_id, model, pending=-count, stopped=count, pending_tokens=-total)


def settle(tx: Transaction, batch: Any, actor: str) -> bool:
    """in_progress | cancelling -> finalizing, where intake is done and no chunk is pending or leased any more.

    `batch` is the locked row. Returns whether this call made the transition: of several that race, one does.
    """
    if batch.status not in (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING) or batch.input_sha256 is None:
        return False
    if open_chunks(tx, batch.batch_id):
        return False
    outcome = batch.outcome or BatchStatus.COMPLETED
    update_batch(
        tx,
        batch.batch_id,
        status=BatchStatus.FINALIZING,
        outcome=outcome,
        finalizing_at=tx.now,
        run_due_at=0.0,
        enqueued=HOLDS_NOTHING,
    )
    give_back_quota(tx, batch)
    events.record(tx, batch.batch_id, "finalizing", actor, detail=f"towards {outcome}")
    return True


def give_back_quota(tx: Transaction, batch: Any) -> None:
    """Give back what a batch's row, locked and as it was before this transaction, says that it holds.

    The caller sets its column `enqueued` to HOLDS_NOTHING. To be called after chunks and lanes, for the order of locks.
    """
    add_to_quotas(tx, batch.customer, held_by(batch), -1)


def held_by(batch: Any) -> dict[str, int]:
    """Return the prompt tokens by model that a batch's row says it holds of its customer's quotas."""
    return msgspec.json.decode(batch.enqueued, type=dict[str, int])


def add_to_quotas(tx: Transaction, customer: str, tokens: Mapping[str, int], sign: int) -> None:
    """Add to, or with a sign of -1 take from, the sums of a customer's enqueued tokens."""
    for model, count in sorted(tokens.items()):
        tx.connection.execute(
            quotas.update()
            .where(quotas.c.customer == customer, quotas.c.model == model)
            .values(tokens=quotas.c.tokens + sign * count)
        )


def queue_floor(tx: Transaction, customer: str, model: str) -> float | None:
    """Return the service that a customer has at least once it comes to a model's queue; None where it waits already.

    It is that of the least served customer that waits there, so that nobody saves up credit by staying away. Where
    nobody waits it is the most that anybody has had: who was served alone was ahead of no one, and owes nothing to the
    next that comes. (The virtual time of start-time fair queueing.) Read it before the chunks are counted as pending,
    and hand it to `join_queue` after. Cost: a look into an index for each customer of the model.
    """
    others, own = tx.connection.execute(_LEAST_SERVED, {"of_model": model, "of_customer": customer}).one()
    if own:
        return None
    if others is None:
        others = tx.connection.execute(
            sa.select(sa.func.max(service.c.tokens)).where(service.c.model == model)
        ).scalar_one_or_none()
    return float(others or 0.0)


def join_queue(tx: Transaction, customer: str, model: str, floor: float | None) -> None:
    """Lift a customer that comes to a model's queue to the floor that `queue_floor` gave; nobody is ever lowered.

    The floor is kept: were a customer lifted over what it was charged for chunks that still run, and those charges
    corrected downwards afterwards, it would have credit from before.
    """
    if floor is None:
        return
    insert = insert_for(tx, service).values(model=model, customer=customer, tokens=floor, floor=floor)
    tx.connection.execute(insert.on_conflict_do_nothing())
    tx.connection.execute(
        service.update()
        .where(service.c.model == model, service.c.customer == customer)
        .values(tokens=sa.case((service.c.tokens < floor, floor), else_=service.c.tokens), floor=floor)
    )


def ensure_customer(tx: Transaction, customer: str) -> None:
    """Add the customer with the default weight where it is new."""
    insert = insert_for(tx, customers).values(customer=customer, weight=1.0, created_at=tx.now)
    tx.connection.execute(insert.on_conflict_do_nothing())


def lock_customer(tx: Transaction, customer: str) -> Any:
    """Return the customer's row, which must be there, locked until the end of the transaction."""
    return tx.connection.execute(sa.select(customers).where(customers.c.customer == customer).with_for_update()).one()


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
