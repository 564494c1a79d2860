"""The audit trail: one row per transition, written in the transition's own transaction, so that neither is without
the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa

from batch_pipeline.ledger import records, rows
from batch_pipeline.ledger.database import Database, Transaction, execute_all
from batch_pipeline.ledger.schema import events

_COLUMNS = ("at", "batch_id", "chunk", "event", "actor", "token", "run_id", "detail")
_INSERT = events.insert()
_GIVEN = rows.given(*(events.c[name] for name in _COLUMNS))
_INSERT_GIVEN = events.insert().from_select(_COLUMNS, sa.select(*_GIVEN.c))
"""In Postgres, several at once."""


def record(
    tx: Transaction,
    batch_id: str,
    event: str,
    actor: str,
    *,
    chunk: int | None = None,
    token: int | None = None,
    run_id: str | None = None,
    detail: str | None = None,
) -> None:
    """Add an event to the transaction."""
    record_all(
        tx,
        [
            {
                "at": tx.now,
                "batch_id": batch_id,
                "chunk": chunk,
                "event": event,
                "actor": actor,
                "token": token,
                "run_id": run_id,
                "detail": detail,
            }
        ],
    )


def record_all(tx: Transaction, new: list[dict[str, object]]) -> None:
    """Add events to the transaction."""
    if len(new) > 1 and tx.is_postgres:
        tx.connection.execute(_INSERT_GIVEN, {rows.GIVEN: rows.json(new)})
    else:
        execute_all(tx, _INSERT, new)


class Events:
    """Reading the audit trail."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, batch_id: str, chunk: int | None = None, page: int = 1000) -> Iterator[records.Event]:
        """Yield a batch's events in the order in which they happened, of one chunk or of all."""
        after = 0
        while True:
            query = sa.select(events).where(events.c.batch_id == batch_id, events.c.sequence > after)
            if chunk is not None:
                query = query.where(events.c.chunk == chunk)
            with self._database.read() as tx:
                found = [
                    rows.event(row) for row in tx.connection.execute(query.order_by(events.c.sequence).limit(page))
                ]
            yield from found
            if len(found) < page:
                return
            after = found[-1].sequence
