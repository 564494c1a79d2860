"""The life of a chunk (drawn in `records`): leases with fencing tokens, checkpoints, commits.

A lease is valid while the chunk is `leased` with its token; it may be taken away once `expires_at` has passed by the
database's clock (invariant I3). Every write of a worker names its lease and is refused with LeaseLost where it is not
valid any more. Killed before its commit a transaction has changed nothing, after it everything; none is half done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from batch_pipeline.errors import LeaseLost, NotFound
from batch_pipeline.ledger import events, records, rows
from batch_pipeline.ledger.database import Database, Transaction
from batch_pipeline.ledger.records import BatchStatus, Chunk, ChunkState, CommitReply, Lease, LeaseRef, Part
from batch_pipeline.ledger.schema import batches, chunks, customers, lanes, service
from batch_pipeline.ledger.transitions import chunk_event, join_queue, lock_batch, part_sums, settle, update_lane
from batch_pipeline.scheduling.order import CustomerShare, WaitingBatch, choose

_STOPPED_STATE = {
    BatchStatus.CANCELLED: ChunkState.CANCELLED,
    BatchStatus.EXPIRED: ChunkState.EXPIRED,
    BatchStatus.FAILED: ChunkState.CANCELLED,
}


class Chunks:
    """Chunks and their transitions."""

    def __init__(self, database: Database, lease_seconds: float, max_failures: int) -> None:
        self._database = database
        self._lease_seconds = lease_seconds
        self._max_failures = max_failures

    def lease(
        self,
        worker_id: str,
        model: str,
        limit: int,
        batches_only: Sequence[str] | None = None,
        run_id: str | None = None,
    ) -> list[Lease]:
        """pending -> leased, for at most `limit` chunks of a model, in the order that the policy gives.

        Leases that have run out are taken away first. Two workers never get the same chunk: the rows are locked, and
        locked ones are skipped.
        """
        self.expire_leases()
        with self._database.write() as tx:
            waiting = self._waiting(tx, model, batches_only)
            leased: list[Lease] = []
            for pick in choose(waiting, self._shares(tx, model, waiting), limit):
                leased += self._lease_of(tx, pick.batch_id, model, pick.chunks, worker_id=worker_id, run_id=run_id)
            self._charge(tx, model, leased)
            return leased

    def _waiting(self, tx: Transaction, model: str, only: Sequence[str] | None) -> list[WaitingBatch]:
        query = (
            sa.select(
                batches.c.batch_id,
                batches.c.customer,
                batches.c.priority,
                batches.c.deadline_at,
                batches.c.created_at,
                lanes.c.pending,
                lanes.c.pending_tokens,
            )
            .join(batches, batches.c.batch_id == lanes.c.batch_id)
            .where(
                lanes.c.model == model,
                lanes.c.pending > sa.literal_column("0"),
                batches.c.status == BatchStatus.IN_PROGRESS,
                batches.c.outcome.is_(None),
                batches.c.deadline_at > tx.now,
            )
        )
        if only:
            query = query.where(batches.c.batch_id.in_(list(only)))
        return [
            WaitingBatch(
                batch_id=row.batch_id,
                customer=row.customer,
                pending_chunks=row.pending,
                pending_tokens=row.pending_tokens,
                priority=row.priority,
                deadline_at=row.deadline_at,
                created_at=row.created_at,
            )
            for row in tx.connection.execute(query)
        ]

    def _shares(self, tx: Transaction, model: str, waiting: list[WaitingBatch]) -> dict[str, CustomerShare]:
        names = sorted({batch.customer for batch in waiting})
        query = (
            sa.select(customers.c.customer, customers.c.weight, sa.func.coalesce(service.c.tokens, 0.0).label("tokens"))
            .outerjoin(service, (service.c.customer == customers.c.customer) & (service.c.model == model))
            .where(customers.c.customer.in_(names))
        )
        return {
            row.customer: CustomerShare(weight=row.weight, served=row.tokens) for row in tx.connection.execute(query)
        }

    def _lease_of(
        self, tx: Transaction, batch_id: str, model: str, limit: int, *, worker_id: str, run_id: str | None
    ) -> list[Lease]:
        free = (
            sa.select(chunks.c.chunk)
            .where(
                chunks.c.batch_id == batch_id,
                chunks.c.model == model,
                chunks.c.state == sa.literal_column("'pending'"),
            )
            .order_by(chunks.c.chunk)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        numbers = list(tx.connection.execute(free).scalars())
        if not numbers:
            return []
        updated = tx.connection.execute(
            chunks.update()
            .where(chunks.c.batch_id == batch_id, chunks.c.chunk.in_(numbers))
            .values(
                state=ChunkState.LEASED,
                token=chunks.c.token + 1,
                worker_id=worker_id,
                run_id=run_id,
                expires_at=tx.now + self._lease_seconds,
            )
            .returning(chunks)
        ).all()
        taken = sorted(updated, key=lambda row: int(row.chunk))
        tokens = sum(row.prompt_tokens + row.max_output_tokens for row in taken)
        update_lane(tx, batch_id, model, pending=-len(taken), leased=len(taken), pending_tokens=-tokens)
        batch = tx.connection.execute(
            sa.select(batches.c.customer, batches.c.endpoint, batches.c.deadline_at).where(
                batches.c.batch_id == batch_id
            )
        ).one()
        events.record_all(
            tx,
            [
                chunk_event(tx, batch_id, row.chunk, "leased", worker_id, token=row.token, run_id=run_id)
                for row in taken
            ],
        )
        return [
            Lease(
                ref=LeaseRef(batch_id, row.chunk, row.token),
                customer=batch.customer,
                endpoint=batch.endpoint,
                model=model,
                input_key=row.input_key,
                requests=row.requests,
                parts=rows.parts(row.parts),
                expires_at=row.expires_at,
                deadline_at=batch.deadline_at,
                attempts=row.token,
                tokens=row.prompt_tokens + row.max_output_tokens,
            )
            for row in taken
        ]

    def _charge(self, tx: Transaction, model: str, leased: list[Lease]) -> None:
        """Count the leased tokens as service to their customers, over their weights."""
        tokens: dict[str, int] = {}
        for lease in leased:
            tokens[lease.customer] = tokens.get(lease.customer, 0) + lease.tokens
        weight = sa.select(customers.c.weight).where(customers.c.customer == service.c.customer).scalar_subquery()
        for customer, amount in sorted(tokens.items()):
            tx.connection.execute(
                service.update()
                .where(service.c.model == model, service.c.customer == customer)
                .values(tokens=service.c.tokens + amount / weight)
            )

    def checkpoint(self, ref: LeaseRef, part: Part) -> None:
        """Add a part to a leased chunk: its requests are not run again, whatever happens. Raises LeaseLost."""
        with self._database.write() as tx:
            row = _leased(tx, ref)
            kept = [*rows.parts(row.parts), part]
            tx.connection.execute(_at(ref).values(parts=rows.json(kept)))
            update_lane(
                tx,
                ref.batch_id,
                row.model,
                completed=part.completed,
                failed=part.failed,
                input_tokens=part.input_tokens,
                cached_tokens=part.cached_tokens,
                output_tokens=part.output_tokens,
            )

    def commit(self, ref: LeaseRef, result: records.ChunkResult) -> CommitReply:
        """leased -> committed: point the chunk at its result (invariant I4). Raises LeaseLost.

        Killed before: the objects are garbage and the chunk is run again from its checkpoints. Killed after: it is
        committed, and the sweep settles its batch. Committing the same result twice with one lease is committing once.
        """
        with self._database.write() as tx:
            row = _locked(tx, ref)
            if row is not None and row.state == ChunkState.COMMITTED and row.token == ref.token:
                if row.result != rows.json(result):
                    raise LeaseLost(f"chunk {ref.chunk} of {ref.batch_id} was committed with another result")
            else:
                self._commit(tx, _valid(row, ref), ref, result)
        with self._database.write() as tx:
            return self._reply(tx, ref, str(row.worker_id))

    def _commit(self, tx: Transaction, row: Any, ref: LeaseRef, result: records.ChunkResult) -> None:
        tx.connection.execute(
            _at(ref).values(
                state=ChunkState.COMMITTED,
                result=rows.json(result),
                committed_at=tx.now,
                expires_at=None,
                last_error=None,
            )
        )
        # What the checkpoints have counted already is not counted again.
        completed, failed, given, cached, made = part_sums(rows.parts(row.parts))
        update_lane(
            tx,
            ref.batch_id,
            row.model,
            leased=-1,
            committed=1,
            completed=result.completed - completed,
            failed=result.failed - failed,
            input_tokens=result.input_tokens - given,
            cached_tokens=result.cached_tokens - cached,
            output_tokens=result.output_tokens - made,
        )
        detail = f"{result.completed} completed, {result.failed} failed"
        events.record(
            tx,
            ref.batch_id,
            "committed",
            row.worker_id,
            chunk=ref.chunk,
            token=ref.token,
            run_id=row.run_id,
            detail=detail,
        )

    def release(self, ref: LeaseRef, reason: str, failed: bool = False) -> CommitReply:
        """leased -> pending, with its parts kept; cancelled or expired where the batch is to stop. Raises LeaseLost.

        `failed` counts toward giving the chunk up; a worker that merely gives way does not count.
        """
        with self._database.write() as tx:
            batch = lock_batch(tx, ref.batch_id)
            row = _leased(tx, ref)
            self._let_go(tx, batch, row, "released", reason=reason, failed=failed)
        with self._database.write() as tx:
            return self._reply(tx, ref, str(row.worker_id))

    def expire_leases(self, limit: int = 100) -> int:
        """leased -> pending for leases that have run out (cancelled, expired or failed where that is due).

        Returns how many. A worker that comes back afterwards finds its token refused.
        """
        overdue = (
            sa.select(chunks.c.batch_id, chunks.c.chunk, chunks.c.token)
            .where(chunks.c.state == sa.literal_column("'leased'"))
            .order_by(chunks.c.expires_at)
            .limit(limit)
        )
        with self._database.read() as tx:
            found = tx.connection.execute(overdue.where(chunks.c.expires_at <= tx.now)).all()
        return sum(self._expire_lease(LeaseRef(*row)) for row in found)

    def _expire_lease(self, ref: LeaseRef) -> bool:
        with self._database.write() as tx:
            batch = lock_batch(tx, ref.batch_id)
            row = _locked(tx, ref)
            # A heartbeat may have come between the look and the lock.
            if row is None or row.state != ChunkState.LEASED or row.token != ref.token or row.expires_at > tx.now:
                return False
            silence = f"{row.worker_id} was not heard of in time"
            self._let_go(tx, batch, row, "lease_expired", reason=silence, failed=True)
            settle(tx, lock_batch(tx, ref.batch_id), "sweep")
            return True

    def _let_go(self, tx: Transaction, batch: Any, row: Any, event: str, *, reason: str, failed: bool) -> None:
        """Take a lease back; the batch's row and the chunk's are locked."""
        failures = row.failures + (1 if failed else 0)
        state = ChunkState.FAILED if failures >= self._max_failures else ChunkState.PENDING
        if batch.outcome is not None:
            state = _STOPPED_STATE.get(batch.outcome, ChunkState.CANCELLED)
        ref = LeaseRef(row.batch_id, row.chunk, row.token)
        tx.connection.execute(
            _at(ref).values(state=state, failures=failures, expires_at=None, last_error=reason[:2000])
        )
        tokens = row.prompt_tokens + row.max_output_tokens
        if state == ChunkState.PENDING:
            join_queue(tx, batch.customer, row.model)
            update_lane(tx, row.batch_id, row.model, leased=-1, pending=1, pending_tokens=tokens)
        else:
            update_lane(tx, row.batch_id, row.model, leased=-1, stopped=1)
        detail = f"{reason[:500]}; now {state}"
        events.record(
            tx,
            row.batch_id,
            event,
            row.worker_id,
            chunk=row.chunk,
            token=row.token,
            run_id=row.run_id,
            detail=detail,
        )

    def _reply(self, tx: Transaction, ref: LeaseRef, actor: str) -> CommitReply:
        """Settle the batch if this was its last open chunk; in a transaction of its own, for the order of locks."""
        open_chunks = tx.connection.execute(
            sa.select(sa.func.sum(lanes.c.pending + lanes.c.leased)).where(lanes.c.batch_id == ref.batch_id)
        ).scalar_one()
        if open_chunks:
            return CommitReply(batch_drained=False)
        return CommitReply(batch_drained=settle(tx, lock_batch(tx, ref.batch_id), actor))

    def want_again(self, batch_id: str, actor: str) -> int:
        """failed -> pending for the chunks of a batch that were given up; returns how many. Nothing committed is
        touched.

        Raises NotFound. A batch whose results are final or being assembled is left alone: 0.
        """
        with self._database.write() as tx:
            batch = lock_batch(tx, batch_id)
            if batch is None:
                raise NotFound(f"no batch {batch_id}")
            if batch.status != BatchStatus.IN_PROGRESS or batch.outcome is not None:
                return 0
            wanted = tx.connection.execute(
                chunks.update()
                .where(chunks.c.batch_id == batch_id, chunks.c.state == ChunkState.FAILED)
                .values(state=ChunkState.PENDING, failures=0)
                .returning(chunks.c.chunk, chunks.c.model, chunks.c.prompt_tokens + chunks.c.max_output_tokens)
            ).all()
            for _, model, tokens in sorted(wanted):
                join_queue(tx, batch.customer, model)
                update_lane(tx, batch_id, model, stopped=-1, pending=1, pending_tokens=tokens)
            events.record_all(tx, [chunk_event(tx, batch_id, row[0], "wanted_again", actor) for row in sorted(wanted)])
            return len(wanted)

    def of(self, batch_id: str, after: int = -1, limit: int = 1000) -> list[Chunk]:
        """Return a page of a batch's chunks, in order, those with a number above `after`."""
        query = rows.CHUNK.where(chunks.c.batch_id == batch_id, chunks.c.chunk > after)
        with self._database.read() as tx:
            return [rows.chunk(row) for row in tx.connection.execute(query.order_by(chunks.c.chunk).limit(limit))]


def _at(ref: LeaseRef) -> sa.Update:
    return chunks.update().where(chunks.c.batch_id == ref.batch_id, chunks.c.chunk == ref.chunk)


def _locked(tx: Transaction, ref: LeaseRef) -> Any:
    query = sa.select(chunks).where(chunks.c.batch_id == ref.batch_id, chunks.c.chunk == ref.chunk)
    return tx.connection.execute(query.with_for_update()).one_or_none()


def _leased(tx: Transaction, ref: LeaseRef) -> Any:
    return _valid(_locked(tx, ref), ref)


def _valid(row: Any, ref: LeaseRef) -> Any:
    if row is None or row.state != ChunkState.LEASED or row.token != ref.token:
        now = "gone" if row is None else f"{row.state} with token {row.token}"
        raise LeaseLost(f"lease {ref.token} of chunk {ref.chunk} of {ref.batch_id} is not valid any more: it is {now}")
    return row
