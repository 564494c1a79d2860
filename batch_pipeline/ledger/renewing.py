"""leased -> leased: leases whose worker is alive go on, also those that have run out and were not taken away yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from batch_pipeline.ledger import rows
from batch_pipeline.ledger.database import Transaction
from batch_pipeline.ledger.records import LeaseRef
from batch_pipeline.ledger.schema import batches, chunks, is_leased

_HELD = (
    sa.select(chunks.c.batch_id, chunks.c.chunk, chunks.c.token, batches.c.outcome, batches.c.deadline_at)
    .join(batches, batches.c.batch_id == chunks.c.batch_id)
    .where(rows.IS_ONE_OF, is_leased)
    .order_by(chunks.c.batch_id, chunks.c.chunk)
    .with_for_update(of=chunks)
)
"""Leases of some chunks, locked in the order of their keys, and whether their batches are to stop."""
_EXTEND = chunks.update().where(rows.IS_ONE_OF).values(expires_at=sa.bindparam("until"))


def renew(tx: Transaction, refs: Sequence[LeaseRef], expires_at: float) -> dict[LeaseRef, Any]:
    """Extend those of the leases that are valid, and return their rows: what became of their batches, and the deadline.

    Cost: a look at them and one update, whatever their number. Killed before the commit nothing has changed; after it,
    or repeated, they are valid until then.
    """
    found = tx.connection.execute(_HELD, rows.keys_of(refs)).all() if refs else []
    wanted = set(refs)
    held = {ref: row for row in found if (ref := LeaseRef(row.batch_id, row.chunk, row.token)) in wanted}
    if held:
        tx.connection.execute(_EXTEND, {**rows.keys_of(list(held)), "until": expires_at})
    return held
