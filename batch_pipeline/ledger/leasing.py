"""pending -> leased: which chunks a worker gets, and what that does to the sums and to the customers' service.

The order is the policy's (`scheduling.order`); here are its snapshot and its effect, in one transaction. The statements
are built once: building them anew for each lease costs more of the processor than the database does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from batch_pipeline.ledger import events, rows
from batch_pipeline.ledger.database import Transaction
from batch_pipeline.ledger.records import ChunkState, Lease, LeaseRef
from batch_pipeline.ledger.schema import (
    batches,
    chunks,
    customers,
    is_pending,
    is_undecided,
    is_waiting,
    lanes,
    out_of_turn,
    service,
    workers,
)
from batch_pipeline.ledger.transitions import chunk_event, insert_for, update_lane
from batch_pipeline.scheduling.estimates import Used, refilled, usage_ratio
from batch_pipeline.scheduling.order import Conditions, CustomerShare, Pick, WaitingBatch, choose, is_at_risk

_WAITING = (
    sa.select(
        batches.c.batch_id,
        batches.c.customer,
        batches.c.endpoint,
        batches.c.priority,
        batches.c.deadline_at,
        batches.c.created_at,
        lanes.c.pending,
        lanes.c.pending_tokens,
        lanes.c.requests,
        lanes.c.tokens,
        (lanes.c.completed + lanes.c.failed).label("done"),
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
        is_waiting,
        is_undecided,
        batches.c.status == sa.literal_column("'in_progress'"),
        batches.c.deadline_at > sa.bindparam("now"),
    )
)
_WAITING_ONLY = _WAITING.where(batches.c.batch_id.in_(sa.bindparam("only", expanding=True)))
_FREE = (
    sa.select(chunks.c.chunk)
    .where(chunks.c.batch_id == sa.bindparam("of_batch"), chunks.c.model == sa.bindparam("of_model"), is_pending)
    .order_by(chunks.c.chunk)
    .limit(sa.bindparam("most"))
    .with_for_update(skip_locked=True)
)
_EXPECTED = (chunks.c.prompt_tokens + chunks.c.max_output_tokens) * sa.bindparam("ratio", type_=sa.Double)
"""As `_Found.expected` has it."""
_TAKE = (
    chunks.update()
    .where(chunks.c.batch_id == sa.bindparam("of_batch"), chunks.c.chunk.in_(sa.bindparam("numbers", expanding=True)))
    .values(
        state=ChunkState.LEASED,
        token=chunks.c.token + 1,
        worker_id=sa.bindparam("by_worker"),
        run_id=sa.bindparam("by_run"),
        expires_at=sa.bindparam("until"),
        charged=sa.func.coalesce(chunks.c.charged, 0.0) + sa.case((_EXPECTED < 1.0, 1.0), else_=_EXPECTED),
    )
    .returning(chunks)
)
_CHARGE = (
    service.update()
    .where(service.c.model == sa.bindparam("of_model"), service.c.customer == sa.bindparam("of_customer"))
    .values(tokens=service.c.tokens + sa.bindparam("virtual_tokens"))
)


_CREDIT = sa.select(out_of_turn).where(out_of_turn.c.model == sa.bindparam("of_model")).with_for_update()
_SPEED = sa.select(sa.func.sum(workers.c.tokens_per_second)).where(
    workers.c.model == sa.bindparam("of_model"),
    workers.c.seen_at > sa.bindparam("since"),
    workers.c.state == sa.literal_column("'ready'"),
)


class Policy(NamedTuple):
    """The numbers of the order, beside the queue itself."""

    margin_seconds: float = 0.0
    """A batch with less slack is at risk."""
    share: float = 0.0
    """Of the service, that batches at risk may have ahead of other customers' turns."""
    most_tokens: float = 0.0
    """That they may have so at once."""
    tokens_per_second: float = 0.0
    """Of the model's workers together, as measured; 0 where it is not known."""


class Taker(NamedTuple):
    """Who takes leases, of which model, until when."""

    worker_id: str
    run_id: str | None
    model: str
    expires_at: float


def measured_speed(tx: Transaction, model: str, within_seconds: float) -> float:
    """Return the tokens a second of the model's workers that were heard of lately; 0 where none has measured any."""
    parameters = {"of_model": model, "since": tx.now - within_seconds}
    return float(tx.connection.execute(_SPEED, parameters).scalar_one_or_none() or 0.0)


def lease_chunks(tx: Transaction, taker: Taker, limit: int, only: Sequence[str] | None, policy: Policy) -> list[Lease]:
    """Lease at most `limit` chunks, of the batches in `only` where that is given; fewer only where all others that are
    pending are being taken by somebody else at this moment.
    """
    found = _waiting(tx, taker.model, only)
    waiting = [row.waiting for row in found.values()]
    shares = {row.waiting.customer: row.share for row in found.values()}
    conditions = _conditions(tx, taker.model, waiting, policy)
    taken: list[Any] = []
    out_of_turn_tokens = 0.0
    while len(taken) < limit:
        picks = choose(waiting, shares, limit - len(taken), conditions)
        got = {pick.batch_id: _take(tx, taker, pick, found[pick.batch_id]) for pick in picks}
        taken += [row for batch_id in got for row in got[batch_id]]
        spent = sum(
            found[pick.batch_id].expected(row) for pick in picks for row in got[pick.batch_id][: pick.out_of_turn]
        )
        out_of_turn_tokens += spent
        conditions = msgspec.structs.replace(conditions, credit=conditions.credit - spent)
        # A batch that gives fewer than it seemed to have is being drained by others: its turn goes to the next one.
        short = {pick.batch_id for pick in picks if len(got[pick.batch_id]) < pick.chunks}
        if not short:
            break
        waiting = [
            _without(found[batch.batch_id], batch, got.get(batch.batch_id, []))
            for batch in waiting
            if batch.batch_id not in short
        ]
        shares = _charged(shares, found, [row for batch_id in got for row in got[batch_id]])
    _record(tx, taker, taken)
    for customer, tokens in sorted(_virtual_tokens(found, taken).items()):
        charge = {"of_model": taker.model, "of_customer": customer, "virtual_tokens": tokens}
        tx.connection.execute(_CHARGE, charge)
    if out_of_turn_tokens:
        _write_credit(tx, taker.model, conditions.credit)
    return [_lease(row, found[row.batch_id], taker) for row in taken]


class _Found(NamedTuple):
    """A batch with pending chunks, for the policy and for the worker."""

    waiting: WaitingBatch
    share: CustomerShare
    endpoint: str
    ratio: float
    """Tokens that are expected to be used for each estimated one."""

    def expected(self, row: Any) -> float:
        """Return the tokens that a chunk of the batch is expected to use."""
        return max(_tokens(row) * self.ratio, 1.0)


def _conditions(tx: Transaction, model: str, waiting: Sequence[WaitingBatch], policy: Policy) -> Conditions:
    """Return what the order is decided by. The credit is looked at, and locked, only where it can matter."""
    conditions = Conditions(
        now=tx.now, tokens_per_second=policy.tokens_per_second, margin_seconds=policy.margin_seconds
    )
    is_one_customer = len({batch.customer for batch in waiting}) < 2
    if is_one_customer or not any(is_at_risk(batch, conditions) for batch in waiting):
        return conditions
    insert = insert_for(tx, out_of_turn).values(model=model, credit=policy.most_tokens, at=tx.now)
    tx.connection.execute(insert.on_conflict_do_nothing())
    row = tx.connection.execute(_CREDIT, {"of_model": model}).one()
    credit = refilled(
        row.credit,
        tx.now - row.at,
        tokens_per_second=policy.tokens_per_second,
        share=policy.share,
        most=policy.most_tokens,
    )
    return msgspec.structs.replace(conditions, credit=credit)


def _write_credit(tx: Transaction, model: str, credit: float) -> None:
    """Write what is left of the credit, whose row this transaction has locked."""
    tx.connection.execute(out_of_turn.update().where(out_of_turn.c.model == model).values(credit=credit, at=tx.now))


def _ratio(row: Any) -> float:
    """Return how many tokens a batch's requests will use for each estimated one."""
    finished = Used()
    if row.tokens and row.requests:
        finished = Used(estimated=row.tokens * row.done / row.requests, real=float(row.used))
    return usage_ratio(finished, Used(estimated=row.estimated_before, real=row.used_before))


def _waiting(tx: Transaction, model: str, only: Sequence[str] | None) -> dict[str, _Found]:
    parameters: dict[str, Any] = {"of_model": model, "now": tx.now}
    if only:
        parameters["only"] = list(only)
    rows_found = tx.connection.execute(_WAITING_ONLY if only else _WAITING, parameters)
    return {row.batch_id: _found(row, _ratio(row)) for row in rows_found}


def _found(row: Any, ratio: float) -> _Found:
    waiting = WaitingBatch(
        batch_id=row.batch_id,
        customer=row.customer,
        pending_chunks=row.pending,
        pending_tokens=row.pending_tokens * ratio,
        priority=row.priority,
        deadline_at=row.deadline_at,
        created_at=row.created_at,
    )
    return _Found(waiting, CustomerShare(weight=row.weight, served=row.served), row.endpoint, ratio)


def _take(tx: Transaction, taker: Taker, pick: Pick, found: _Found) -> list[Any]:
    """Lock the first free chunks of a batch and lease them; those that somebody else has locked are skipped.

    What each is charged stands in its row, for `counters` to correct once it is known what it used.
    """
    free = {"of_batch": pick.batch_id, "of_model": taker.model, "most": pick.chunks}
    numbers = list(tx.connection.execute(_FREE, free).scalars())
    if not numbers:
        return []
    updated = tx.connection.execute(
        _TAKE,
        {
            "of_batch": pick.batch_id,
            "numbers": numbers,
            "by_worker": taker.worker_id,
            "by_run": taker.run_id,
            "until": taker.expires_at,
            "ratio": found.ratio,
        },
    ).all()
    return sorted(updated, key=lambda row: int(row.chunk))


def _record(tx: Transaction, taker: Taker, taken: list[Any]) -> None:
    """Write the events and move the sums of the lanes, which are locked in the order of their keys."""
    events.record_all(
        tx,
        [
            chunk_event(tx, row.batch_id, row.chunk, "leased", taker.worker_id, token=row.token, run_id=taker.run_id)
            for row in taken
        ],
    )
    for batch_id in sorted({row.batch_id for row in taken}):
        of_batch = [row for row in taken if row.batch_id == batch_id]
        tokens = sum(_tokens(row) for row in of_batch)
        update_lane(tx, batch_id, taker.model, pending=-len(of_batch), leased=len(of_batch), pending_tokens=-tokens)


def _charged(shares: dict[str, CustomerShare], found: dict[str, _Found], taken: list[Any]) -> dict[str, CustomerShare]:
    """Return the shares as they are once `taken` is charged."""
    more = _virtual_tokens(found, taken)
    return {
        customer: msgspec.structs.replace(share, served=share.served + more.get(customer, 0.0))
        for customer, share in shares.items()
    }


def _virtual_tokens(found: dict[str, _Found], taken: list[Any]) -> dict[str, float]:
    """Return the service in the taken chunks by customer: tokens over its weight."""
    virtual: dict[str, float] = {}
    for row in taken:
        batch = found[row.batch_id]
        customer = batch.waiting.customer
        virtual[customer] = virtual.get(customer, 0.0) + batch.expected(row) / batch.share.weight
    return virtual


def _without(found: _Found, batch: WaitingBatch, taken: list[Any]) -> WaitingBatch:
    return msgspec.structs.replace(
        batch,
        pending_chunks=batch.pending_chunks - len(taken),
        pending_tokens=batch.pending_tokens - sum(found.expected(row) for row in taken),
    )


def _tokens(row: Any) -> int:
    return int(row.prompt_tokens + row.max_output_tokens)


def _lease(row: Any, found: _Found, taker: Taker) -> Lease:
    return Lease(
        ref=LeaseRef(row.batch_id, row.chunk, row.token),
        customer=found.waiting.customer,
        endpoint=found.endpoint,
        model=taker.model,
        input_key=row.input_key,
        requests=row.requests,
        parts=rows.parts(row.parts),
        expires_at=row.expires_at,
        deadline_at=found.waiting.deadline_at,
        attempts=row.token,
        tokens=_tokens(row),
    )
