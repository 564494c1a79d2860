"""The life of a chunk (drawn in `records`): leases with fencing tokens, checkpoints, commits.

A lease is valid while the chunk is `leased` with its token; it may be taken away once `expires_at` has passed by the
database's clock (invariant I3). Every write of a worker names its lease and is refused with LeaseLost where it is not
valid any more. Killed before its commit a transaction has changed nothing, after it everything; none is half done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from batch_pipeline.errors import LeaseLost
from batch_pipeline.ledger import again, counters, events, records, rows, tallies
from batch_pipeline.ledger.committing import commit_chunks, lock_chunks, valid
from batch_pipeline.ledger.database import Database, Transaction
from batch_pipeline.ledger.leasing import Policy, Taker, lease_chunks, speed_of
from batch_pipeline.ledger.records import BatchStatus, Chunk, ChunkState, CommitReply, Lease, LeaseRef, Part
from batch_pipeline.ledger.renewing import renew
from batch_pipeline.ledger.schema import chunks, is_leased
from batch_pipeline.ledger.transitions import (
    join_queue,
    lock_batch,
    part_sums,
    queue_floor,
    settle,
    update_lane,
)

_STOPPED_STATE = {
    BatchStatus.CANCELLED: ChunkState.CANCELLED,
    BatchStatus.EXPIRED: ChunkState.EXPIRED,
    BatchStatus.FAILED: ChunkState.CANCELLED,
}


_SPEED_SECONDS = 5.0
"""How long the measured speed of a model counts before it is looked up again."""
_OVERDUE = (
    sa.select(chunks.c.batch_id, chunks.c.chunk, chunks.c.token)
    .where(is_leased, chunks.c.expires_at <= sa.bindparam("now"))
    .order_by(chunks.c.expires_at)
    .limit(sa.bindparam("most"))
)


class Chunks:
    """Chunks and their transitions."""

    def __init__(self, database: Database, lease_seconds: float, max_failures: int, policy: Policy) -> None:
        self._database = database
        self._lease_seconds = lease_seconds
        self._max_failures = max_failures
        self._policy = policy
        self._speeds: dict[str, tuple[float, float]] = {}
        """By model: the measured speed, and when it was looked up."""

    def lease(
        self,
        worker_id: str,
        model: str,
        limit: int,
        batches_only: Sequence[str] | None = None,
        run_id: str | None = None,
        *,
        held: Sequence[LeaseRef] = (),
    ) -> list[Lease]:
        """pending -> leased, for at most `limit` chunks of a model, in the order that the policy gives.

        Leases that have run out are taken away first, but for those that the worker says it still has (`held`): after
        an outage it may ask for work before its heartbeat comes through. Two workers never get the same chunk: the rows
        are locked, and locked ones are skipped. Killed before its commit this has leased nothing; where its answer is
        lost, the leases run out.
        """
        with self._database.write() as tx:
            if not tx.connection.execute(_OVERDUE, {"now": tx.now, "most": 1}).all():
                taker = Taker(worker_id, run_id, model, tx.now + self._lease_seconds)
                return lease_chunks(tx, taker, limit, batches_only, self._policy_of(tx, model))
        if held:
            with self._database.write() as tx:
                renew(tx, held, tx.now + self._lease_seconds)
        # Each of them begins at its batch's row, for the order of locks; once is enough, after an outage they are many.
        self.expire_leases()
        with self._database.write() as tx:
            taker = Taker(worker_id, run_id, model, tx.now + self._lease_seconds)
            return lease_chunks(tx, taker, limit, batches_only, self._policy_of(tx, model))

    def _policy_of(self, tx: Transaction, model: str) -> Policy:
        speed, looked_up = self._speeds.get(model, (0.0, -_SPEED_SECONDS))
        if abs(tx.now - looked_up) >= _SPEED_SECONDS:
            speed = speed_of(tx, model, self._lease_seconds, self._policy.declared.get(model))
            self._speeds[model] = speed, tx.now
        return self._policy._replace(tokens_per_second=speed)

    def checkpoint(self, ref: LeaseRef, part: Part) -> None:
        """Add a part to a leased chunk: its requests are not run again, whatever happens. Raises LeaseLost.

        Killed before, the part is garbage and its requests run again; killed after, it counts. The same part twice
        (its acknowledgement was lost) is one part.
        """
        with self._database.write() as tx:
            row = _leased(tx, ref)
            kept = rows.parts(row.parts)
            if any(known.key == part.key for known in kept):
                return
            tx.connection.execute(_at(ref).values(parts=rows.json([*kept, part])))
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
        committed, and the sweep settles its batch. Committing the same result twice with one lease is committing once,
        and corrects what its customer was charged for it once (`counters`).
        """
        (reply,) = self.commit_all({ref: result}).values()
        if isinstance(reply, LeaseLost):
            raise reply
        return reply

    def commit_all(self, results: Mapping[LeaseRef, records.ChunkResult]) -> dict[LeaseRef, CommitReply | LeaseLost]:
        """Commit several chunks in one transaction, each as `commit` does; for less than the price of as many commits.

        Killed before its commit none of them is committed, after it all are. One whose lease is not valid any more is
        answered with the error that `commit` raises, and takes nothing from the others. Of those that drain a batch
        together one is told so.
        """
        with self._database.write() as tx:
            done = commit_chunks(tx, results)
        replies: dict[LeaseRef, CommitReply | LeaseLost] = {}
        emptied = set(done.emptied)
        for ref in results:
            if ref in done.refused:
                replies[ref] = done.refused[ref]
            else:
                still_open = ref.batch_id not in emptied
                emptied.discard(ref.batch_id)
                replies[ref] = self._reply(ref, still_open, done.actors[ref])
        return replies

    def release(self, ref: LeaseRef, reason: str, failed: bool = False) -> CommitReply:
        """leased -> pending, with its parts kept; cancelled or expired where the batch is to stop. Raises LeaseLost.

        `failed` counts toward giving the chunk up, and what its customer was charged for the attempt stays; a worker
        that merely gives way does not count, and the charge becomes what the parts have used (`counters`). Killed
        before its commit nothing has changed, after it both has.
        """
        with self._database.write() as tx:
            batch = lock_batch(tx, ref.batch_id)
            row = _leased(tx, ref)
            still_open = self._let_go(tx, batch, row, "released", reason=reason, failed=failed)
        return self._reply(ref, still_open, str(row.worker_id))

    def expire_leases(self, limit: int = 100) -> int:
        """leased -> pending for leases that have run out (cancelled, expired or failed where that is due).

        Returns how many. A worker that comes back afterwards finds its token refused.
        """
        with self._database.read() as tx:
            found = tx.connection.execute(_OVERDUE, {"now": tx.now, "most": limit}).all()
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
            tallies.count(tx, {tallies.LEASES_EXPIRED: 1})
            return True

    def _let_go(self, tx: Transaction, batch: Any, row: Any, event: str, *, reason: str, failed: bool) -> int:
        """Take a lease back; the batch's row and the chunk's are locked. Returns what is open in the lane."""
        failures = row.failures + (1 if failed else 0)
        state = ChunkState.FAILED if failures >= self._max_failures else ChunkState.PENDING
        if batch.outcome is not None:
            state = _STOPPED_STATE.get(batch.outcome, ChunkState.CANCELLED)
        ref = LeaseRef(row.batch_id, row.chunk, row.token)
        _, without_answer, given, _, made = part_sums(rows.parts(row.parts))
        # Who could have failed attempts for nothing would be the least served for as long as all of his fail.
        is_kept = failed or row.charged is None
        charged = row.charged if is_kept else counters.used(row, without_answer, given + made)
        tx.connection.execute(
            _at(ref).values(state=state, failures=failures, expires_at=None, last_error=reason[:2000], charged=charged)
        )
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
        if state != ChunkState.PENDING:
            still_open = update_lane(tx, row.batch_id, row.model, leased=-1, stopped=1)
        else:
            floor = queue_floor(tx, batch.customer, row.model)
            tokens = row.prompt_tokens + row.max_output_tokens
            still_open = update_lane(tx, row.batch_id, row.model, leased=-1, pending=1, pending_tokens=tokens)
            join_queue(tx, batch.customer, row.model, floor)
        if charged is not None:
            counters.correct_all(tx, {(row.model, batch.customer): counters.correction(row, charged)})
        return still_open

    def _reply(self, ref: LeaseRef, still_open: int, actor: str) -> CommitReply:
        """Settle the batch if this was its last open chunk, of its lane (`still_open` is 0) and of all its lanes.

        After the commit and not within it: of two lanes whose last chunks are committed at one moment, neither
        transaction sees the other, but the look of the later one sees both. One that is killed between is made up for
        by `Batches.settle_all`.
        """
        if still_open:
            return CommitReply(batch_drained=False)
        with self._database.write() as tx:
            return CommitReply(batch_drained=settle(tx, lock_batch(tx, ref.batch_id), actor))

    def want_again(self, batch_id: str, actor: str) -> int:
        """failed -> pending for the chunks of a batch that were given up; returns how many. Nothing committed is
        touched.

        Raises NotFound. A batch whose results are final or being assembled is left alone: 0.
        """
        with self._database.write() as tx:
            return again.want_again(tx, batch_id, actor)

    def run_again(self, batch_id: str, actor: str, *, order: str, model_version: str | None = None) -> int:
        """committed | leased | failed -> pending, without what earlier attempts had finished: after a mend of a model.

        Returns how many chunks are to run again. Given `model_version`, of the committed ones only those whose results
        came from it; what has not been committed starts afresh in any case. The same `order` again changes nothing.
        Killed before its commit nothing has changed, after it all has.

        Raises NotFound; NotAllowedInState where the batch is not in progress: a status never goes backwards (I6).
        """
        with self._database.write() as tx:
            return again.run_again(tx, batch_id, actor, order=order, model_version=model_version)

    def of(self, batch_id: str, after: int = -1, limit: int = 1000) -> list[Chunk]:
        """Return a page of a batch's chunks, in order, those with a number above `after`."""
        query = rows.CHUNK.where(chunks.c.batch_id == batch_id, chunks.c.chunk > after)
        with self._database.read() as tx:
            return [rows.chunk(row) for row in tx.connection.execute(query.order_by(chunks.c.chunk).limit(limit))]


def _at(ref: LeaseRef) -> sa.Update:
    return chunks.update().where(chunks.c.batch_id == ref.batch_id, chunks.c.chunk == ref.chunk)


def _locked(tx: Transaction, ref: LeaseRef) -> Any:
    return lock_chunks(tx, [ref]).get((ref.batch_id, ref.chunk))


def _leased(tx: Transaction, ref: LeaseRef) -> Any:
    return valid(_locked(tx, ref), ref)
