"""What metrics show of the ledger: sums that cost as much as the open batches, whatever has been served before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from batch_pipeline.ledger import tallies
from batch_pipeline.ledger.database import Database, Transaction
from batch_pipeline.ledger.schema import batches, chunks, deliveries, is_leased, is_open, is_undelivered, lanes, workers

_CHUNK_STATES = ("pending", "leased", "committed", "stopped")
_PAGE = 500


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger at one moment."""

    open_batches: dict[str, int]
    """By status."""
    chunks: dict[tuple[str, str], int]
    """Of open batches, by model and state."""
    backlog_tokens: dict[str, int]
    """By model: estimated tokens, of prompts and answers, of chunks that wait."""
    workers: dict[tuple[str, str], int]
    """Those heard of lately, by model and state."""
    overdue_leases: int
    """Leases that have run out and were not taken away yet."""
    waiting_webhooks: int
    totals: dict[str, int]
    """`tallies` by name: since the ledger was made."""


class Reader:
    """Reads the gauges."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self, workers_seen_within_seconds: float = 300.0) -> Gauges:
        """Return the ledger's gauges. Cost: the open batches' rows and lanes, the live workers, a dozen totals."""
        overdue = sa.select(sa.func.count()).select_from(chunks)
        waiting = sa.select(sa.func.count()).select_from(deliveries).where(is_undelivered)
        with self._database.read() as tx:
            run = tx.connection.execute
            opened = run(sa.select(batches.c.batch_id, batches.c.status).where(is_open)).all()
            in_chunks, backlog = _sums(tx, [batch_id for batch_id, _ in opened])
            seen = run(
                sa.select(workers.c.model, workers.c.state, sa.func.count())
                .where(workers.c.seen_at > tx.now - workers_seen_within_seconds)
                .group_by(workers.c.model, workers.c.state)
            ).all()
            return Gauges(
                open_batches=dict(Counter(status for _, status in opened)),
                chunks=dict(in_chunks),
                backlog_tokens=dict(backlog),
                workers={(model, state): int(count) for model, state, count in seen},
                overdue_leases=int(run(overdue.where(is_leased, chunks.c.expires_at <= tx.now)).scalar_one()),
                waiting_webhooks=int(run(waiting).scalar_one()),
                totals=tallies.totals(tx),
            )


def _sums(tx: Transaction, batch_ids: Sequence[str]) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """Return chunks by model and state, and waiting tokens by model, of these batches.

    By their ids, a page at a time: joined to the open batches, either database would read the lanes of all.
    """
    in_chunks: Counter[tuple[str, str]] = Counter()
    backlog: Counter[str] = Counter()
    sums = [sa.func.sum(lanes.c[name]).label(name) for name in (*_CHUNK_STATES, "pending_tokens")]
    for start in range(0, len(batch_ids), _PAGE):
        these = lanes.c.batch_id.in_(batch_ids[start : start + _PAGE])
        for row in tx.connection.execute(sa.select(lanes.c.model, *sums).where(these).group_by(lanes.c.model)):
            backlog[row.model] += int(row.pending_tokens)
            for state in _CHUNK_STATES:
                in_chunks[row.model, state] += int(getattr(row, state))
    return in_chunks, backlog
