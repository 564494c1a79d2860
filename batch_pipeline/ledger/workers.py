"""Workers as the ledger sees them: who is there, who cannot start and why, who is asked to leave; their heartbeats."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from batch_pipeline.errors import NotFound
from batch_pipeline.ledger import renewing, rows
from batch_pipeline.ledger.database import Database
from batch_pipeline.ledger.records import HeartbeatReply, LeaseRef, Standing, Worker, WorkerState
from batch_pipeline.ledger.schema import workers
from batch_pipeline.ledger.transitions import insert_for

_SEEN = (
    workers.update()
    .where(workers.c.worker_id == sa.bindparam("worker"))
    .values(seen_at=sa.bindparam("now"))
    .returning(workers.c.leave)
)
_SEEN_AND_MEASURED = _SEEN.values(tokens_per_second=sa.bindparam("speed"))


class Workers:
    """Workers and their heartbeats. Each function is one transaction; repeating it changes nothing more."""

    def __init__(self, database: Database, lease_seconds: float) -> None:
        self._database = database
        self._lease_seconds = lease_seconds

    def register(
        self, worker_id: str, model: str, run_id: str | None, host: str, batches_only: Sequence[str] = ()
    ) -> None:
        """Make a worker known, in state starting. A worker that is known already stays as it is."""
        with self._database.write() as tx:
            insert = insert_for(tx, workers).values(
                worker_id=worker_id,
                model=model,
                run_id=run_id,
                host=host,
                state=WorkerState.STARTING,
                batches=rows.json(list(batches_only)),
                started_at=tx.now,
                seen_at=tx.now,
            )
            tx.connection.execute(insert.on_conflict_do_nothing())

    def set_state(self, worker_id: str, state: WorkerState, detail: str | None = None) -> None:
        """Say where the worker is. Raises NotFound where it was never registered."""
        with self._database.write() as tx:
            changed = tx.connection.execute(
                workers.update()
                .where(workers.c.worker_id == worker_id)
                .values(
                    state=state,
                    detail=None if detail is None else detail[:2000],
                    seen_at=tx.now,
                    **(
                        {"ready_at": sa.func.coalesce(workers.c.ready_at, tx.now)} if state == WorkerState.READY else {}
                    ),
                )
            ).rowcount
        if not changed:
            raise NotFound(f"no worker {worker_id}")

    def heartbeat(
        self, worker_id: str, refs: Sequence[LeaseRef] = (), tokens_per_second: float | None = None
    ) -> HeartbeatReply:
        """Extend the worker's valid leases and tell how each stands, and whether the worker is asked to leave; note how
        fast it is, where it says so.

        Cost: one update of the worker, one look at its leases and one update of them, whatever their number.
        """
        with self._database.write() as tx:
            seen = _SEEN if tokens_per_second is None else _SEEN_AND_MEASURED
            worker = {"worker": worker_id, "now": tx.now, "speed": tokens_per_second}
            leave = tx.connection.execute(seen, worker).scalar_one_or_none()
            held = renewing.renew(tx, refs, tx.now + self._lease_seconds)
            standings = dict.fromkeys(refs, Standing.LOST)
            for ref, row in held.items():
                is_to_stop = row.outcome is not None or row.deadline_at <= tx.now
                standings[ref] = Standing.STOP if is_to_stop else Standing.HELD
        return HeartbeatReply(standings=standings, leave=bool(leave))

    def ask_to_leave(self, worker_id: str) -> None:
        """Ask a worker to hand back its leases and end; it hears of it with its next heartbeat."""
        with self._database.write() as tx:
            tx.connection.execute(workers.update().where(workers.c.worker_id == worker_id).values(leave=True))

    def of_models(self, models: Sequence[str], within_seconds: float = 3600.0) -> list[Worker]:
        """Return the workers of these models that were heard of lately, newest heartbeat first."""
        with self._database.read() as tx:
            query = (
                sa.select(workers)
                .where(workers.c.model.in_(list(models)), workers.c.seen_at > tx.now - within_seconds)
                .order_by(workers.c.seen_at.desc())
                .limit(1000)
            )
            return [rows.worker(row) for row in tx.connection.execute(query)]

    def of_runs(self, run_ids: Sequence[str]) -> dict[str, Worker]:
        """Return the worker of each of these runs that has one, by the run's id."""
        with self._database.read() as tx:
            found = tx.connection.execute(sa.select(workers).where(workers.c.run_id.in_(list(run_ids))))
            return {worker.run_id: worker for worker in map(rows.worker, found) if worker.run_id is not None}
