"""OpenAI's `/v1/uploads`: a file that comes in parts, where it is too large for one request or breaks off too often."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request

from batch_pipeline import ids
from batch_pipeline.api import parameters
from batch_pipeline.api.auth import Authenticated, Caller
from batch_pipeline.api.openai_files import default_lifetime
from batch_pipeline.api.openai_objects import (
    CompleteUpload,
    CreateUpload,
    UploadObject,
    UploadPart,
    part_object,
    upload_object,
)
from batch_pipeline.api.problems import RequestRefused
from batch_pipeline.api.receiving import Receiver, receive
from batch_pipeline.api.services import Services, Shared
from batch_pipeline.errors import CustomerError, NotAllowedInState
from batch_pipeline.ledger.uploads import COMPLETED, PENDING, Part, Upload
from batch_pipeline.settings import limited
from batch_pipeline.store import ObjectMissing, keys
from batch_pipeline.wire import codes

router = APIRouter(prefix="/v1/uploads", tags=["OpenAI: uploads"])

LIFETIME_SECONDS = 3600.0
MOST_PART_BYTES = 64 * 1024 * 1024
_FORM = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string", "format": "binary"}}}
_FORM_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}


@router.post("")
def create_upload(body: CreateUpload, caller: Authenticated, services: Shared) -> UploadObject:
    """Begin an upload of so many bytes. It has an hour."""
    purpose = parameters.purpose(body.purpose)
    most = limited(services.settings.intake, caller.limits).max_file_bytes
    if body.bytes > most:
        raise RequestRefused(
            413, codes.FILE_TOO_LARGE, f"bytes: {body.bytes} announced, at most {most} are taken", param="bytes"
        )
    upload_id = ids.new_upload_id()
    upload = services.ledger.uploads.create(
        upload_id,
        caller.customer,
        purpose=purpose,
        filename=parameters.filename(body.filename, f"{upload_id}.jsonl"),
        size_bytes=body.bytes,
        lifetime_seconds=LIFETIME_SECONDS,
        file_expires_seconds=None if body.expires_after is None else body.expires_after.seconds,
    )
    return upload_object(upload)


@router.post("/{upload_id}/parts", openapi_extra=_FORM_BODY)
async def add_part(upload_id: str, request: Request, caller: Authenticated, services: Shared) -> UploadPart:
    """Add a part of at most 64 MiB; parts may come in any order and at once."""
    parameters.known_id("upload", upload_id)
    part_id = ids.new_part_id()
    key = keys.upload_part(caller.customer, upload_id, part_id)
    await to_thread.run_sync(_check_room, caller, services, upload_id)
    receiver = Receiver(services.store, key, MOST_PART_BYTES)
    async with services.receiving.place(caller.customer):
        try:
            await receive(request, "data", receiver)
            await receiver.finish()
        except BaseException:
            await receiver.abandon()
            raise

    def add() -> Part:
        try:
            return services.ledger.uploads.add_part(caller.customer, part_id, upload_id, key, receiver.size)
        except NotAllowedInState:
            services.store.delete(key)
            raise

    return part_object(await to_thread.run_sync(add))


@router.post("/{upload_id}/complete")
def complete_upload(upload_id: str, body: CompleteUpload, caller: Authenticated, services: Shared) -> UploadObject:
    """Make one file of the parts that are named, in that order. The same call again answers the same file.

    Killed before the row is written the upload is still pending; what was put together is left to housekeeping.
    """
    upload = services.ledger.uploads.get(caller.customer, parameters.known_id("upload", upload_id))
    if upload.status == PENDING:
        try:
            upload = _complete(upload, body, caller, services)
        except ObjectMissing:
            # Its parts went while they were put together: another call has completed it, or cancelled it.
            upload = services.ledger.uploads.get(caller.customer, upload_id)
            if upload.status == PENDING:
                raise
    if upload.status != COMPLETED or upload.file_id is None:
        raise NotAllowedInState(f"upload {upload_id} is {upload.status}: begin a new one")
    return upload_object(upload, services.ledger.files.get(caller.customer, upload.file_id))


@router.post("/{upload_id}/cancel")
def cancel_upload(upload_id: str, caller: Authenticated, services: Shared) -> UploadObject:
    """Cancel an upload: its parts are removed."""
    upload = services.ledger.uploads.cancel(caller.customer, parameters.known_id("upload", upload_id))
    _remove_parts(services, caller, upload_id)
    return upload_object(upload)


def _check_room(caller: Caller, services: Services, upload_id: str) -> None:
    """Raise where a part cannot be taken: before it is sent, and so that parts cannot fill the store without end."""
    upload = services.ledger.uploads.get(caller.customer, upload_id)
    if upload.status != PENDING:
        raise NotAllowedInState(f"upload {upload_id} is {upload.status}: begin a new one")
    there = sum(part.bytes for part in services.ledger.uploads.parts(caller.customer, upload_id))
    # Twice: a part whose acknowledgement was lost is sent again.
    if there > 2 * upload.bytes:
        raise RequestRefused(
            400, codes.INVALID_REQUEST, f"the parts have {there} bytes already, {upload.bytes} were announced"
        )


def _complete(upload: Upload, body: CompleteUpload, caller: Caller, services: Services) -> Upload:
    parts = _chosen(upload, body, services)
    file_id = ids.new_file_id()
    key = keys.uploaded_file(caller.customer, file_id)
    digest = None if body.md5 is None else hashlib.md5(usedforsecurity=False)
    with services.store.multipart(key) as writer:
        for part in parts:
            if digest is None and part.bytes >= writer.smallest_copy and writer.can_copy:
                writer.copy_part(part.object_key, 0, part.bytes)
                continue
            for piece in services.store.iterate(part.object_key):
                writer.write(piece)
                if digest is not None:
                    digest.update(piece)
        if digest is not None and digest.hexdigest() != body.md5:
            raise RequestRefused(
                400, codes.INVALID_REQUEST, f"md5: the parts together have {digest.hexdigest()}", param="md5"
            )
    lifetime = upload.file_expires_seconds or default_lifetime(services)
    try:
        completed = services.ledger.uploads.complete(caller.customer, upload.upload_id, file_id, key, lifetime)
    except CustomerError:
        services.store.delete(key)
        raise
    if completed.file_id != file_id:
        services.store.delete(key)
    _remove_parts(services, caller, upload.upload_id)
    return completed


def _chosen(upload: Upload, body: CompleteUpload, services: Services) -> list[Part]:
    """Return the parts that are named. Raises RequestRefused where they are not what was announced."""
    if body.md5 is not None and not re.fullmatch(r"[0-9a-f]{32}", body.md5):
        raise RequestRefused(400, codes.INVALID_OPTION, "md5: 32 hexadecimal digits in lower case", param="md5")
    there = {part.part_id: part for part in services.ledger.uploads.parts(upload.customer, upload.upload_id)}
    missing = [part_id for part_id in body.part_ids if part_id not in there]
    if missing or len(set(body.part_ids)) != len(body.part_ids):
        raise RequestRefused(
            400,
            codes.INVALID_REQUEST,
            "part_ids: name each part once" + (f"; {len(missing)} are none of this upload's" if missing else ""),
            param="part_ids",
        )
    parts = [there[part_id] for part_id in body.part_ids]
    size = sum(part.bytes for part in parts)
    if size != upload.bytes:
        raise RequestRefused(
            400,
            codes.INVALID_REQUEST,
            f"the parts have {size} bytes together, {upload.bytes} were announced",
            param="part_ids",
        )
    return parts


def _remove_parts(services: Services, caller: Caller, upload_id: str) -> None:
    prefix = keys.upload(caller.customer, upload_id)
    services.store.delete_all(info.key for info in services.store.list(prefix))
