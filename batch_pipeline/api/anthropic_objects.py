"""The objects of Anthropic's message batches as this service answers them. Times are RFC 3339, in UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel

from batch_pipeline.errors import NotFound
from batch_pipeline.ledger.records import Batch
from batch_pipeline.plain import printable

_ID = re.compile(r"msgbatch_[0-9a-f]{32}")


class RequestCounts(BaseModel):
    """All but `processing` stay 0 until the end; their sum is always the number of requests."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(BaseModel):
    """A message batch."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: RequestCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None
    results_url: str | None


class MessageBatchPage(BaseModel):
    """A page of message batches, newest first."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageBatchDeleted(BaseModel):
    """That a message batch is gone."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


def shown_id(batch_id: str) -> str:
    """Return how this door calls a batch."""
    return f"msg{batch_id}"


def batch_id_of(shown: str) -> str:
    """Return the batch that an id of this door names. Raises NotFound where it is none."""
    if not _ID.fullmatch(shown):
        raise NotFound(f"no message batch {printable(shown[:80], kept='')}")
    return shown.removeprefix("msg")


def message_batch(batch: Batch, results_url: str) -> MessageBatch:
    """Return a batch in Anthropic's words. `results_url` is where its results are, once it has ended."""
    is_over = batch.status.is_final
    has_results = is_over and batch.files_removed_at is None
    return MessageBatch(
        id=shown_id(batch.batch_id),
        processing_status="ended" if is_over else "canceling" if batch.cancelling_at is not None else "in_progress",
        request_counts=_counts(batch),
        created_at=_time(batch.created_at),
        expires_at=_time(batch.deadline_at),
        ended_at=_maybe(batch.ended_at),
        cancel_initiated_at=_maybe(batch.cancelling_at),
        archived_at=_maybe(batch.files_removed_at),
        results_url=results_url if has_results else None,
    )


def _counts(batch: Batch) -> RequestCounts:
    if not batch.status.is_final:
        total = batch.total or batch.announced or 0
        return RequestCounts(processing=total, succeeded=0, errored=0, canceled=0, expired=0)
    # A file that was refused as a whole was not counted by intake.
    unread = 0 if batch.total else batch.announced or 0
    return RequestCounts(
        processing=0,
        succeeded=batch.completed,
        errored=batch.failed + batch.invalid + unread,
        canceled=batch.cancelled,
        expired=batch.expired,
    )


def _time(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _maybe(moment: float | None) -> str | None:
    return None if moment is None else _time(moment)


def params_schema() -> dict[str, Any]:
    """Return the JSON schema of a creation's body, which is read as a stream."""
    request = {
        "type": "object",
        "required": ["custom_id", "params"],
        "properties": {
            "custom_id": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
            "params": {"type": "object", "description": "A body of /v1/messages; errors in it come with the results."},
        },
    }
    return {
        "type": "object",
        "required": ["requests"],
        "properties": {"requests": {"type": "array", "items": request, "minItems": 1, "maxItems": 100_000}},
    }
