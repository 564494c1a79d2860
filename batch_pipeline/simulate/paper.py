"""The ledger on paper: pending -> leased -> committed, with the sums and the estimates that the service keeps.

One function for each of the arrows that `ledger.chunks` and `ledger.batches` have, without a database: a test drives
both with the same work and compares the order of their leases.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from batch_pipeline.scheduling.estimates import Used, remembered, usage_ratio
from batch_pipeline.scheduling.finish import QueuedBatch
from batch_pipeline.scheduling.order import WaitingBatch
from batch_pipeline.scheduling.placement import Backlog
from batch_pipeline.simulate.arrivals import SimulatedBatch
from batch_pipeline.simulate.queues import Charge, Queue


class PaperLease:
    """A chunk in the hands of a worker."""

    __slots__ = ("batch", "charged", "chunk", "done_before", "is_over", "requests", "saved")

    def __init__(self, batch: SimulatedBatch, chunk: int, done_before: int, charged: float) -> None:
        self.batch = batch
        self.chunk = chunk
        self.requests = batch.requests_of(chunk)
        self.done_before = done_before
        """Of its requests, those saved by earlier attempts."""
        self.charged = charged
        """Tokens that its customer was charged for it, in all attempts."""
        self.is_over = False
        """Committed, handed back, or taken away."""
        self.saved = 0
        """Of those left, what a worker that is lost had checkpointed."""

    @property
    def left(self) -> int:
        """Requests to run."""
        return self.requests - self.done_before


class PaperQueue:
    """What the ledger knows of one model."""

    def __init__(
        self,
        model: str,
        queue: Queue,
        speed_seconds: float,
        ready_speed: Callable[[float], float],
        *,
        has_habits: bool = True,
    ) -> None:
        self.model = model
        self.queue = queue
        self.pending = 0
        self.pending_tokens = 0.0
        self.leased = 0
        self.waiting_of: dict[str, dict[str, SimulatedBatch]] = {}
        """Batches with pending chunks, by customer; without customers that have none."""
        self.emptied: set[str] = set()
        """Customers that had nothing pending at some time since the measures looked; they clear it."""
        self._leases: dict[str, list[PaperLease]] = {}
        self._history: dict[str, Used] = {}
        self._speed_seconds = speed_seconds
        self._ready_speed = ready_speed
        self._has_habits = has_habits
        """Whether estimates learn what answers really take (they always do in the service)."""
        self._looked_up = -speed_seconds

    def arrive(self, batch: SimulatedBatch, now: float) -> None:
        """A batch is in progress: all its chunks are pending."""
        self.pending += batch.pending
        self.pending_tokens += batch.pending_tokens
        self._wait(batch, now)

    def lease(self, now: float, only: SimulatedBatch | None = None) -> PaperLease | None:
        """pending -> leased, the next chunk of the policy's order, or of one batch; None where nothing of it waits."""
        if not (self.pending if only is None else only.pending):
            return None
        self.queue.look(now)
        if now - self._looked_up >= self._speed_seconds:
            self.queue.set_speed(self._ready_speed(now))
            self._looked_up = now
        if only is not None:
            return self._lease(only, now, is_out_of_turn=False)
        (pick,) = self.queue.pick(1)
        return self._lease(self._batch(pick.batch_id), now, is_out_of_turn=bool(pick.out_of_turn))

    def _lease(self, batch: SimulatedBatch, now: float, *, is_out_of_turn: bool) -> PaperLease:
        lease = self._take(batch)
        tokens = lease.requests * batch.estimated_each
        expected = max(tokens * self._ratio(batch), 1.0)
        self.queue.charge(Charge(batch.customer, expected, expected if is_out_of_turn else 0.0))
        lease.charged += expected
        self.pending -= 1
        self.leased += 1
        self.pending_tokens -= tokens
        batch.pending -= 1
        batch.leased += 1
        batch.pending_tokens -= tokens
        self._leases.setdefault(batch.batch_id, []).append(lease)
        self._changed(batch)
        if batch.first_start_at is None:
            batch.first_start_at = now
        return lease

    def commit(self, lease: PaperLease, now: float) -> None:
        """leased -> committed."""
        batch = lease.batch
        self._end(lease)
        batch.committed += 1
        self._save(batch, lease.left)
        self.queue.look(now)
        if batch.pending or batch.leased:
            self._changed(batch)
        else:
            self._finish(batch, now)
        self._correct(lease, lease.requests)

    def give_back(self, lease: PaperLease, done: int, now: float, *, failed: bool) -> None:
        """leased -> pending; `done` of the requests that it had left are saved.

        Where the attempt has `failed` its charge stays, as in the service.
        """
        batch = lease.batch
        self._end(lease)
        self._save(batch, done)
        # As in the service, a chunk that was begun is estimated as a whole.
        tokens = lease.requests * batch.estimated_each
        self.pending += 1
        self.pending_tokens += tokens
        batch.pending += 1
        batch.pending_tokens += tokens
        self._wait(batch, now)
        if not failed:
            self._correct(lease, lease.done_before + done)
        heapq.heappush(batch.returned, (lease.chunk, lease.done_before + done, lease.charged))

    def expire(self, batch: SimulatedBatch, done: Mapping[int, int], now: float) -> list[PaperLease]:
        """The deadline: pending | leased -> expired. `done` requests of each chunk that a worker has are saved.

        Returns the leases that end by it.
        """
        self.pending -= batch.pending
        self.pending_tokens -= batch.pending_tokens
        batch.pending = 0
        batch.pending_tokens = 0.0
        self.queue.look(now)
        self._changed(batch)
        ended = list(self._leases.get(batch.batch_id, ()))
        for lease in ended:
            self._end(lease)
            saved = done.get(lease.chunk, lease.saved)
            self._save(batch, saved)
            self._correct(lease, lease.done_before + saved)
        self._finish(batch, now)
        return ended

    def leases_of(self, batch: SimulatedBatch) -> list[PaperLease]:
        """Return the chunks of a batch that workers have."""
        return list(self._leases.get(batch.batch_id, ()))

    def backlog(self) -> Backlog | None:
        """Return what `Ledger.backlog` returns for this model; None where nothing waits or runs."""
        if not (self.pending or self.leased):
            return None
        deadlines = [batch.deadline_at for batch in self.queue.waiting()]
        return Backlog(
            model=self.model,
            pending=self.pending,
            pending_tokens=int(self.pending_tokens),
            leased=self.leased,
            first_deadline_at=min(deadlines, default=0.0),
        )

    def open_batches(self) -> list[SimulatedBatch]:
        """Return the batches of which chunks wait or run."""
        waiting = [batch for of_customer in self.waiting_of.values() for batch in of_customer.values()]
        return waiting + [leases[0].batch for leases in self._leases.values() if leases and not leases[0].batch.pending]

    def open_batch(self, batch_id: str) -> SimulatedBatch:
        """Return one of them of which chunks wait."""
        return self._batch(batch_id)

    def queued(self, left_in_hands: Mapping[str, int]) -> list[QueuedBatch]:
        """Return what `ledger.model_queues` reads of this model; the requests in workers' hands by batch."""
        return [
            QueuedBatch(
                waiting=self._as_waiting(batch),
                leased_chunks=batch.leased,
                leased_tokens=left_in_hands.get(batch.batch_id, 0) * batch.estimated_each * self._ratio(batch),
            )
            for batch in self.open_batches()
        ]

    def _batch(self, batch_id: str) -> SimulatedBatch:
        return self.waiting_of[batch_id.rpartition("/")[0]][batch_id]

    def _take(self, batch: SimulatedBatch) -> PaperLease:
        """Take the first pending chunk: one that came back stands before all that were never leased."""
        if batch.returned:
            return PaperLease(batch, *heapq.heappop(batch.returned))
        batch.next_chunk += 1
        return PaperLease(batch, batch.next_chunk - 1, 0, 0.0)

    def _end(self, lease: PaperLease) -> None:
        lease.is_over = True
        batch = lease.batch
        batch.leased -= 1
        self.leased -= 1
        self._leases[batch.batch_id].remove(lease)

    def _correct(self, lease: PaperLease, done: int) -> None:
        """Charge what a chunk has used, of which so many requests are saved."""
        used = done * lease.batch.real_each
        self.queue.correct(lease.batch.customer, used - lease.charged)
        lease.charged = used

    def _save(self, batch: SimulatedBatch, requests: int) -> None:
        batch.done += requests
        batch.used += requests * batch.real_each

    def _finish(self, batch: SimulatedBatch, now: float) -> None:
        """The batch has ended: what it used tells of its customer's others."""
        batch.ended_at = now
        self._leases.pop(batch.batch_id, None)
        if not batch.done:
            return
        finished = Used(estimated=batch.done * batch.estimated_each, real=batch.used)
        self._history[batch.customer] = remembered(self._history.get(batch.customer, Used()), finished)
        for other in list(self.waiting_of.get(batch.customer, {}).values()):
            self._changed(other)

    def _ratio(self, batch: SimulatedBatch) -> float:
        if not self._has_habits:
            return 1.0
        finished = Used(estimated=batch.done * batch.estimated_each, real=batch.used)
        return usage_ratio(finished, self._history.get(batch.customer, Used()))

    def _as_waiting(self, batch: SimulatedBatch) -> WaitingBatch:
        return WaitingBatch(
            batch_id=batch.batch_id,
            customer=batch.customer,
            pending_chunks=batch.pending,
            pending_tokens=batch.pending_tokens * self._ratio(batch),
            priority=0,
            deadline_at=batch.deadline_at,
            created_at=batch.created_at,
        )

    def _wait(self, batch: SimulatedBatch, now: float) -> None:
        self.queue.look(now)
        self.queue.join(batch.customer)
        self.waiting_of.setdefault(batch.customer, {})[batch.batch_id] = batch
        self._changed(batch)

    def _changed(self, batch: SimulatedBatch) -> None:
        """Let the queue know what is known of a batch now."""
        if batch.pending:
            self.queue.put(self._as_waiting(batch))
            return
        self.queue.remove(batch.batch_id)
        of_customer = self.waiting_of.get(batch.customer)
        if of_customer is not None and of_customer.pop(batch.batch_id, None) is not None and not of_customer:
            del self.waiting_of[batch.customer]
            self.emptied.add(batch.customer)
