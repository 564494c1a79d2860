"""What an operator sees of a batch at one moment: its status, its pace, its chunks and when they ran."""

from __future__ import annotations

import msgspec

from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, BatchStatus
from batch_pipeline.results import demand
from batch_pipeline.results.archived import all_events
from batch_pipeline.results.demand import ChunkSummary
from batch_pipeline.results.plot import timeline_png
from batch_pipeline.results.status import StatusDocument, current_status
from batch_pipeline.results.timeline import Attempt, AttemptEnd, attempts_in
from batch_pipeline.scheduling.accuracy import Milestone, relative_error
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a batch went, or goes. Null before the first chunk was begun."""

    seconds_until_first_chunk: float | None
    """From the upload to the first lease."""
    seconds_running: float | None
    """From the first lease to the last end of one, or until now."""
    requests_per_second: float | None
    output_tokens_per_second: float | None


class BatchView(msgspec.Struct, frozen=True, kw_only=True):
    """A batch at one moment."""

    status: StatusDocument
    chunks: ChunkSummary
    attempts: list[Attempt]
    pace: Pace
    timeline: bytes
    """A PNG of the attempts."""
    estimate_errors: dict[Milestone, float]
    """Of a batch whose requests have all ended in time: how far its estimates were off, by when they were made."""

    @property
    def lost(self) -> int:
        """Attempts that ended without a commit, because their worker was lost or handed them back."""
        return sum(attempt.ended in (AttemptEnd.RELEASED, AttemptEnd.LEASE_EXPIRED) for attempt in self.attempts)


def view(batch_id: str, *, ledger: Ledger, store: ObjectStore, settings: Settings) -> BatchView:
    """Return what there is to see of a batch. Reads its chunks and its events: some 500 bytes of memory for each event.

    Raises NotFound; NotAllowedInState where its files were removed; ProofFailed, StoreError.
    """
    status = current_status(batch_id, ledger=ledger, settings=settings)
    batch = ledger.batches.get(batch_id)
    chunks = demand.summarise(batch_id, ledger, store)
    attempts = attempts_in(all_events(batch, ledger, store))
    until = _until(batch, attempts, status.as_of)
    return BatchView(
        status=status,
        chunks=chunks,
        attempts=attempts,
        pace=_pace(batch, attempts, status, until),
        estimate_errors=_errors(batch, ledger),
        timeline=timeline_png(
            attempts,
            since=batch.created_at,
            until=until,
            chunks=chunks.committed + chunks.stopped + chunks.open,
        ),
    )


def _errors(batch: Batch, ledger: Ledger) -> dict[Milestone, float]:
    if batch.finalizing_at is None or BatchStatus.COMPLETED not in (batch.status, batch.outcome):
        return {}
    errors = {
        made: relative_error(kept, batch.finalizing_at) for made, kept in ledger.desk.estimates(batch.batch_id).items()
    }
    return {made: error for made, error in errors.items() if error is not None}


def _until(batch: Batch, attempts: list[Attempt], now: float) -> float:
    """Return the end of the time line: that of the last attempt, or now while there is one."""
    if batch.finalizing_at is None and not batch.status.is_final:
        return now
    return max([batch.created_at, *(attempt.ended_at or now for attempt in attempts)])


def _pace(batch: Batch, attempts: list[Attempt], status: StatusDocument, until: float) -> Pace:
    if not attempts:
        return Pace(
            seconds_until_first_chunk=None,
            seconds_running=None,
            requests_per_second=None,
            output_tokens_per_second=None,
        )
    first = min(attempt.started_at for attempt in attempts)
    running = max(until - first, 0.001)
    done = status.counts.completed + status.counts.failed
    return Pace(
        seconds_until_first_chunk=round(max(first - batch.created_at, 0.0), 3),
        seconds_running=round(running, 3),
        requests_per_second=round(done / running, 3),
        output_tokens_per_second=round(status.usage.output_tokens / running, 3),
    )
