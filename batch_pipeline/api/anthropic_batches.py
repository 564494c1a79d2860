"""Anthropic's `/v1/messages/batches`: the batches whose endpoint is `/v1/messages`, also those of other doors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import StreamingResponse

from batch_pipeline import ids, settings
from batch_pipeline.api import parameters
from batch_pipeline.api.anthropic_objects import (
    MessageBatch,
    MessageBatchDeleted,
    MessageBatchPage,
    batch_id_of,
    message_batch,
    params_schema,
    shown_id,
)
from batch_pipeline.api.auth import Authenticated, Caller
from batch_pipeline.api.problems import RequestRefused
from batch_pipeline.api.receiving import BLOCK_BYTES, Receiver
from batch_pipeline.api.services import Services, Shared
from batch_pipeline.errors import CustomerError, NotAllowedInState
from batch_pipeline.housekeeping.objects import remove_files
from batch_pipeline.intake import options
from batch_pipeline.intake.again import RETRY_OF, RETRY_PREFIX
from batch_pipeline.intake.idempotency import check_same, key_of
from batch_pipeline.ledger.message_batches import check_ended
from batch_pipeline.ledger.records import Batch, Door, NewBatch
from batch_pipeline.models import MESSAGES
from batch_pipeline.results.so_far import results_so_far
from batch_pipeline.results.streams import split_lines
from batch_pipeline.store import keys
from batch_pipeline.wire import codes
from batch_pipeline.wire.message_requests import MOST_BYTES, MOST_REQUESTS, BadRequests, RequestReader
from batch_pipeline.wire.message_results import result_line

_ACTOR = "api"
_JSONL = "application/x-jsonl"
_PATH = "/v1/messages/batches"
_SENT_TOGETHER = 200


def _version(_: Authenticated, anthropic_version: Annotated[str | None, Header()] = None) -> None:
    """Ask for the header that Anthropic asks for; of those alone who have a key."""
    if not anthropic_version:
        raise RequestRefused(400, codes.INVALID_REQUEST, "anthropic-version: header is required")


router = APIRouter(prefix=_PATH, tags=["Anthropic: message batches"], dependencies=[Depends(_version)])


@router.post(
    "", openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": params_schema()}}}}
)
async def create_message_batch(
    request: Request,
    caller: Authenticated,
    services: Shared,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> MessageBatch:
    """Make a batch of the requests in the body. Errors in their `params` come with the results, one by one.

    Killed, or left by the client, before the ledger has the batch: there is none, at most an object that housekeeping
    removes. With an `Idempotency-Key` the same creation again answers the batch that the first one made.
    """
    key = parameters.idempotency_key(idempotency_key)
    batch_id = ids.new_batch_id()
    limits = settings.limited(services.settings.intake, caller.limits)
    receiver = Receiver(services.store, keys.input_file(batch_id), limits.max_file_bytes)
    reader = RequestReader(min(MOST_REQUESTS, limits.max_requests), limits.max_line_bytes)
    async with services.receiving.place(caller.customer):
        try:
            await _receive(request, reader, receiver)
            await receiver.finish()
        except BaseException:
            await receiver.abandon()
            raise
    create = partial(_create, batch_id, receiver, reader.count, key, caller=caller, services=services)
    batch = await to_thread.run_sync(create)
    return _shown(batch, request)


@router.get("")
def list_message_batches(
    request: Request,
    caller: Authenticated,
    services: Shared,
    *,
    after_id: str | None = None,
    before_id: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> MessageBatchPage:
    """List message batches, newest first."""
    if after_id is not None and before_id is not None:
        raise RequestRefused(400, codes.INVALID_REQUEST, "after_id and before_id: give one of them", param="before_id")
    found, has_more = services.ledger.message_batches.page(
        caller.customer,
        after=None if after_id is None else batch_id_of(after_id),
        before=None if before_id is None else batch_id_of(before_id),
        limit=limit,
    )
    data = [_shown(batch, request) for batch in found]
    return MessageBatchPage(
        data=data,
        has_more=has_more,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
    )


@router.get("/{message_batch_id}")
def retrieve_message_batch(
    message_batch_id: str, request: Request, caller: Authenticated, services: Shared
) -> MessageBatch:
    """Return where a batch is."""
    return _shown(_find(message_batch_id, caller, services), request)


@router.post("/{message_batch_id}/cancel")
def cancel_message_batch(
    message_batch_id: str, request: Request, caller: Authenticated, services: Shared
) -> MessageBatch:
    """Cancel a batch: what is finished is returned. Twice is once; after the end it is an error that says so."""
    batch = _find(message_batch_id, caller, services)
    try:
        cancelled = services.ledger.batches.cancel(batch.batch_id, customer=caller.customer, actor=_ACTOR)
    except NotAllowedInState as error:
        raise NotAllowedInState(f"{shown_id(batch.batch_id)} has ended and cannot be canceled any more") from error
    return _shown(cancelled, request)


@router.delete("/{message_batch_id}")
def delete_message_batch(message_batch_id: str, caller: Authenticated, services: Shared) -> MessageBatchDeleted:
    """Delete a batch that has ended: its input and its results. Its counts and its bill stay with the operator.

    Killed on the way it is still there, without results: deleted again, the rest goes.
    """
    batch = _find(message_batch_id, caller, services)
    check_ended(batch)
    kept = services.ledger.now() - services.settings.retention.files_days * 86_400
    remove_files(batch, ledger=services.ledger, store=services.store, answers_before=kept, dry_run=False)
    if RETRY_OF in batch.metadata and batch.input_file_id is not None:
        # What was written for this batch alone; a file that its customer has uploaded stays its customer's.
        _remove_file(batch.input_file_id, caller, services)
    services.ledger.message_batches.delete(caller.customer, batch.batch_id)
    return MessageBatchDeleted(id=shown_id(batch.batch_id))


@router.get(
    "/{message_batch_id}/results",
    response_class=StreamingResponse,
    responses={200: {"description": "One result a line.", "content": {_JSONL: {}}}},
)
def message_batch_results(message_batch_id: str, caller: Authenticated, services: Shared) -> StreamingResponse:
    """Return the results of a batch that has ended: one JSON object a line, in any order."""
    batch = _find(message_batch_id, caller, services)
    if not batch.status.is_final:
        raise RequestRefused(404, codes.INVALID_REQUEST, "the batch has not ended: it has no results yet")
    so_far = results_so_far(batch, ledger=services.ledger, store=services.store)
    if not so_far.is_complete:
        raise NotAllowedInState(
            "a file of this batch was deleted or has expired, so its results are not whole: /v1/files has what is left"
        )
    return StreamingResponse(_results(so_far.lines), media_type=_JSONL)


def _remove_file(file_id: str, caller: Caller, services: Services) -> None:
    file = services.ledger.files.find(caller.customer, file_id)
    if file is not None and file.filename.startswith(RETRY_PREFIX):
        services.ledger.files.remove(caller.customer, file_id)
        services.store.delete(file.object_key)


def _find(message_batch_id: str, caller: Caller, services: Services) -> Batch:
    return services.ledger.message_batches.get(caller.customer, batch_id_of(message_batch_id))


def _shown(batch: Batch, request: Request) -> MessageBatch:
    return message_batch(batch, f"{request.base_url}{_PATH[1:]}/{shown_id(batch.batch_id)}/results")


async def _receive(request: Request, reader: RequestReader, receiver: Receiver) -> None:
    """Read the body to its end, whatever is wrong with it: a client that still sends would not hear it.

    Raises RequestRefused, StoreError. Memory: a block or two and the largest request.
    """
    wrong: RequestRefused | None = None
    size = 0
    async for block in _blocks(request):
        size += len(block)
        if size > MOST_BYTES:
            wrong = RequestRefused(413, codes.FILE_TOO_LARGE, f"the body has more than {MOST_BYTES} bytes; divide it")
            break
        if wrong is None:
            try:
                await receiver.write(await to_thread.run_sync(reader.feed, block))
            except BadRequests as error:
                wrong = _refused(error)
    if wrong is None:
        try:
            reader.finish()
        except BadRequests as error:
            wrong = _refused(error)
    if wrong is None and receiver.is_too_large:
        said = f"requests: they have more than the {receiver.most_bytes} bytes that one batch may have; divide them"
        wrong = RequestRefused(413, codes.FILE_TOO_LARGE, said)
    if wrong is not None:
        raise wrong


async def _blocks(request: Request) -> AsyncIterator[bytes]:
    """Yield the body in blocks of some size: small ones are gathered."""
    gathered = bytearray()
    async for piece in request.stream():
        gathered += piece
        if len(gathered) >= BLOCK_BYTES:
            yield bytes(gathered)
            gathered.clear()
    if gathered:
        yield bytes(gathered)


def _refused(error: BadRequests) -> RequestRefused:
    return RequestRefused(400, codes.INVALID_REQUEST, str(error), param="requests")


def _create(
    batch_id: str, received: Receiver, count: int, idempotency_key: str | None, *, caller: Caller, services: Services
) -> Batch:
    """Make the batch whose lines lie in the store. Raises CustomerError, LimitReached; then nothing is left of it."""
    input_key = keys.input_file(batch_id)
    chosen = options.choose(services.settings.intake, endpoint=MESSAGES)
    try:
        taken = services.store.head(input_key)
        if taken is None or taken.size != received.size:
            raise CustomerError(codes.INVALID_REQUEST, "the requests could not be kept; send them again")
        batch = services.ledger.batches.create(
            NewBatch(
                batch_id=batch_id,
                customer=caller.customer,
                name=batch_id,
                door=Door.API,
                endpoint=chosen.endpoint,
                window_seconds=chosen.window_seconds,
                on_invalid=chosen.on_invalid,
                creation_key=key_of(Door.API, caller.customer, idempotency_key, batch_id),
                input_key=input_key,
                input_bytes=received.size,
                input_etag=taken.etag,
                announced=count,
                sent_sha256=received.sha256,
            ),
            actor=_ACTOR,
        )
        if batch.batch_id != batch_id:
            compared = (
                ("endpoint", batch.endpoint, MESSAGES),
                ("list of requests", batch.sent_sha256, received.sha256),
            )
            check_same(batch, "this idempotency key", compared)
    except CustomerError:
        services.store.delete(input_key)
        raise
    if batch.batch_id != batch_id:
        services.store.delete(input_key)
    return batch


def _results(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield results, some together. Memory: a block of the store's, and the longest line."""
    together: list[bytes] = []
    for line in split_lines(pieces):
        together.append(result_line(line or b""))
        if len(together) >= _SENT_TOGETHER:
            yield b"".join(together)
            together.clear()
    if together:
        yield b"".join(together)
