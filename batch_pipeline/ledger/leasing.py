"""pending -> leased: which chunks a worker gets, and what that does to the sums and to the customers' service.

The order is the policy's (`scheduling.order`); here are its snapshot and its effect, in one transaction. The statements
are built once: building them anew for each lease costs more of the processor than the database does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from batch_pipeline.ledger import events, queue, rows
from batch_pipeline.ledger.database import Transaction, execute_all
from batch_pipeline.ledger.records import ChunkState, Lease, LeaseRef
from batch_pipeline.ledger.schema import chunks, is_pending, out_of_turn, service, workers
from batch_pipeline.ledger.transitions import LaneChange, chunk_event, insert_for, move_lanes
from batch_pipeline.scheduling.estimates import Used, refilled, usage_ratio
from batch_pipeline.scheduling.order import Conditions, CustomerShare, Pick, WaitingBatch, choose, is_at_risk
from batch_pipeline.scheduling.supply import SPEEDS_COUNT_SECONDS, Speeds

_FREE = (
    sa.select(chunks.c.chunk)
    .where(chunks.c.batch_id == sa.bindparam("of_batch"), chunks.c.model == sa.bindparam("of_model"), is_pending)
    .order_by(chunks.c.chunk)
    .limit(sa.bindparam("most"))
    .with_for_update(skip_locked=True)
)
_HELD = chunks.alias("held")
_IS_MINE = _HELD.c.worker_id == sa.bindparam("by_worker")
_GROUPS = (
    sa.select(
        _HELD.c.prefix_group,
        sa.func.count(_HELD.c.worker_id.distinct()).label("workers"),
        sa.func.max(sa.case((_IS_MINE, 1), else_=0)).label("mine"),
    )
    .where(
        _HELD.c.batch_id == sa.bindparam("of_batch"),
        _HELD.c.model == sa.bindparam("of_model"),
        _HELD.c.state == sa.literal_column("'leased'"),
        _HELD.c.prefix_group.is_not(None),
    )
    .group_by(_HELD.c.prefix_group)
    .subquery("groups_held")
)
# A worker goes on with the long prefixes that its engine has in its cache. Who has none begins one that nobody has; and
# where all are under way, it helps those with the fewest: nobody is idle for the sake of a cache.
_FREE_BY_GROUP = (
    sa.select(chunks.c.chunk)
    .select_from(chunks.outerjoin(_GROUPS, _GROUPS.c.prefix_group == chunks.c.prefix_group))
    .where(chunks.c.batch_id == sa.bindparam("of_batch"), chunks.c.model == sa.bindparam("of_model"), is_pending)
    .order_by(sa.case((_GROUPS.c.mine == 1, -1), else_=sa.func.coalesce(_GROUPS.c.workers, 0)), chunks.c.chunk)
    .limit(sa.bindparam("most"))
    .with_for_update(skip_locked=True, of=chunks)
)


def _is_one_of(free: sa.Select[Any]) -> dict[str, sa.ColumnElement[bool]]:
    # In Postgres an array, which is made once: rows locked by a subquery that is run again would be others.
    return {
        "sqlite": chunks.c.chunk.in_(free),
        "postgresql": chunks.c.chunk == sa.any_(sa.func.array(free.scalar_subquery())),
    }


def _leased_now(ratio: sa.ColumnElement[float]) -> dict[str, Any]:
    """Return the columns of a chunk that is leased; what it is charged is as `_Found.expected` has it."""
    expected = (chunks.c.prompt_tokens + chunks.c.max_output_tokens) * ratio
    return {
        "state": ChunkState.LEASED,
        "token": chunks.c.token + 1,
        "worker_id": sa.bindparam("by_worker"),
        "run_id": sa.bindparam("by_run"),
        "expires_at": sa.bindparam("until"),
        "charged": sa.func.coalesce(chunks.c.charged, 0.0) + sa.case((expected < 1.0, 1.0), else_=expected),
    }


_TAKEN = (
    *(chunks.c.batch_id, chunks.c.chunk, chunks.c.token, chunks.c.input_key, chunks.c.requests),
    *(chunks.c.prompt_tokens, chunks.c.max_output_tokens, chunks.c.parts, chunks.c.expires_at),
)


def _take_of_one(free: sa.Select[Any]) -> dict[str, Any]:
    return {
        dialect: chunks.update()
        .where(chunks.c.batch_id == sa.bindparam("of_batch"), is_free)
        .values(**_leased_now(sa.bindparam("ratio", type_=sa.Double)))
        .returning(*_TAKEN)
        for dialect, is_free in _is_one_of(free).items()
    }


_TAKE = _take_of_one(_FREE)
_TAKE_BY_GROUP = _take_of_one(_FREE_BY_GROUP)
_GIVEN = rows.given(
    sa.column("of_batch", chunks.c.batch_id.type), sa.column("most", sa.Integer), sa.column("ratio", sa.Double)
)
_FREE_OF_EACH = (
    sa.select(chunks.c.batch_id, chunks.c.chunk)
    .where(chunks.c.batch_id == _GIVEN.c.of_batch, chunks.c.model == sa.bindparam("of_model"), is_pending)
    .order_by(chunks.c.chunk)
    .limit(_GIVEN.c.most)
    .with_for_update(skip_locked=True)
    .lateral("free_of_each")
)
# Materialised, which is run once: see above.
_PICKED = (
    sa.select(_FREE_OF_EACH.c.batch_id, _FREE_OF_EACH.c.chunk, _GIVEN.c.ratio)
    .select_from(_GIVEN.join(_FREE_OF_EACH, sa.true()))
    .cte("picked")
    .prefix_with("MATERIALIZED")
)
_TAKE_OF_EACH = (
    chunks.update()
    .where(
        chunks.c.batch_id == _PICKED.c.batch_id,
        chunks.c.chunk == _PICKED.c.chunk,
        # These follow from the others. Without them a planner that does not know how few there are may read the table.
        chunks.c.batch_id == sa.any_(sa.func.array(sa.select(_PICKED.c.batch_id).scalar_subquery())),
        chunks.c.chunk == sa.any_(sa.func.array(sa.select(_PICKED.c.chunk).scalar_subquery())),
    )
    .values(**_leased_now(_PICKED.c.ratio))
    .returning(*_TAKEN)
)
"""In Postgres, from several batches at once."""
_CHARGE = (
    service.update()
    .where(service.c.model == sa.bindparam("of_model"), service.c.customer == sa.bindparam("of_customer"))
    .values(tokens=service.c.tokens + sa.bindparam("virtual_tokens"))
)


_CREDIT = sa.select(out_of_turn).where(out_of_turn.c.model == sa.bindparam("of_model")).with_for_update()
_IS_READY = sa.and_(
    workers.c.seen_at > sa.bindparam("alive_since"),
    workers.c.state == sa.literal_column("'ready'"),
    workers.c.leave.is_(False),
)
_HAS_MEASURED = workers.c.tokens_per_second > 0
_SPEEDS = sa.select(
    sa.func.coalesce(sa.func.sum(workers.c.tokens_per_second).filter(_IS_READY & _HAS_MEASURED), 0.0).label("total"),
    sa.func.count().filter(_IS_READY & _HAS_MEASURED).label("measured"),
    sa.func.count().filter(_IS_READY).label("ready"),
    sa.func.avg(workers.c.tokens_per_second).filter(_HAS_MEASURED).label("lately"),
).where(workers.c.model == sa.bindparam("of_model"), workers.c.seen_at > sa.bindparam("since"))


class Policy(NamedTuple):
    """The numbers of the order, beside the queue itself."""

    margin_seconds: float = 0.0
    """A batch with less slack is at risk."""
    share: float = 0.0
    """Of the service, that batches at risk may have ahead of other customers' turns."""
    most_tokens: float = 0.0
    """That they may have so at once."""
    tokens_per_second: float = 0.0
    """Of the model's workers together; 0 where it is not known."""
    declared: Mapping[str, float] = MappingProxyType({})
    """Tokens a second of one worker, by model: what the catalogue says, for as long as nothing was measured."""


class Taker(NamedTuple):
    """Who takes leases, of which model, until when."""

    worker_id: str
    run_id: str | None
    model: str
    expires_at: float


def speed_of(tx: Transaction, model: str, alive_seconds: float, declared: float | None) -> float:
    """Return the tokens a second of the model's ready workers, those that were heard of within `alive_seconds`.

    One that has not measured yet counts like the others, else like those of the last day, else as declared: the order
    must go by the speed that estimates and warnings have (`supply.Fleet.ready_speed`). 0 where nothing is known.
    """
    now = tx.now
    since = {"alive_since": now - alive_seconds, "since": now - max(SPEEDS_COUNT_SECONDS, alive_seconds)}
    row = tx.connection.execute(_SPEEDS, {"of_model": model, **since}).one()
    speeds = Speeds(total=float(row.total), measured=row.measured, unmeasured=row.ready - row.measured)
    return speeds.together(declared if row.lately is None else float(row.lately))


def lease_chunks(tx: Transaction, taker: Taker, limit: int, only: Sequence[str] | None, policy: Policy) -> list[Lease]:
    """Lease at most `limit` chunks, of the batches in `only` where that is given; fewer only where all others that are
    pending are being taken by somebody else at this moment.
    """
    wanted = queue.Wanted(taker.model, limit, policy.tokens_per_second, policy.margin_seconds)
    found = waiting = _waiting(tx, wanted, only, policy)
    conditions = _conditions(tx, taker.model, [each.waiting for each in waiting.values()], policy)
    taken: list[Any] = []
    out_of_turn_tokens = 0.0
    while len(taken) < limit:
        picks = choose(*_left(found, waiting, taken), limit - len(taken), conditions)
        got = _take(tx, taker, picks, found)
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
        # Twice as many, since who had picks in this lease still seems to be among the next ones.
        wanted = wanted._replace(chunks=2 * limit, drained=[*wanted.drained, *short])
        waiting = _waiting(tx, wanted, only, policy)
        found = waiting | found  # what was charged already stays as it was reckoned
    _record(tx, taker, taken)
    charges = [
        {"of_model": taker.model, "of_customer": customer, "virtual_tokens": tokens}
        for customer, tokens in sorted(_virtual_tokens(found, taken).items())
    ]
    execute_all(tx, _CHARGE, charges)
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
    has_groups: bool
    """Whether some of its chunks share a long prefix."""

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


def usage_ratio_in(row: Any) -> float:
    """Return how many tokens a batch's requests will use for each estimated one, by its lane and its history."""
    finished = Used()
    if row.tokens and row.requests:
        finished = Used(estimated=row.tokens * row.answered / row.requests, real=float(row.used))
    return usage_ratio(finished, Used(estimated=row.estimated_before, real=row.used_before))


def _waiting(tx: Transaction, wanted: queue.Wanted, only: Sequence[str] | None, policy: Policy) -> dict[str, _Found]:
    """Return the batches that a lease may go to."""
    if only:
        rows_found = queue.of_batches(tx, wanted.model, set(only).difference(wanted.drained))
    else:
        rows_found = queue.in_turn(tx, wanted)
        if rows_found and policy.most_tokens > 0:
            rows_found += queue.at_risk(tx, wanted)
    return {row.batch_id: _found(row, usage_ratio_in(row)) for row in rows_found}


def _left(
    found: dict[str, _Found], waiting: dict[str, _Found], taken: list[Any]
) -> tuple[list[WaitingBatch], dict[str, CustomerShare]]:
    """Return what waits and whose it is, without what this lease has taken already and charged for it."""
    more = _virtual_tokens(found, taken)
    shares = {
        batch.waiting.customer: msgspec.structs.replace(
            batch.share, served=batch.share.served + more.get(batch.waiting.customer, 0.0)
        )
        for batch in waiting.values()
    }
    left = [_without(batch, [row for row in taken if row.batch_id == batch_id]) for batch_id, batch in waiting.items()]
    return [batch for batch in left if batch.pending_chunks > 0], shares


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
    return _Found(
        waiting, CustomerShare(weight=row.weight, served=row.served), row.endpoint, ratio, row.prefix_groups > 0
    )


def _take(tx: Transaction, taker: Taker, picks: Sequence[Pick], found: Mapping[str, _Found]) -> dict[str, list[Any]]:
    """Lock the first free chunks of each batch and lease them; those that somebody else has locked are skipped.

    Which are the first is the policy's `_FREE_BY_GROUP` where chunks share long prefixes: that reads all pending chunks
    of the batch. What each is charged stands in its row, for `counters` to correct once it is known what it used.
    """
    by_taker = {
        "of_model": taker.model,
        "by_worker": taker.worker_id,
        "by_run": taker.run_id,
        "until": taker.expires_at,
    }
    by_group: list[dict[str, Any]] = []
    in_order: list[dict[str, Any]] = []
    for pick in picks:
        batch = found[pick.batch_id]
        of_kind = by_group if batch.has_groups else in_order
        of_kind.append({"of_batch": pick.batch_id, "most": pick.chunks, "ratio": batch.ratio})
    taken = _take_one_by_one(tx, _TAKE_BY_GROUP, by_group, by_taker)
    if len(in_order) > 1 and tx.is_postgres:
        taken += tx.connection.execute(_TAKE_OF_EACH, {rows.GIVEN: rows.json(in_order), **by_taker}).all()
    else:
        taken += _take_one_by_one(tx, _TAKE, in_order, by_taker)
    got: dict[str, list[Any]] = {pick.batch_id: [] for pick in picks}
    for row in sorted(taken, key=lambda row: int(row.chunk)):
        got[row.batch_id].append(row)
    return got


def _take_one_by_one(
    tx: Transaction, take: dict[str, Any], given: Sequence[dict[str, Any]], by_taker: dict[str, Any]
) -> list[Any]:
    statement = take[tx.connection.dialect.name]
    return [row for each in given for row in tx.connection.execute(statement, {**each, **by_taker})]


def _record(tx: Transaction, taker: Taker, taken: list[Any]) -> None:
    """Write the events and move the sums of the lanes, which are locked in the order of their keys."""
    events.record_all(
        tx,
        [
            chunk_event(tx, row.batch_id, row.chunk, "leased", taker.worker_id, token=row.token, run_id=taker.run_id)
            for row in taken
        ],
    )
    by_batch: dict[str, list[Any]] = {}
    for row in sorted(taken, key=lambda row: str(row.batch_id)):
        by_batch.setdefault(row.batch_id, []).append(row)
    move_lanes(
        tx,
        [
            LaneChange(
                batch_id,
                taker.model,
                {"pending": -len(of_batch), "leased": len(of_batch), "pending_tokens": -sum(map(_tokens, of_batch))},
            )
            for batch_id, of_batch in by_batch.items()
        ],
    )


def _virtual_tokens(found: dict[str, _Found], taken: list[Any]) -> dict[str, float]:
    """Return the service in the taken chunks by customer: tokens over its weight."""
    virtual: dict[str, float] = {}
    for row in taken:
        batch = found[row.batch_id]
        customer = batch.waiting.customer
        virtual[customer] = virtual.get(customer, 0.0) + batch.expected(row) / batch.share.weight
    return virtual


def _without(found: _Found, taken: list[Any]) -> WaitingBatch:
    batch = found.waiting
    if not taken:
        return batch
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
