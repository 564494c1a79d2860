"""OpenAI's `/v1/files`: uploads go to the store as they come, downloads come from it as they go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse

from batch_pipeline import ids
from batch_pipeline.api import parameters
from batch_pipeline.api.auth import Authenticated
from batch_pipeline.api.openai_objects import FileDeleted, FileObject, Page, file_object, page_of
from batch_pipeline.api.receiving import Receiver, receive
from batch_pipeline.api.services import Services, Shared
from batch_pipeline.errors import NotFound
from batch_pipeline.ledger.files import File
from batch_pipeline.settings import limited
from batch_pipeline.store import ObjectStore, keys

router = APIRouter(prefix="/v1/files", tags=["OpenAI: files"])

DAY_SECONDS = 86_400.0
_JSONL = "application/jsonl"
_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}
FORM_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}


@router.post("", openapi_extra=FORM_BODY)
async def create_file(request: Request, caller: Authenticated, services: Shared) -> FileObject:
    """Upload a file of requests. It is written to the store as it comes, and is there once the answer says so.

    Killed, or given up by the client, before the row is written there is no file.
    """
    file_id = ids.new_file_id()
    key = keys.uploaded_file(caller.customer, file_id)
    limits = limited(services.settings.intake, caller.limits)
    receiver = Receiver(services.store, key, limits.max_file_bytes)
    async with services.receiving.place(caller.customer):
        try:
            form = await receive(request, "file", receiver)
            purpose = parameters.purpose(form.fields.get("purpose"))
            lifetime = parameters.file_lifetime(form.fields)
            await receiver.finish()
        except BaseException:
            await receiver.abandon()
            raise

    def add() -> File:
        return services.ledger.files.add(
            file_id,
            caller.customer,
            filename=parameters.filename(form.filename, f"{file_id}.jsonl"),
            object_key=key,
            size_bytes=receiver.size,
            lifetime_seconds=lifetime or default_lifetime(services),
            purpose=purpose,
            sha256=receiver.sha256,
        )

    return file_object(await to_thread.run_sync(add))


@router.get("")
def list_files(
    caller: Authenticated,
    services: Shared,
    *,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> Page[FileObject]:
    """List files: those that were uploaded, and the input, output and error files of batches."""
    found = services.ledger.files.page(
        caller.customer,
        purpose=None if purpose is None else purpose if purpose in ("batch", "batch_output") else "none",
        newest_first=order == "desc",
        after=None if after is None else parameters.known_id("file", after),
        limit=limit + 1,
    )
    return page_of([file_object(file) for file in found], limit)


@router.get("/{file_id}")
def retrieve_file(file_id: str, caller: Authenticated, services: Shared) -> FileObject:
    """Return what is known of a file."""
    return file_object(services.ledger.files.get(caller.customer, parameters.known_id("file", file_id)))


@router.get(
    "/{file_id}/content",
    response_class=StreamingResponse,
    responses={
        200: {"description": "The file.", "content": {_JSONL: {}}},
        206: {"description": "The part that `Range` asks for.", "content": {_JSONL: {}}},
        416: {"description": "The part begins behind the end."},
    },
)
def file_content(
    file_id: str,
    caller: Authenticated,
    services: Shared,
    wanted: Annotated[str | None, Header(alias="range")] = None,
    if_range: Annotated[str | None, Header()] = None,
) -> StreamingResponse:
    """Return a file's bytes, or the one part of them that a Range header asks for.

    With an `If-Range` that is not the file's ETag, all of it.
    """
    file = services.ledger.files.get(caller.customer, parameters.known_id("file", file_id))
    info = services.store.head(file.object_key)
    if info is None:
        raise NotFound(f"the bytes of file {file_id} are gone")
    is_same = if_range is None or if_range == info.etag
    part = parameters.byte_range(wanted if is_same else None, info.size)
    headers = {"Accept-Ranges": "bytes", "Content-Length": str(part.length), "ETag": info.etag}
    if part.is_part:
        headers["Content-Range"] = f"bytes {part.start}-{part.start + part.length - 1}/{info.size}"
    pieces = _pieces(services.store, file.object_key, part)
    return StreamingResponse(pieces, 206 if part.is_part else 200, headers, media_type=_JSONL)


@router.delete("/{file_id}")
def delete_file(file_id: str, caller: Authenticated, services: Shared) -> FileDeleted:
    """Delete a file. Batches that were made from it have a copy of their own and go on.

    The file of a batch is only not given out any more: its bytes go with the batch's. Killed between the row and the
    object, the object is left to housekeeping.
    """
    file = services.ledger.files.remove(caller.customer, parameters.known_id("file", file_id))
    if file.batch_id is None:
        services.store.delete(file.object_key)
    return FileDeleted(id=file_id)


def default_lifetime(services: Services) -> float:
    """Return the seconds for which an uploaded file is kept where nothing else is asked for."""
    return services.settings.retention.files_days * DAY_SECONDS


def _pieces(store: ObjectStore, key: str, part: parameters.Range) -> Iterator[bytes]:
    return store.iterate_range(key, part.start, part.length)
