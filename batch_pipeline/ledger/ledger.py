"""The ledger: one object that holds its parts."""

from __future__ import annotations

import sqlalchemy as sa

from batch_pipeline.ledger.alarms import Alarms
from batch_pipeline.ledger.batches import Batches
from batch_pipeline.ledger.chunks import Chunks
from batch_pipeline.ledger.customers import Customers
from batch_pipeline.ledger.database import Clock, Database
from batch_pipeline.ledger.desk import Desk
from batch_pipeline.ledger.events import Events
from batch_pipeline.ledger.files import Files
from batch_pipeline.ledger.gauges import Reader
from batch_pipeline.ledger.leasing import Policy
from batch_pipeline.ledger.message_batches import MessageBatches
from batch_pipeline.ledger.model_queues import Queues
from batch_pipeline.ledger.moments import Moments
from batch_pipeline.ledger.notices import Notices
from batch_pipeline.ledger.quotas import Quotas
from batch_pipeline.ledger.retention import Retention
from batch_pipeline.ledger.schema import batches, is_open, lanes
from batch_pipeline.ledger.surroundings import SurroundingsReader
from batch_pipeline.ledger.uploads import Uploads
from batch_pipeline.ledger.usage import Usage
from batch_pipeline.ledger.webhooks import Webhooks
from batch_pipeline.ledger.workers import Workers
from batch_pipeline.scheduling.placement import Backlog
from batch_pipeline.settings import Limits, Settings

_FAIR_ONLY = Policy()


class Ledger:
    """The metadata database. Safe to use from several threads and processes at once."""

    def __init__(
        self, database: Database, lease_seconds: float, max_failures: int, limits: Limits, policy: Policy
    ) -> None:
        self._database = database
        self.customers = Customers(database, limits)
        self.quotas = Quotas(database)
        self.batches = Batches(database, limits)
        self.moments = Moments(database)
        self.surroundings = SurroundingsReader(database)
        self.chunks = Chunks(database, lease_seconds, max_failures, policy)
        self.workers = Workers(database, lease_seconds)
        self.events = Events(database)
        self.notices = Notices(database)
        self.files = Files(database)
        self.uploads = Uploads(database)
        self.retention = Retention(database)
        self.usage = Usage(database)
        self.webhooks = Webhooks(database)
        self.gauges = Reader(database)
        self.message_batches = MessageBatches(database)
        self.desk = Desk(database)
        self.alarms = Alarms(database)
        self.queues = Queues(database)

    @classmethod
    def open(
        cls,
        url: str,
        *,
        lease_seconds: float = 60.0,
        max_failures: int = 8,
        limits: Limits | None = None,
        policy: Policy = _FAIR_ONLY,
        clock: Clock | None = None,
    ) -> Ledger:
        """Open the ledger at a SQLAlchemy URL, creating its tables where they are missing.

        `limits` are those of customers for whom none were set; `policy` says how far batches at risk go ahead of
        others.
        """
        database = Database(url, clock)
        database.set_up()
        return cls(database, lease_seconds, max_failures, limits or Limits(), policy)

    @classmethod
    def from_settings(cls, settings: Settings, clock: Clock | None = None) -> Ledger:
        """Open the ledger of the configuration."""
        return cls.open(
            settings.ledger.url,
            lease_seconds=settings.worker.lease_seconds,
            max_failures=settings.worker.max_chunk_attempts,
            limits=settings.limits,
            policy=Policy(
                margin_seconds=settings.scheduling.at_risk_minutes * 60,
                share=settings.scheduling.at_risk_share,
                most_tokens=2.0 * settings.intake.chunk_tokens,
                declared={
                    name: model.tokens_per_second
                    for name, model in settings.models.items()
                    if model.tokens_per_second is not None
                },
            ),
            clock=clock,
        )

    def now(self) -> float:
        """Return the database's time: UTC seconds since the epoch."""
        with self._database.read() as tx:
            return tx.now

    def backlog(self) -> list[Backlog]:
        """Return what waits and what runs, per model, of batches that may still be leased."""
        query = (
            sa.select(
                lanes.c.model,
                sa.func.sum(lanes.c.pending).label("pending"),
                sa.func.sum(lanes.c.pending_tokens).label("pending_tokens"),
                sa.func.sum(lanes.c.leased).label("leased"),
                sa.func.min(batches.c.deadline_at).label("first_deadline_at"),
            )
            .join(batches, batches.c.batch_id == lanes.c.batch_id)
            .where(
                is_open,
                batches.c.status == "in_progress",
                batches.c.outcome.is_(None),
                (lanes.c.pending + lanes.c.leased) > 0,
            )
            .group_by(lanes.c.model)
            .order_by(lanes.c.model)
        )
        with self._database.read() as tx:
            return [
                Backlog(
                    model=row.model,
                    pending=int(row.pending),
                    pending_tokens=int(row.pending_tokens),
                    leased=int(row.leased),
                    first_deadline_at=row.first_deadline_at,
                )
                for row in tx.connection.execute(query)
            ]

    def close(self) -> None:
        """Close all connections."""
        self._database.close()
