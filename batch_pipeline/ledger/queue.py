"""What a lease looks at of a model's queue: the batches that the policy can pick, and no others.

The policy (`scheduling.order.choose`) takes each chunk from the least served customer, and of its batches from the one
with the least slack, or from the batch at risk with the least slack of all. So for a lease of n chunks the n least
served customers matter, n batches of each, and the n first ones at risk. The database finds these by the policy's
formulas, which a test holds to the policy's own; the policy then decides on the few rows.

Cost: a look into an index for each customer of the model, and the waiting batches of those that are next; batches at
risk are looked for among all that wait for the model. None of it depends on what has finished.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa

from batch_pipeline.ledger.database import Transaction
from batch_pipeline.ledger.schema import batches, customers, is_waiting, lanes, service
from batch_pipeline.scheduling.estimates import PRIOR_TOKENS
from batch_pipeline.scheduling.order import SLIP

_MODEL: sa.BindParameter[str] = sa.bindparam("of_model", type_=sa.String)
_NOW = sa.bindparam("now", type_=sa.Double)
_SPEED = sa.bindparam("tokens_per_second", type_=sa.Double)
_MOST: sa.BindParameter[int] = sa.bindparam("most", type_=sa.Integer)
_NOTHING = sa.literal_column("0.0", sa.Double)
_OF_CUSTOMER = (service.c.model == lanes.c.model) & (service.c.customer == lanes.c.customer)
_IS_LEASABLE = sa.and_(lanes.c.model == _MODEL, is_waiting, lanes.c.deadline_at > _NOW)


def _over(number: sa.ColumnElement[Any], by: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
    """Return a quotient of floating point numbers; SQLAlchemy's own would be one of exact numerics."""
    return sa.cast(number, sa.Double).op("/", precedence=8, return_type=sa.Double())(sa.cast(by, sa.Double))


# As `leasing` and `estimates.usage_ratio` have it.
_HAS_SIZE = (lanes.c.tokens > sa.literal_column("0")) & (lanes.c.requests > sa.literal_column("0"))
# Of requests without an answer an engine tells no tokens: they show nothing of what answers take.
_ANSWERED = lanes.c.completed
_ESTIMATED = sa.case((_HAS_SIZE, _over(lanes.c.tokens * _ANSWERED, lanes.c.requests)), else_=_NOTHING)
_REAL = sa.case((_HAS_SIZE, sa.cast(lanes.c.input_tokens + lanes.c.output_tokens, sa.Double)), else_=_NOTHING)
_BEFORE = sa.case(
    (service.c.estimated_tokens > _NOTHING, _over(service.c.real_tokens, service.c.estimated_tokens)),
    (_ESTIMATED > _NOTHING, _over(_REAL, _ESTIMATED)),
    else_=sa.literal_column("1.0", sa.Double),
)
_PRIOR = sa.literal_column(repr(PRIOR_TOKENS), sa.Double)
_RATIO = _over(_REAL + _BEFORE * _PRIOR, _ESTIMATED + _PRIOR)
# As `order.work_seconds` has it: at an unknown speed no work is reckoned.
_WORK_SECONDS = sa.case((_SPEED > _NOTHING, _over(lanes.c.pending_tokens * _RATIO, _SPEED)), else_=_NOTHING)

_COLUMNS = (
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
    lanes.c.prefix_groups,
    _ANSWERED.label("answered"),
    (lanes.c.input_tokens + lanes.c.output_tokens).label("used"),
    customers.c.weight,
    service.c.tokens.label("served"),
    service.c.estimated_tokens.label("estimated_before"),
    service.c.real_tokens.label("used_before"),
)
_FROM = (
    lanes.join(service, _OF_CUSTOMER)
    .join(batches, batches.c.batch_id == lanes.c.batch_id)
    .join(customers, customers.c.customer == lanes.c.customer)
)
_OF_BATCHES = (
    sa.select(*_COLUMNS)
    .select_from(_FROM)
    .where(_IS_LEASABLE, lanes.c.batch_id.in_(sa.bindparam("only", expanding=True)))
)


def of_batches(tx: Transaction, model: str, only: Collection[str]) -> list[Any]:
    """Return the rows of those of the batches in `only` that have chunks to lease."""
    return list(tx.connection.execute(_OF_BATCHES, {"of_model": model, "now": tx.now, "only": list(only)}))


class Wanted(NamedTuple):
    """What a lease asks the queue for."""

    model: str
    chunks: int
    tokens_per_second: float
    """Of the model's workers together; 0 where it is not known."""
    margin_seconds: float
    drained: Collection[str] = ()
    """Batches that have nothing to give, though they seem to."""

    def parameters(self, now: float) -> dict[str, Any]:
        """Return it as the parameters of a query."""
        parameters = {
            "of_model": self.model,
            "now": now,
            "most": self.chunks,
            "tokens_per_second": self.tokens_per_second,
            "margin_seconds": self.margin_seconds,
        }
        return {**parameters, "drained": list(self.drained)} if self.drained else parameters


def in_turn(tx: Transaction, wanted: Wanted) -> list[Any]:
    """Return the rows of the batches that a lease can go to in turn."""
    return list(tx.connection.execute(_in_turn(bool(wanted.drained)), wanted.parameters(tx.now)))


def at_risk(tx: Transaction, wanted: Wanted) -> list[Any]:
    """Return the rows of the batches at risk that a lease can go to out of turn."""
    return list(tx.connection.execute(_at_risk(bool(wanted.drained)), wanted.parameters(tx.now)))


def _may_be_taken(has_drained: bool) -> sa.ColumnElement[bool]:
    if not has_drained:
        return _IS_LEASABLE
    return _IS_LEASABLE & lanes.c.batch_id.not_in(sa.bindparam("drained", expanding=True))


def _starts_by(work: sa.CTE) -> sa.ColumnElement[float]:
    """As `order.latest_start` has it."""
    return work.c.deadline_at - work.c.work_seconds


def _is_lost(work: sa.CTE) -> sa.ColumnElement[bool]:
    """As `order.lost_from` has it."""
    return _starts_by(work) + sa.literal_column(repr(SLIP), sa.Double) * work.c.work_seconds < _NOW


@cache
def _in_turn(has_drained: bool) -> sa.Select[Any]:
    may_be_taken = _may_be_taken(has_drained)
    # The condition of the correlation is written out, so that each customer is one look into the index.
    waits = sa.select(lanes.c.batch_id).where(lanes.c.customer == service.c.customer, may_be_taken).correlate(service)
    next_ones = (
        sa.select(service.c.customer)
        .where(service.c.model == _MODEL, waits.exists())
        .order_by(service.c.tokens, service.c.customer)
        .limit(_MOST)
        .cte("next_ones")
    )
    # Reckoned once for each lane: what is not materialised is reckoned again wherever it is named.
    work = (
        sa.select(*_COLUMNS, _WORK_SECONDS.label("work_seconds"))
        .select_from(_FROM.join(next_ones, next_ones.c.customer == lanes.c.customer))
        .where(may_be_taken)
        .cte("work")
        .prefix_with("MATERIALIZED")
    )
    rank = (work.c.priority.desc(), _is_lost(work), _starts_by(work), work.c.created_at, work.c.batch_id)
    ranked = sa.select(
        *work.c, sa.func.row_number().over(partition_by=work.c.customer, order_by=rank).label("place")
    ).subquery("ranked")
    return sa.select(ranked).where(ranked.c.place <= _MOST)


@cache
def _at_risk(has_drained: bool) -> sa.Select[Any]:
    work = (
        sa.select(lanes.c.batch_id, lanes.c.deadline_at, _WORK_SECONDS.label("work_seconds"))
        .select_from(lanes.join(service, _OF_CUSTOMER))
        .where(_may_be_taken(has_drained))
        .cte("work")
        .prefix_with("MATERIALIZED")
    )
    first = (
        sa.select(work.c.batch_id)
        .where(_starts_by(work) - sa.bindparam("margin_seconds", type_=sa.Double) < _NOW, ~_is_lost(work))
        .order_by(_starts_by(work), work.c.batch_id)
        .limit(_MOST)
        .cte("first")
    )
    return (
        sa.select(*_COLUMNS)
        .select_from(_FROM.join(first, first.c.batch_id == lanes.c.batch_id))
        .where(lanes.c.model == _MODEL)
    )
