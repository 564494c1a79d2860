"""The counters of the fair queue, set right: a lease charges a customer what its chunk is expected to use, and the end
of the lease makes that what the chunk has used.

    lease ──charge as expected──> leased ──commit, release──> charged as used, failed requests as expected
                                    └──expiry, failure──> charged as expected, until a later attempt is committed

The charge stands in the chunk's row, and is corrected in the transaction that changes the chunk's state: so it is
corrected once for each lease, whatever is killed or repeated. Killed before its commit nothing has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from batch_pipeline.ledger.database import Transaction, execute_all
from batch_pipeline.ledger.schema import batches, chunks, customers, is_open, service

_WEIGHT = sa.select(customers.c.weight).where(customers.c.customer == service.c.customer).scalar_subquery()
_CORRECTED = service.c.tokens + sa.bindparam("more_tokens", type_=sa.Double) / _WEIGHT
_CORRECT = (
    service.update()
    .where(service.c.model == sa.bindparam("of_model"), service.c.customer == sa.bindparam("of_customer"))
    .values(tokens=sa.case((service.c.floor > _CORRECTED, service.c.floor), else_=_CORRECTED))
)


_IS_CHARGED = chunks.c.charged.is_not(None) & chunks.c.batch_id.in_(
    sa.select(batches.c.batch_id).where(batches.c.customer == sa.bindparam("of_customer"), is_open)
)
_LOCK_CHARGED = (
    sa.select(chunks.c.chunk).where(_IS_CHARGED).order_by(chunks.c.batch_id, chunks.c.chunk).with_for_update(of=chunks)
)
_REWEIGH = chunks.update().where(_IS_CHARGED).values(charged=chunks.c.charged * sa.bindparam("by", type_=sa.Double))


def reweigh(tx: Transaction, customer: str, before: float, after: float) -> None:
    """Let a customer's charges stand for what they are in its counters, under its new weight.

    They were counted over the weight of their time. Corrected over a lower one they would give back more than they
    took: a credit of any size for what was on lease meanwhile. Cost: the charged chunks of the customer's open batches,
    which are locked in the order of their keys.
    """
    if before != after:
        tx.connection.execute(_LOCK_CHARGED, {"of_customer": customer})
        tx.connection.execute(_REWEIGH, {"of_customer": customer, "by": after / before})


def used(chunk: Any, failed: int, tokens: int) -> float:
    """Return what a chunk's row is to be charged: the tokens that its requests have used, of which `failed` have no
    answer, and for these their share of what it was charged.

    An engine tells no tokens of a request that it refuses or does not answer in time. Were they for nothing, a customer
    whose requests all fail would be the least served for as long as they do, and no other would have a turn.
    """
    charged, requests = float(chunk.charged or 0.0), int(chunk.requests)
    return tokens + charged * min(failed / requests, 1.0)


def correction(chunk: Any, used_tokens: float) -> float:
    """Return the tokens to charge beside what a chunk's row says, for it to be charged what it has used in all its
    attempts. One that was leased by a release without charges stays as it is: 0.
    """
    return 0.0 if chunk.charged is None else used_tokens - float(chunk.charged)


def correct_all(tx: Transaction, more_tokens: Mapping[tuple[str, str], float]) -> None:
    """Charge these tokens, by (model, customer), in place of what was expected.

    The chunks' rows are locked, and the caller writes their new charges. To be called after chunks and lanes, for the
    order of locks. A counter is not lowered below what it was when its customer came to the queue
    (`transitions.join_queue`).
    """
    execute_all(
        tx,
        _CORRECT,
        [
            {"of_model": model, "of_customer": customer, "more_tokens": more}
            for (model, customer), more in sorted(more_tokens.items())
            if more
        ],
    )
