"""What batches wait for beside themselves: the workers of their models, and what was said to hold them up."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import sqlalchemy as sa

from batch_pipeline.ledger import rows
from batch_pipeline.ledger.database import Database
from batch_pipeline.ledger.notices import model_of
from batch_pipeline.ledger.records import Worker
from batch_pipeline.ledger.schema import notices, workers

_WORKER_SECONDS = 3600.0
_NOTICE_SECONDS = 120.0
_MOST_WORKERS = 10_000

# Built once: building a statement costs more than running it.
_NOTICES = (
    sa.select(notices.c.name, notices.c.text)
    .where(notices.c.seen_at > sa.bindparam("since"))
    .order_by(notices.c.since, notices.c.name)
)
_WORKERS = (
    sa.select(workers)
    .where(workers.c.model.in_(sa.bindparam("models", expanding=True)), workers.c.seen_at > sa.bindparam("since"))
    .order_by(workers.c.seen_at.desc())
    .limit(_MOST_WORKERS)
)


class Surroundings(msgspec.Struct, frozen=True):
    """Nothing of it names a customer."""

    workers: list[Worker] = []
    """Heard of in the last hour, newest heartbeat first."""
    notices: list[str] = []
    """What was said lately and holds up every batch, the oldest trouble first."""
    model_notices: dict[str, str] = {}
    """What keeps a model's next worker."""


class SurroundingsReader:
    """Reads them: two statements, however many models."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of_models(self, models: Collection[str]) -> Surroundings:
        """Return what batches of these models wait for. Of a batch whose models are not known yet there are none."""
        with self._database.read() as tx:
            said = tx.connection.execute(_NOTICES, {"since": tx.now - _NOTICE_SECONDS}).all()
            since = {"models": list(models), "since": tx.now - _WORKER_SECONDS}
            heard = tx.connection.execute(_WORKERS, since).all() if models else []
        of_all: list[str] = []
        of_model: dict[str, str] = {}
        for name, text in said:
            model = model_of(name)
            if model is None:
                of_all.append(text)
            elif model in models:
                of_model[model] = text
        return Surroundings([rows.worker(row) for row in heard], of_all, of_model)
