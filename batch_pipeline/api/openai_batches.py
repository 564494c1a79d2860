"""OpenAI's `/v1/batches`: the batches of every door, also those that were dropped or submitted otherwise."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Response

from batch_pipeline.api import parameters
from batch_pipeline.api.auth import Authenticated
from batch_pipeline.api.openai_objects import BatchObject, CreateBatch, Page, answer, page_of
from batch_pipeline.api.problems import RequestRefused
from batch_pipeline.api.services import Services, Shared
from batch_pipeline.api.statuses import OwnedBatch
from batch_pipeline.errors import NotFound
from batch_pipeline.intake import options
from batch_pipeline.intake.idempotency import creation_key
from batch_pipeline.intake.stored import Source, Wish, made_before, submit_stored
from batch_pipeline.ledger.files import INPUT
from batch_pipeline.ledger.records import Batch, Door
from batch_pipeline.wire import codes

router = APIRouter(prefix="/v1/batches", tags=["OpenAI: batches"])

_ACTOR = "api"


@router.post("")
def create_batch(
    body: CreateBatch,
    caller: Authenticated,
    services: Shared,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> BatchObject:
    """Make a batch of an uploaded file. What is wrong with its lines is found in `validating`, and is no error here.

    With an `Idempotency-Key` the same creation again answers the batch that the first one made.
    """
    wish = _wish(body, services, idempotency_key)
    file_id = parameters.known_id("file", body.input_file_id)
    file = services.ledger.files.find(caller.customer, file_id)
    source = Source("", file_id) if file is None else Source(file.object_key, file_id, file.sha256)
    batch = made_before(caller.customer, source, wish, door=Door.API, ledger=services.ledger)
    if batch is None:
        if file is None:
            raise NotFound(f"no file {file_id}")
        if file.purpose != INPUT:
            raise RequestRefused(
                400,
                codes.INVALID_OPTION,
                f"file {file.file_id} has the purpose {file.purpose!r}: upload one with the purpose 'batch'",
                param="input_file_id",
            )
        batch = submit_stored(
            caller.customer,
            source,
            wish,
            door=Door.API,
            ledger=services.ledger,
            store=services.store,
        )
    return shown(batch, services)


@router.get("", response_model=Page[BatchObject])
def list_batches(
    caller: Authenticated,
    services: Shared,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    idempotency_key: Annotated[
        str | None, Query(description="Ours: only the batch that was made with this key.")
    ] = None,
) -> Response:
    """List batches of every door, newest first."""
    key = parameters.idempotency_key(idempotency_key)
    if key is not None:
        made = services.ledger.batches.by_creation_key(creation_key(Door.API, caller.customer, key))
        return answer(page_of([] if made is None else [shown(made, services)], limit))
    last = None if after is None else parameters.known_id("batch", after)
    found = services.ledger.moments.page(caller.customer, after=last, limit=limit + 1)
    return answer(page_of(services.statuses.at(found), limit))


@router.get("/{batch_id}", response_model=BatchObject)
async def retrieve_batch(batch_id: str, caller: Authenticated, services: Shared) -> Response:
    """Return where a batch is, what it waits for, and when it will be done."""
    found = await services.polled.of(OwnedBatch(caller.customer, parameters.known_id("batch", batch_id)))
    if found is None:
        raise NotFound(f"no batch {batch_id}")
    return answer(found)


@router.post("/{batch_id}/cancel")
def cancel_batch(batch_id: str, caller: Authenticated, services: Shared) -> BatchObject:
    """Cancel a batch: what is finished is returned. Twice is once; after the end it is an error that says so."""
    known = parameters.known_id("batch", batch_id)
    batch = services.ledger.batches.cancel(known, customer=caller.customer, actor=_ACTOR)
    return shown(batch, services)


def shown(batch: Batch, services: Services) -> BatchObject:
    """Return a batch, of which the caller is the owner, as it is now."""
    return services.statuses.of(batch.batch_id)


def _wish(body: CreateBatch, services: Services, idempotency_key: str | None) -> Wish:
    """Return what a creation asks for, checked. Raises CustomerError."""
    return Wish(
        options.choose(
            services.settings.intake,
            endpoint=body.endpoint,
            window=body.completion_window,
            on_invalid=body.on_invalid,
            metadata=body.metadata,
        ),
        name=body.name,
        window_asked=body.completion_window.strip(),
        output_expires_seconds=None if body.output_expires_after is None else body.output_expires_after.seconds,
        idempotency_key=parameters.idempotency_key(idempotency_key),
    )
