"""The status of a batch as a document: OpenAI's batch object, and what it has no field for.

Times in OpenAI's fields are whole Unix seconds; ours (`as_of`, `estimated_finish_at`) have fractions.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

import msgspec

from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.moments import Moment
from batch_pipeline.ledger.records import Batch, BatchError, BatchStatus, Lane
from batch_pipeline.ledger.surroundings import Surroundings
from batch_pipeline.ledger.usage import total_cost
from batch_pipeline.plain import printable
from batch_pipeline.results.forecast import outlook
from batch_pipeline.results.manifest import Counts, Usage
from batch_pipeline.scheduling.explain import LaneView, Situation, WorkerView, explain
from batch_pipeline.scheduling.risk import Outlook
from batch_pipeline.settings import Settings
from batch_pipeline.store import keys

OUTPUT = "output.jsonl"
ERRORS = "errors.jsonl"
MANIFEST = "manifest.json"


class ErrorList(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's list of errors."""

    object: str = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's counts: `failed` includes the requests that were invalid."""

    total: int
    completed: int
    failed: int


class InputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Of the input tokens, those that the prefix cache had."""

    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Of the output tokens, those of reasoning: the engine does not tell them apart."""

    reasoning_tokens: int = 0


class UsageObject(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's token usage of a batch."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class FilesShown(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of the files in the outbox; null before the end, and where a batch has no such file."""

    output: str | None = None
    errors: str | None = None
    manifest: str | None = None


class StatusDocument(msgspec.Struct, frozen=True, kw_only=True):
    """status.json. File ids are keys in the bucket."""

    id: str
    object: str = "batch"
    endpoint: str
    model: str | None
    """Null where the batch's requests name several, or before they have been read."""
    errors: ErrorList | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: UsageObject
    metadata: dict[str, str]

    customer: str
    name: str
    counts: Counts
    """Requests by how they ended, so far."""
    reason: str | None
    """What the batch is waiting for; null after the end."""
    estimated_finish_at: float | None
    """When its last request is expected to end, in the queue as it is; null where that is not known."""
    warning: str | None
    """That it cannot be in time, and why; what is done at the deadline is given out then."""
    cost: Decimal | None
    """Of the tokens so far, in US dollars at the batch price; of a final batch what it is charged. Null where the
    catalogue has lost a model.
    """
    files: FilesShown
    revision: int
    progress: int
    """`revision` and then `progress` grow with every change of what is shown: a document with less is an older one."""
    as_of: float

    @property
    def is_final(self) -> bool:
        """Whether no other status follows."""
        return BatchStatus(self.status).is_final

    @property
    def order(self) -> tuple[int, int, float]:
        """Documents of one batch in the order of the states that they show."""
        return (self.revision, self.progress, self.as_of)


def current_status(batch_id: str, *, ledger: Ledger, settings: Settings, folder: str | None = None) -> StatusDocument:
    """Return the batch's status as the ledger has it now. `folder` names the files' place in the outbox.

    Raises NotFound. The batch and its progress are of one moment.
    """
    moment = ledger.moments.of(batch_id)
    waits = not moment.batch.status.is_final
    surroundings = ledger.surroundings.of_models(moment.batch.models) if waits else Surroundings()
    return status_at(moment, surroundings, expected_of(moment, ledger, settings), settings, folder=folder)


def expected_of(moment: Moment, ledger: Ledger, settings: Settings) -> Outlook:
    """Return what was expected of a batch at a moment; nothing of one that is not in progress or is to stop.

    Reads the queues of its models where the last look at them is some seconds old.
    """
    batch = moment.batch
    if batch.status != BatchStatus.IN_PROGRESS or batch.outcome is not None:
        return Outlook()
    return outlook(batch.batch_id, batch.models, moment.now, ledger=ledger, settings=settings)


def status_at(
    moment: Moment, surroundings: Surroundings, expected: Outlook, settings: Settings, *, folder: str | None = None
) -> StatusDocument:
    """Return the status of a batch as it was at a moment, with what it waited for in its surroundings."""
    batch, lanes, charges, as_of = moment
    situation = _situation(batch, lanes, surroundings, as_of, settings)
    reason = explain(situation)
    # A worker's detail may repeat what an engine has said or logged.
    reason = None if reason is None else printable(reason, kept="")
    cost = total_cost(charges) if charges else _cost(lanes, settings)
    return batch_object(batch, lanes, reason, expected, cost=cost, as_of=as_of, folder=folder or batch.name)


def batch_object(
    batch: Batch,
    lanes: Sequence[Lane],
    reason: str | None,
    expected: Outlook,
    *,
    cost: Decimal | None,
    as_of: float,
    folder: str,
) -> StatusDocument:
    """Return the document of one state of a batch."""
    final = batch.status.is_final
    counts = _counts(batch, lanes)
    kept = batch.files_removed_at is None
    ended = {status: _seconds(batch.ended_at) if batch.status == status else None for status in BatchStatus}
    return StatusDocument(
        id=batch.batch_id,
        endpoint=batch.endpoint,
        model=batch.models[0] if len(batch.models) == 1 else None,
        errors=ErrorList(data=batch.errors) if batch.errors else None,
        input_file_id=batch.input_key,
        completion_window=batch.window_asked or _window(batch.window_seconds),
        status=batch.status,
        output_file_id=batch.output_key if kept else None,
        error_file_id=batch.error_key if kept else None,
        created_at=int(batch.created_at),
        in_progress_at=_seconds(batch.in_progress_at),
        expires_at=int(batch.deadline_at),
        finalizing_at=_seconds(batch.finalizing_at),
        completed_at=ended[BatchStatus.COMPLETED],
        failed_at=ended[BatchStatus.FAILED],
        expired_at=ended[BatchStatus.EXPIRED],
        cancelling_at=_seconds(batch.cancelling_at),
        cancelled_at=ended[BatchStatus.CANCELLED],
        request_counts=RequestCounts(
            total=counts.total, completed=counts.completed, failed=counts.failed + counts.invalid
        ),
        usage=_usage_object(_usage(batch, lanes)),
        metadata=batch.metadata,
        customer=batch.customer,
        name=batch.name,
        counts=counts,
        reason=reason,
        estimated_finish_at=expected.finish_at,
        warning=expected.shortfall,
        cost=cost,
        files=_files(batch, folder) if final and kept else FilesShown(),
        revision=batch.revision,
        progress=sum(lane.revision for lane in lanes),
        as_of=as_of,
    )


def _situation(
    batch: Batch, lanes: Sequence[Lane], surroundings: Surroundings, now: float, settings: Settings
) -> Situation:
    return Situation(
        status=batch.status,
        outcome=batch.outcome,
        intake_done=batch.input_sha256 is not None,
        intake_attempts=batch.intake_attempts,
        merge_attempts=batch.merge_attempts,
        lanes=[LaneView(model=lane.model, pending=lane.pending, leased=lane.leased) for lane in lanes],
        workers=[
            WorkerView(
                model=worker.model,
                state=worker.state,
                detail=worker.detail,
                silent_seconds=now - worker.seen_at,
                serves_batch=not worker.batches or batch.batch_id in worker.batches,
            )
            for worker in surroundings.workers
            if worker.model in batch.models
        ],
        lease_seconds=settings.worker.lease_seconds,
        notices=surroundings.notices,
        model_notices=surroundings.model_notices,
    )


def _counts(batch: Batch, lanes: Sequence[Lane]) -> Counts:
    if batch.status.is_final:
        return Counts(
            total=batch.total,
            completed=batch.completed,
            failed=batch.failed,
            expired=batch.expired,
            cancelled=batch.cancelled,
            invalid=batch.invalid,
        )
    return Counts(
        total=batch.total,
        completed=sum(lane.completed for lane in lanes),
        failed=sum(lane.failed for lane in lanes),
        invalid=batch.invalid,
    )


def _usage(batch: Batch, lanes: Sequence[Lane]) -> Usage:
    if batch.status.is_final:
        return Usage(
            input_tokens=batch.input_tokens, cached_tokens=batch.cached_tokens, output_tokens=batch.output_tokens
        )
    return Usage(
        input_tokens=sum(lane.input_tokens for lane in lanes),
        cached_tokens=sum(lane.cached_tokens for lane in lanes),
        output_tokens=sum(lane.output_tokens for lane in lanes),
    )


def _usage_object(usage: Usage) -> UsageObject:
    return UsageObject(
        input_tokens=usage.input_tokens,
        input_tokens_details=InputDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.output_tokens,
        output_tokens_details=OutputDetails(),
        total_tokens=usage.input_tokens + usage.output_tokens,
    )


def _cost(lanes: Sequence[Lane], settings: Settings) -> Decimal | None:
    if any(lane.model not in settings.models for lane in lanes):
        return None
    prices = [(settings.models[lane.model].prices, lane) for lane in lanes]
    return sum((price.cost(lane.input_tokens, lane.output_tokens) for price, lane in prices), Decimal(0))


def _files(batch: Batch, folder: str) -> FilesShown:
    def key(source: str | None, file: str) -> str | None:
        return None if source is None else keys.outbox(batch.customer, folder, file)

    return FilesShown(
        output=key(batch.output_key, OUTPUT),
        errors=key(batch.error_key, ERRORS),
        manifest=key(batch.manifest_key, MANIFEST),
    )


def _window(seconds: int) -> str:
    """Return a window as customers write it, in the largest unit that is exact: 24h, 90m, 5400s."""
    for unit, letter in ((3600, "h"), (60, "m")):
        if seconds % unit == 0:
            return f"{seconds // unit}{letter}"
    return f"{seconds}s"


def _seconds(moment: float | None) -> int | None:
    return None if moment is None else int(moment)
