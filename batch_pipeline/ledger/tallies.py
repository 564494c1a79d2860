"""Running totals since the ledger was made: for metrics, which must not count rows that grow without end."""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa

from batch_pipeline.ledger.database import Transaction
from batch_pipeline.ledger.schema import tallies
from batch_pipeline.ledger.transitions import insert_for

LEASES_EXPIRED = "leases_expired"
ENDED = "batches_ended."
"""With the final status behind it."""
REQUESTS = "requests."
"""With completed, failed, expired, cancelled or invalid behind it: requests of batches that have ended."""
TOKENS = "tokens."
"""With input, cached or output behind it: of batches that have ended."""

ESTIMATES = "estimates."
"""With a milestone and the class of the error behind it (`accuracy`): of batches that were completed."""


def count(tx: Transaction, more: Mapping[str, int]) -> None:
    """Add to totals, in the transaction of what is counted. To be called last: everybody wants these rows."""
    for name, by in sorted(more.items()):
        if by:
            insert = insert_for(tx, tallies).values(name=name, total=by)
            tx.connection.execute(
                insert.on_conflict_do_update(index_elements=[tallies.c.name], set_={"total": tallies.c.total + by})
            )


def totals(tx: Transaction) -> dict[str, int]:
    """Return all totals by name."""
    return {row.name: int(row.total) for row in tx.connection.execute(sa.select(tallies).order_by(tallies.c.name))}
