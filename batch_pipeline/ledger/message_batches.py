"""Batches as the Anthropic door shows them: those whose endpoint is `/v1/messages`, by whatever door they came."""

from __future__ import annotations

import sqlalchemy as sa

from batch_pipeline.errors import NotAllowedInState, NotFound
from batch_pipeline.ledger import rows
from batch_pipeline.ledger.database import Database, Transaction
from batch_pipeline.ledger.events import record
from batch_pipeline.ledger.records import Batch, BatchStatus
from batch_pipeline.ledger.schema import batches
from batch_pipeline.ledger.transitions import lock_batch, update_batch
from batch_pipeline.models import MESSAGES

_ORDER = (batches.c.created_at, batches.c.batch_id)


class MessageBatches:
    """Every lookup names the customer: what is another's, of another endpoint, or deleted is not found (I8)."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, customer: str, batch_id: str) -> Batch:
        """Return a batch. Raises NotFound."""
        with self._database.read() as tx:
            return _get(tx, customer, batch_id)

    def page(
        self, customer: str, *, after: str | None = None, before: str | None = None, limit: int
    ) -> tuple[list[Batch], bool]:
        """Return at most `limit` batches, newest first, and whether there are more in the direction asked.

        Those next to `after` on its older side, or next to `before` on its newer side. Raises NotFound for either.
        """
        query = rows.BATCH.where(_shown(customer))
        newest_first = before is None
        with self._database.read() as tx:
            for batch_id, is_after in ((after, True), (before, False)):
                if batch_id is not None:
                    edge = _get(tx, customer, batch_id)
                    place = sa.tuple_(sa.literal(edge.created_at), sa.literal(edge.batch_id))
                    key = sa.tuple_(*_ORDER)
                    query = query.where(key < place if is_after else key > place)
            order = [column.desc() if newest_first else column.asc() for column in _ORDER]
            found = [rows.batch(row) for row in tx.connection.execute(query.order_by(*order).limit(limit + 1))]
        page = found[:limit]
        return page if newest_first else page[::-1], len(found) > limit

    def delete(self, customer: str, batch_id: str) -> None:
        """Show a batch no more. Its row stays, with its counts and its bill.

        Raises NotFound; NotAllowedInState before its end.
        """
        with self._database.write() as tx:
            lock_batch(tx, batch_id)
            batch = _get(tx, customer, batch_id)
            check_ended(batch)
            update_batch(tx, batch_id, deleted_at=tx.now)
            record(tx, batch_id, "deleted", "api")


def check_ended(batch: Batch) -> None:
    """Raise NotAllowedInState before the end of a batch."""
    if not BatchStatus(batch.status).is_final:
        raise NotAllowedInState("the batch has not ended: cancel it first, and delete it once it has")


def _shown(customer: str) -> sa.ColumnElement[bool]:
    return (batches.c.customer == customer) & (batches.c.endpoint == MESSAGES) & batches.c.deleted_at.is_(None)


def _get(tx: Transaction, customer: str, batch_id: str) -> Batch:
    row = tx.connection.execute(rows.BATCH.where(_shown(customer), batches.c.batch_id == batch_id)).one_or_none()
    if row is None:
        raise NotFound(f"no message batch msg{batch_id}")
    return rows.batch(row)
