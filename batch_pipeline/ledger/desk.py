"""What the operator's desk asks of the ledger: whose progress is to be shown, which batches are at risk.

Each write is one transaction of one row: killed before its commit nothing has changed, after it all has. None of them
is a transition: the batch's revision stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import sqlalchemy as sa

from batch_pipeline.ledger import rows
from batch_pipeline.ledger.database import Database
from batch_pipeline.ledger.records import BatchStatus
from batch_pipeline.ledger.schema import batches, is_at_risk, is_open, lanes
from batch_pipeline.ledger.transitions import lock_batch
from batch_pipeline.scheduling.accuracy import Kept, Milestone
from batch_pipeline.scheduling.risk import Pace

STEPS = 20
"""Steps of progress of a batch: so many times at most is it shown on the way."""


class Due(NamedTuple):
    """A batch whose progress is to be shown."""

    batch_id: str
    step: int


class Settled(NamedTuple):
    """A batch that was said to be at risk and has ended."""

    batch_id: str
    in_time: bool
    status: str


_PAGE = 1000
# Of one batch after the other: for a sum by group SQLite would read all batches there ever were, in the groups' order.
_DONE = (
    sa.select(sa.func.sum(lanes.c.completed + lanes.c.failed))
    .where(lanes.c.batch_id == batches.c.batch_id)
    .correlate(batches)
    .scalar_subquery()
)
"""Requests of a batch that have ended; null where it has no chunks."""
_RUNNING = (
    is_open,
    batches.c.status == BatchStatus.IN_PROGRESS,
    batches.c.outcome.is_(None),
    batches.c.in_progress_at.is_not(None),
)


def _kept(text: str | None) -> dict[Milestone, Kept]:
    return {} if text is None else msgspec.json.decode(text, type=dict[Milestone, Kept])


class Desk:
    """Reading and noting what operators are shown."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def to_observe(self, interval_seconds: float, limit: int) -> list[Due]:
        """Return batches in progress that have come a step further since they were last shown, which is at least
        `interval_seconds` ago; those that were shown longest ago first. Cost: the lanes of the batches in progress.
        """
        requests = batches.c.total - batches.c.invalid
        with self._database.read() as tx:
            query = (
                sa.select(batches.c.batch_id, requests.label("requests"), _DONE.label("done"))
                .where(
                    *_RUNNING,
                    requests > 0,
                    sa.func.coalesce(batches.c.observed_at, 0.0) <= tx.now - interval_seconds,
                    # Multiplied, not divided: sums are decimals in one database and whole numbers in the other.
                    (batches.c.observed_step + 1) * requests <= _DONE * STEPS,
                )
                .order_by(sa.func.coalesce(batches.c.observed_at, 0.0), batches.c.batch_id)
                .limit(limit)
            )
            return [
                Due(row.batch_id, min(int(row.done) * STEPS // int(row.requests), STEPS))
                for row in tx.connection.execute(query)
            ]

    def note_observed(self, due: Due) -> bool:
        """Note that a step of a batch is shown; False where it was already.

        To be called before it is shown: whoever is killed in between has shown one step less, never one twice.
        """
        with self._database.write() as tx:
            changed = tx.connection.execute(
                batches.update()
                .where(batches.c.batch_id == due.batch_id, batches.c.observed_step < due.step)
                .values(observed_step=due.step, observed_at=tx.now)
                .returning(batches.c.batch_id)
            )
            return changed.first() is not None

    def paces(self) -> Iterator[Pace]:
        """Yield the pace of every batch in progress, those whose deadline is next first. Cost: their lanes."""
        page = self._paces(sa.true())
        yield from page
        while len(page) == _PAGE:
            last = page[-1]
            later = batches.c.deadline_at > last.deadline_at
            same = (batches.c.deadline_at == last.deadline_at) & (batches.c.batch_id > last.batch_id)
            page = self._paces(later | same)
            yield from page

    def pace(self, batch_id: str) -> Pace | None:
        """Return the pace of a batch; None where it is not in progress."""
        return next(iter(self._paces(batches.c.batch_id == batch_id)), None)

    def _paces(self, where: sa.ColumnElement[bool]) -> list[Pace]:
        query = (
            sa.select(
                batches.c.batch_id,
                batches.c.customer,
                batches.c.name,
                batches.c.models,
                batches.c.estimates,
                batches.c.in_progress_at,
                batches.c.deadline_at,
                batches.c.at_risk_at,
                (batches.c.total - batches.c.invalid).label("requests"),
                _DONE.label("done"),
            )
            .where(*_RUNNING, _DONE.is_not(None), where)
            .order_by(batches.c.deadline_at, batches.c.batch_id)
            .limit(_PAGE)
        )
        with self._database.read() as tx:
            return [
                Pace(
                    batch_id=row.batch_id,
                    customer=row.customer,
                    name=row.name,
                    models=msgspec.json.decode(row.models, type=list[str]),
                    started_at=row.in_progress_at,
                    deadline_at=row.deadline_at,
                    done=int(row.done),
                    total=int(row.requests),
                    at_risk_at=row.at_risk_at,
                    kept=_kept(row.estimates),
                )
                for row in tx.connection.execute(query)
            ]

    def estimates(self, batch_id: str) -> dict[Milestone, Kept]:
        """Return the estimates of a batch's finish that were kept; none where there is no such batch."""
        query = sa.select(batches.c.estimates).where(batches.c.batch_id == batch_id)
        with self._database.read() as tx:
            return _kept(tx.connection.execute(query).scalar_one_or_none())

    def keep_estimate(self, batch_id: str, milestones: Sequence[Milestone], finish_at: float) -> None:
        """Keep what is estimated now for these milestones; those that have one keep it.

        Killed before its commit nothing is kept, and the next look does it; after it all is. Once the batch's chunks
        have stopped, nothing is kept any more.
        """
        with self._database.write() as tx:
            batch = lock_batch(tx, batch_id)
            if batch is None or batch.status != BatchStatus.IN_PROGRESS:
                return
            now = Kept(made_at=tx.now, finish_at=finish_at)
            kept = {**dict.fromkeys(milestones, now), **_kept(batch.estimates)}
            tx.connection.execute(
                batches.update().where(batches.c.batch_id == batch_id).values(estimates=rows.json(kept))
            )

    def note_risk(self, batch_id: str, *, at_risk: bool) -> bool:
        """Note that a batch is at risk, or is so no longer; False where that was noted already."""
        was = batches.c.at_risk_at.is_(None) if at_risk else is_at_risk
        with self._database.write() as tx:
            changed = tx.connection.execute(
                batches.update()
                .where(batches.c.batch_id == batch_id, was)
                .values(at_risk_at=tx.now if at_risk else None)
                .returning(batches.c.batch_id)
            )
            return changed.first() is not None

    def at_risk_and_over(self, limit: int = 50) -> list[Settled]:
        """Return batches that were said to be at risk and have ended."""
        query = (
            sa.select(batches.c.batch_id, batches.c.status, batches.c.finalizing_at, batches.c.deadline_at)
            .where(is_at_risk, ~is_open)
            .order_by(batches.c.at_risk_at)
            .limit(limit)
        )
        with self._database.read() as tx:
            return [
                Settled(
                    row.batch_id,
                    row.status == BatchStatus.COMPLETED and (row.finalizing_at or 0.0) <= row.deadline_at,
                    row.status,
                )
                for row in tx.connection.execute(query)
            ]
