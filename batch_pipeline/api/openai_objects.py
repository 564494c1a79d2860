"""The objects of OpenAI's API as this service answers them: every field of the SDK's types, and what goes beyond.

Times are whole Unix seconds. Fields that OpenAI does not have are said to be ours in their description.
"""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeVar

import msgspec
from fastapi import Response
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from batch_pipeline import ids
from batch_pipeline.ledger.files import File
from batch_pipeline.ledger.records import Batch
from batch_pipeline.ledger.uploads import Part, Upload
from batch_pipeline.results.status import StatusDocument

_HOUR = 3600
_MONTH = 2_592_000


class _Request(BaseModel):
    """A body. Fields that are not known are left alone, as OpenAI does."""

    model_config = ConfigDict(populate_by_name=True, extra="ignore", strict=True)


class ExpiresAfter(_Request):
    """When a file is not given out any more: seconds after it was made."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=_HOUR, le=_MONTH)]


class CreateBatch(_Request):
    """What a batch is made of. Names in camelCase are taken as well."""

    input_file_id: Annotated[str, Field(validation_alias=AliasChoices("input_file_id", "inputFileId"))]
    endpoint: str
    completion_window: Annotated[str, Field(validation_alias=AliasChoices("completion_window", "completionWindow"))]
    metadata: dict[str, str] | None = None
    output_expires_after: Annotated[
        ExpiresAfter | None, Field(validation_alias=AliasChoices("output_expires_after", "outputExpiresAfter"))
    ] = None
    on_invalid: Annotated[
        Literal["skip", "fail"] | None,
        Field(
            validation_alias=AliasChoices("on_invalid", "onInvalid"),
            description="Ours: what a bad line does. skip (default): the good ones run; fail: the batch fails.",
        ),
    ] = None
    name: Annotated[str | None, Field(description="Ours: its folder in the outbox. Default: the batch's id.")] = None


class RetryBatch(_Request):
    """How the failed requests of a batch are run again."""

    completion_window: Annotated[
        str | None, Field(validation_alias=AliasChoices("completion_window", "completionWindow"))
    ] = None
    metadata: dict[str, str] | None = None


class CreateUpload(_Request):
    """A file that comes in parts."""

    bytes: Annotated[int, Field(ge=0, lt=2**62)]
    filename: str
    mime_type: Annotated[str, Field(validation_alias=AliasChoices("mime_type", "mimeType"))]
    purpose: str
    expires_after: Annotated[
        ExpiresAfter | None, Field(validation_alias=AliasChoices("expires_after", "expiresAfter"))
    ] = None


class CompleteUpload(_Request):
    """Which parts make the file, in their order."""

    part_ids: Annotated[
        list[str], Field(min_length=1, max_length=10_000, validation_alias=AliasChoices("part_ids", "partIds"))
    ]
    md5: str | None = None


class FileObject(BaseModel):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["uploaded", "processed", "error"] = "processed"
    status_details: str | None = None
    sha256: str | None = Field(default=None, description="Ours: the hash of its bytes, where they came in one piece.")


class FileDeleted(BaseModel):
    """That a file is gone."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class UploadObject(BaseModel):
    """An upload in parts."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: FileObject | None = None


class UploadPart(BaseModel):
    """A part of an upload."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


class BatchError(BaseModel):
    """What is wrong with a line, or with the whole batch where `line` is null."""

    code: str | None
    message: str | None
    line: int | None
    param: str | None


class BatchErrors(BaseModel):
    """The first errors; the error file has all of them."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    """Requests so far; `failed` includes those whose line is invalid."""

    total: int
    completed: int
    failed: int


class Counts(BaseModel):
    """Ours: requests by how they ended, so far."""

    total: int
    completed: int
    failed: int
    expired: int
    cancelled: int
    invalid: int


class InputTokensDetails(BaseModel):
    """Of the input tokens, those that the prefix cache had."""

    cached_tokens: int


class OutputTokensDetails(BaseModel):
    """The engine does not tell reasoning tokens apart: always 0."""

    reasoning_tokens: int


class BatchUsage(BaseModel):
    """Tokens so far."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class BatchObject(BaseModel):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
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
    usage: BatchUsage
    metadata: dict[str, str] | None

    reason: Annotated[str | None, Field(description="Ours: what it waits for; null after the end.")]
    estimated_finish_at: Annotated[
        float | None, Field(description="Ours: Unix seconds, as the queue is; null if not known.")
    ]
    warning: Annotated[str | None, Field(description="Ours: why it cannot be in time; null if it can.")]
    counts: Counts
    customer: Annotated[str, Field(description="Ours: whose it is.")]
    name: Annotated[str, Field(description="Ours: its folder in the outbox.")]
    input_sha256: Annotated[
        str | None, Field(description="Ours: the hash of its input; of files that came in parts once it is validated.")
    ]
    cost: Annotated[float | None, Field(description="Ours: US dollars so far, at the batch price.")]
    as_of: Annotated[float, Field(description="Ours: Unix seconds of what is shown.")]


_T = TypeVar("_T", FileObject, BatchObject)


class Page(BaseModel, Generic[_T]):
    """A page of a list: go on with `after` set to `last_id` while `has_more`."""

    object: Literal["list"] = "list"
    data: list[_T]
    first_id: str | None
    last_id: str | None
    has_more: bool


def answer(shown: BaseModel) -> Response:
    """Return an object as an answer, as FastAPI writes it, without its check of what has just been made."""
    return Response(shown.model_dump_json(), media_type="application/json")


def page_of(found: list[_T], limit: int) -> Page[_T]:
    """Return a page of at most `limit` objects; `found` has one more where there are more."""
    shown = found[:limit]
    return Page(
        data=shown,
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
        has_more=len(found) > limit,
    )


def file_object(file: File) -> FileObject:
    """Return a file as OpenAI shows it."""
    return FileObject(
        id=file.file_id,
        bytes=file.bytes,
        created_at=int(file.created_at),
        expires_at=None if file.expires_at is None else int(file.expires_at),
        filename=file.filename,
        purpose="batch_output" if file.purpose == "batch_output" else "batch",
        sha256=file.sha256,
    )


def upload_object(upload: Upload, file: File | None = None) -> UploadObject:
    """Return an upload as OpenAI shows it, with the file that it has become."""
    return UploadObject.model_validate(
        {
            "id": upload.upload_id,
            "bytes": upload.bytes,
            "created_at": int(upload.created_at),
            "expires_at": int(upload.expires_at),
            "filename": upload.filename,
            "purpose": upload.purpose,
            "status": upload.status,
            "file": None if file is None else file_object(file),
        }
    )


def part_object(part: Part) -> UploadPart:
    """Return a part as OpenAI shows it."""
    return UploadPart(id=part.part_id, created_at=int(part.created_at), upload_id=part.upload_id)


def batch_object(batch: Batch, document: StatusDocument) -> BatchObject:
    """Return a batch as OpenAI shows it: its status document, with ids of files instead of keys.

    The ids stay once the files are removed, and name no file then; the document's own would be null.
    """
    return BatchObject.model_validate(
        {
            **msgspec.to_builtins(document),
            "input_file_id": batch.input_file_id or ids.input_file_id(batch.batch_id),
            "output_file_id": None if batch.output_key is None else ids.output_file_id(batch.batch_id),
            "error_file_id": None if batch.error_key is None else ids.error_file_id(batch.batch_id),
            "metadata": batch.metadata or None,
            "input_sha256": batch.sent_sha256 or batch.input_sha256,
        }
    )
