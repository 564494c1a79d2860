"""The ledger's promises as a few lines of plain Python, for the state machine test to compare the real one with.

It knows batches, chunks, leases and events; it does not know the order of leases, which is the policy's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from batch_pipeline.ledger.records import (
    BatchStatus,
    ChunkResult,
    ChunkState,
    IntakeResult,
    LeaseRef,
    NewBatch,
    NewChunk,
    OnInvalid,
    Part,
    Standing,
)

_STOPPED = {
    BatchStatus.EXPIRED: ChunkState.EXPIRED,
    BatchStatus.CANCELLED: ChunkState.CANCELLED,
    BatchStatus.FAILED: ChunkState.CANCELLED,
}


@dataclass
class ModelChunk:
    """One chunk."""

    made: NewChunk
    state: ChunkState
    token: int = 0
    failures: int = 0
    expires_at: float = 0.0
    parts: dict[str, Part] = field(default_factory=dict)
    result: ChunkResult | None = None
    events: list[tuple[str, int | None]] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether it is pending or leased."""
        return self.state in (ChunkState.PENDING, ChunkState.LEASED)

    @property
    def finished(self) -> int:
        """Requests in its checkpoints."""
        return sum(part.requests for part in self.parts.values())


@dataclass
class ModelBatch:
    """One batch."""

    made: NewBatch
    deadline_at: float
    status: BatchStatus = BatchStatus.VALIDATING
    outcome: BatchStatus | None = None
    intake: IntakeResult | None = None
    chunks: list[ModelChunk] = field(default_factory=list)
    events: list[str] = field(default_factory=lambda: ["created"])

    @property
    def is_mergeable(self) -> bool:
        """Whether its files can be assembled."""
        strict = self.status == BatchStatus.VALIDATING and self.outcome == BatchStatus.FAILED
        return strict or self.status == BatchStatus.FINALIZING


class LedgerModel:
    """All batches; `now` is set by whoever moves the clock."""

    def __init__(self, now: float, lease_seconds: float, max_failures: int, max_enqueued_tokens: int = 2**62) -> None:
        self.now = now
        self._max_enqueued_tokens = max_enqueued_tokens
        self._lease_seconds = lease_seconds
        self._max_failures = max_failures
        self.batches: dict[str, ModelBatch] = {}

    def chunk(self, ref: LeaseRef) -> ModelChunk:
        """The chunk of a lease."""
        return self.batches[ref.batch_id].chunks[ref.chunk]

    def is_valid(self, ref: LeaseRef) -> bool:
        """Whether a worker may still write by this lease."""
        chunk = self.chunk(ref)
        return chunk.state == ChunkState.LEASED and chunk.token == ref.token

    def leasable(self, model: str) -> list[tuple[str, int]]:
        """Chunks that a worker of a model may get now."""
        return [
            (batch_id, number)
            for batch_id, batch in self.batches.items()
            if batch.status == BatchStatus.IN_PROGRESS and batch.outcome is None and batch.deadline_at > self.now
            for number, chunk in enumerate(batch.chunks)
            if chunk.state == ChunkState.PENDING and chunk.made.model == model
        ]

    @property
    def has_failed_chunks(self) -> bool:
        """Whether any chunk was given up."""
        return any(chunk.state == ChunkState.FAILED for batch in self.batches.values() for chunk in batch.chunks)

    def create(self, new: NewBatch) -> None:
        """(nothing) -> validating."""
        if new.batch_id not in self.batches:
            self.batches[new.batch_id] = ModelBatch(new, self.now + new.window_seconds)

    def record_intake(self, batch_id: str, intake: IntakeResult) -> None:
        """validating -> in_progress, or towards failed; or chunks that have stopped already."""
        batch = self.batches[batch_id]
        if batch.intake is not None:
            return
        batch.intake = intake
        strict = batch.made.on_invalid == OnInvalid.FAIL and intake.invalid > 0
        if batch.outcome is None and (strict or not intake.chunks or self._is_over_quota(batch, intake)):
            batch.outcome = BatchStatus.FAILED
            batch.events.append("failing")
        elif batch.status == BatchStatus.VALIDATING:
            batch.status = BatchStatus.IN_PROGRESS
            batch.events.append("in_progress")
        else:
            batch.events.append("validated")
        state = ChunkState.PENDING if batch.outcome is None else _STOPPED[batch.outcome]
        batch.chunks = [ModelChunk(chunk, state) for chunk in intake.chunks]
        self._settle(batch)

    def enqueued(self) -> Counter[tuple[str, str]]:
        """Prompt tokens by customer and model of the batches that wait or run."""
        sums: Counter[tuple[str, str]] = Counter()
        for batch in self.batches.values():
            if batch.status == BatchStatus.IN_PROGRESS and batch.outcome is None:
                sums += _prompt_tokens(batch.made.customer, [chunk.made for chunk in batch.chunks])
        return sums

    def _is_over_quota(self, batch: ModelBatch, intake: IntakeResult) -> bool:
        then = self.enqueued()
        wanted = _prompt_tokens(batch.made.customer, intake.chunks)
        return any(then[key] + tokens > self._max_enqueued_tokens for key, tokens in wanted.items())

    def lease(self, ref: LeaseRef) -> None:
        """pending -> leased."""
        chunk = self.chunk(ref)
        chunk.state, chunk.token, chunk.expires_at = ChunkState.LEASED, ref.token, self.now + self._lease_seconds
        chunk.events.append(("leased", ref.token))

    def heartbeat(self, refs: list[LeaseRef]) -> dict[LeaseRef, Standing]:
        """Extend the valid ones; returns how each stands."""
        standings = dict.fromkeys(refs, Standing.LOST)
        for ref in filter(self.is_valid, refs):
            batch = self.batches[ref.batch_id]
            self.chunk(ref).expires_at = self.now + self._lease_seconds
            stop = batch.outcome is not None or batch.deadline_at <= self.now
            standings[ref] = Standing.STOP if stop else Standing.HELD
        return standings

    def commit(self, ref: LeaseRef, result: ChunkResult) -> bool:
        """leased -> committed; returns whether the batch has drained by it."""
        chunk = self.chunk(ref)
        chunk.state, chunk.result = ChunkState.COMMITTED, result
        chunk.events.append(("committed", ref.token))
        return self._settle(self.batches[ref.batch_id])

    def let_go(self, ref: LeaseRef, event: str, failed: bool) -> bool:
        """leased -> pending, or stopped where that is due; returns whether the batch has drained by it."""
        batch, chunk = self.batches[ref.batch_id], self.chunk(ref)
        chunk.failures += failed
        chunk.state = ChunkState.FAILED if chunk.failures >= self._max_failures else ChunkState.PENDING
        if batch.outcome is not None:
            chunk.state = _STOPPED[batch.outcome]
        chunk.events.append((event, ref.token))
        return self._settle(batch)

    def expire_leases(self) -> int:
        """Let go of what has run out; returns how many."""
        overdue = [
            LeaseRef(batch_id, number, chunk.token)
            for batch_id, batch in self.batches.items()
            for number, chunk in enumerate(batch.chunks)
            if chunk.state == ChunkState.LEASED and chunk.expires_at <= self.now
        ]
        for ref in overdue:
            self.let_go(ref, "lease_expired", failed=True)
        return len(overdue)

    def cancel(self, batch_id: str) -> None:
        """validating | in_progress -> cancelling."""
        batch = self.batches[batch_id]
        if batch.outcome is None:
            batch.status, batch.outcome = BatchStatus.CANCELLING, BatchStatus.CANCELLED
            batch.events.append("cancelling")
            self._stop_pending(batch)

    def expire_due(self) -> set[str]:
        """Give what is past its deadline the outcome expired; returns which."""
        due = {
            batch_id
            for batch_id, batch in self.batches.items()
            if batch.outcome is None and batch.deadline_at <= self.now
        }
        for batch_id in due:
            batch = self.batches[batch_id]
            batch.outcome = BatchStatus.EXPIRED
            batch.events.append("expiring")
            self._stop_pending(batch)
        return due

    def want_again(self, batch_id: str) -> int:
        """failed -> pending; returns how many."""
        batch = self.batches[batch_id]
        if batch.status != BatchStatus.IN_PROGRESS or batch.outcome is not None:
            return 0
        wanted = [chunk for chunk in batch.chunks if chunk.state == ChunkState.FAILED]
        for chunk in wanted:
            chunk.state, chunk.failures = ChunkState.PENDING, 0
            chunk.events.append(("wanted_again", None))
        return len(wanted)

    def run_again(self, batch_id: str, model_version: str | None) -> int:
        """committed | leased | failed -> pending, with nothing kept; returns how many."""
        batch = self.batches[batch_id]
        batch.events.append("run_again")
        anew = [
            chunk
            for chunk in batch.chunks
            if (chunk.result is not None and model_version in (None, chunk.result.model_version))
            or (chunk.result is None and (chunk.state != ChunkState.PENDING or chunk.parts))
        ]
        for chunk in anew:
            chunk.state, chunk.failures, chunk.result, chunk.parts = ChunkState.PENDING, 0, None, {}
            chunk.events.append(("superseded", chunk.token))
        return len(anew)

    def finish(self, batch_id: str) -> None:
        """To the final status."""
        batch = self.batches[batch_id]
        assert batch.outcome is not None
        batch.status = batch.outcome
        batch.events.append(str(batch.outcome))

    def _stop_pending(self, batch: ModelBatch) -> None:
        assert batch.outcome is not None
        for chunk in batch.chunks:
            if chunk.state == ChunkState.PENDING:
                chunk.state = _STOPPED[batch.outcome]
                chunk.events.append((str(chunk.state), None))
        self._settle(batch)

    def _settle(self, batch: ModelBatch) -> bool:
        runs = batch.status in (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)
        if not runs or batch.intake is None or any(chunk.is_open for chunk in batch.chunks):
            return False
        batch.status, batch.outcome = BatchStatus.FINALIZING, batch.outcome or BatchStatus.COMPLETED
        batch.events.append("finalizing")
        return True


def _prompt_tokens(customer: str, chunks: list[NewChunk]) -> Counter[tuple[str, str]]:
    sums: Counter[tuple[str, str]] = Counter()
    for chunk in chunks:
        sums[customer, chunk.model] += chunk.prompt_tokens
    return sums
