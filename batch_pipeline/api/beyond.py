"""What goes beyond OpenAI's API for its batches: results while a batch runs, and running what has failed again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated

import msgspec
from fastapi import APIRouter, Header, Response
from fastapi.responses import StreamingResponse

from batch_pipeline import ids
from batch_pipeline.api import parameters
from batch_pipeline.api.auth import Authenticated, Caller
from batch_pipeline.api.openai_batches import shown
from batch_pipeline.api.openai_files import default_lifetime
from batch_pipeline.api.openai_objects import BatchObject, RetryBatch
from batch_pipeline.api.services import Services, Shared
from batch_pipeline.errors import LimitReached, NotFound
from batch_pipeline.intake import options
from batch_pipeline.intake.again import RETRY_OF, RETRY_PREFIX, write_failed_requests
from batch_pipeline.intake.stored import Source, Wish, made_before, submit_stored
from batch_pipeline.ledger.records import Batch, Door
from batch_pipeline.results.archived import manifest_bytes
from batch_pipeline.results.so_far import results_so_far
from batch_pipeline.store import keys

router = APIRouter(prefix="/v1/batches", tags=["Batches: beyond OpenAI"])

COMPLETE_HEADER = "X-Results-Complete"
_JSONL = "application/jsonl"


@router.get(
    "/{batch_id}/results",
    response_class=StreamingResponse,
    responses={200: {"description": f"Result lines; {COMPLETE_HEADER} says if they are all.", "content": {_JSONL: {}}}},
)
def results(batch_id: str, caller: Authenticated, services: Shared) -> StreamingResponse:
    """Return the results so far: complete chunks only. `X-Results-Complete` is `true` after the batch's
    end, unless one of its files was deleted or has expired.
    """
    batch = services.ledger.batches.get(parameters.known_id("batch", batch_id), customer=caller.customer)
    so_far = results_so_far(batch, ledger=services.ledger, store=services.store)
    headers = {COMPLETE_HEADER: "true" if so_far.is_complete else "false"}
    return StreamingResponse(so_far.lines, headers=headers, media_type=_JSONL)


@router.get("/{batch_id}/manifest", response_class=Response, responses={200: {"content": {"application/json": {}}}})
def manifest(batch_id: str, caller: Authenticated, services: Shared) -> Response:
    """Return how the results came about: counts, hashes of the files, and the attempts, workers and engines behind."""
    batch = services.ledger.batches.get(parameters.known_id("batch", batch_id), customer=caller.customer)
    if batch.manifest_key is None or batch.files_removed_at is not None:
        raise NotFound(f"batch {batch_id} is {batch.status} and has no manifest")
    return Response(manifest_bytes(batch, services.store), media_type="application/json")


@router.post("/{batch_id}/retry")
def retry(
    batch_id: str,
    caller: Authenticated,
    services: Shared,
    body: RetryBatch | None = None,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> BatchObject:
    """Make a new batch of the requests that failed, expired or were cancelled; its metadata names the old one.

    Their lines become a file of their own. Invalid lines are left out. Killed before the new batch is created there is
    at most that file; with an `Idempotency-Key` the same call again answers the batch that the first one made.
    """
    old = services.ledger.batches.get(parameters.known_id("batch", batch_id), customer=caller.customer)
    key = parameters.idempotency_key(idempotency_key)
    wish = _wish(old, body or RetryBatch(), services, key)
    file_id = ids.new_file_id() if key is None else _file_id_from(f"{caller.customer}:{batch_id}:{key}")
    source = Source(keys.uploaded_file(caller.customer, file_id), file_id)
    batch = made_before(caller.customer, source, wish, door=Door.API, ledger=services.ledger)
    if batch is None:
        _write(old, source, caller, services)
        try:
            batch = submit_stored(
                caller.customer, source, wish, door=Door.API, ledger=services.ledger, store=services.store
            )
        except LimitReached:
            # With a key the file is that of every call with it: one of the others may have made a batch of it.
            if key is None:
                services.ledger.files.remove(caller.customer, file_id)
                services.store.delete(source.object_key)
            raise
    return shown(batch, services)


def _wish(old: Batch, body: RetryBatch, services: Services, idempotency_key: str | None) -> Wish:
    window = body.completion_window or old.window_asked or options.format_window(old.window_seconds)
    chosen = options.choose(
        services.settings.intake,
        endpoint=old.endpoint,
        window=window,
        on_invalid=old.on_invalid,
        metadata=_without_link(old.metadata) if body.metadata is None else body.metadata,
    )
    # Beside the customer's pairs, of which there may be as many as there may be.
    linked = {**chosen.metadata, RETRY_OF: old.batch_id}
    return Wish(
        msgspec.structs.replace(chosen, metadata=linked),
        window_asked=window.strip(),
        output_expires_seconds=old.output_expires_seconds,
        idempotency_key=idempotency_key,
    )


def _without_link(metadata: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in metadata.items() if key != RETRY_OF}


def _write(old: Batch, source: Source, caller: Caller, services: Services) -> None:
    """Make the file of the requests to run again. Raises as `write_failed_requests`."""
    size = write_failed_requests(old, source.object_key, services.store)
    services.ledger.files.add(
        str(source.file_id),
        caller.customer,
        filename=f"{RETRY_PREFIX}{old.batch_id}.jsonl",
        object_key=source.object_key,
        size_bytes=size,
        lifetime_seconds=default_lifetime(services),
    )


def _file_id_from(text: str) -> str:
    """Return the id of a file that the same call always gives: a repetition writes the same bytes to the same key."""
    return f"file-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
