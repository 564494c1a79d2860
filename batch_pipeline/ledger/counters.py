"""The counters of the fair queue, set right: a lease charges a customer what its chunk is expected to use, and the end
of the lease makes that what the chunk has used.

    lease ──charge as expected──> leased ──commit, release──> charged as used
                                    └──expiry, failure──> charged as expected, until a later attempt is committed

The charge stands in the chunk's row, and is corrected in the transaction that changes the chunk's state: so it is
corrected once for each lease, whatever is killed or repeated. Killed before its commit nothing has changed.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from batch_pipeline.ledger.database import Transaction
from batch_pipeline.ledger.schema import batches, customers, service

_CUSTOMER = sa.select(batches.c.customer).where(batches.c.batch_id == sa.bindparam("of_batch")).scalar_subquery()
_WEIGHT = sa.select(customers.c.weight).where(customers.c.customer == service.c.customer).scalar_subquery()
_CORRECTED = service.c.tokens + sa.bindparam("more_tokens", type_=sa.Double) / _WEIGHT
_CORRECT = (
    service.update()
    .where(service.c.model == sa.bindparam("of_model"), service.c.customer == _CUSTOMER)
    .values(tokens=sa.case((service.c.floor > _CORRECTED, service.c.floor), else_=_CORRECTED))
)


def correct(tx: Transaction, chunk: Any, used_tokens: float) -> None:
    """Charge a chunk what it has used in all its attempts, in place of what its row says.

    `chunk` is the row, locked and as it was before; the caller writes the new charge. To be called after chunks and
    lanes, for the order of locks. One that was leased by a release without charges stays as it is. A counter is not
    lowered below what it was when its customer came to the queue (`transitions.join_queue`).
    """
    if chunk.charged is not None and chunk.charged != used_tokens:
        more = {"of_batch": chunk.batch_id, "of_model": chunk.model, "more_tokens": used_tokens - chunk.charged}
        tx.connection.execute(_CORRECT, more)
