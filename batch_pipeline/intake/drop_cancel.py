"""Cancel by drop: an object inbox/CUSTOMER/NAME.cancel, whatever is in it, cancels the newest batch of that name.

    HEAD ──> ledger: cancel ──> answer (status.json, or cancel.json where nothing was cancelled) ──> delete

The ledger records the cancel with an actor that names this very object. Killed after any step, the next call finds by
that whom it has cancelled, cancels nobody else, and goes on with the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from batch_pipeline.errors import CustomerError, NotAllowedInState, NotFound
from batch_pipeline.intake.drop_inbox import ACTOR, Drop, Taken, remove
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, BatchStatus
from batch_pipeline.results import outbox
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore


def actor_of(cancel: Drop) -> str:
    """Return the name under which the ledger records what this object has cancelled."""
    return f"{ACTOR}: {cancel.info.modified_at:.3f} {cancel.info.etag.strip(chr(34))[:64]}"


def is_meant(cancel: Drop, batch: Batch | None, *, ledger: Ledger, store: ObjectStore) -> bool:
    """Whether a cancel is about this batch and not about a file that was dropped later: the batch can be cancelled
    still, or this very object has been carried out or answered before.
    """
    if batch is None or not batch.status.is_final or _has_cancelled(cancel, batch, ledger):
        return batch is not None
    return _was_answered(cancel, store)


def _has_cancelled(cancel: Drop, batch: Batch, ledger: Ledger) -> bool:
    if batch.outcome != BatchStatus.CANCELLED:
        return False
    actor = actor_of(cancel)
    return any(event.event == "cancelling" and event.actor == actor for event in ledger.events.of(batch.batch_id))


def _was_answered(cancel: Drop, store: ObjectStore) -> bool:
    answer = outbox.read_cancel_answer(cancel.customer, cancel.name, store)
    return answer is not None and answer.cancel == actor_of(cancel)


def carry_out(
    cancel: Drop,
    batch: Batch | None,
    *,
    ledger: Ledger,
    store: ObjectStore,
    settings: Settings,
    clock: Callable[[], float] = time.time,
) -> Taken:
    """Cancel a batch and answer; where there is nothing to cancel, say so without touching the results there.

    May be repeated after any kill. Raises StoreError.
    """
    if batch is not None and not batch.status.is_final:
        try:
            batch = ledger.batches.cancel(batch.batch_id, customer=cancel.customer, actor=actor_of(cancel))
        except NotAllowedInState:
            batch = ledger.batches.get(batch.batch_id)
    if batch is not None and _ends_as_cancelled(cancel, batch, ledger):
        outbox.publish_status(batch.batch_id, ledger=ledger, store=store, settings=settings)
        remove(cancel.info, store)
        return Taken(cancel.info.key, batch.batch_id)
    refusal = _refusal(cancel, batch)
    outbox.answer_cancel(
        outbox.CancelAnswer(
            customer=cancel.customer,
            name=cancel.name,
            batch_id=None if batch is None else batch.batch_id,
            status=None if batch is None else batch.status,
            code=refusal.code,
            message=refusal.message,
            cancel=actor_of(cancel),
            as_of=clock(),
        ),
        store=store,
    )
    remove(cancel.info, store)
    return Taken(cancel.info.key, None if batch is None else batch.batch_id, refusal.code)


def _ends_as_cancelled(cancel: Drop, batch: Batch, ledger: Ledger) -> bool:
    """Whether this object has cancelled the batch, or another cancel has and the batch is not over yet."""
    if batch.outcome != BatchStatus.CANCELLED:
        return False
    return not batch.status.is_final or _has_cancelled(cancel, batch, ledger)


def _refusal(cancel: Drop, batch: Batch | None) -> CustomerError:
    if batch is None:
        return NotFound(f"there is no batch {cancel.name} that could be cancelled; nothing was changed")
    if batch.status.is_final:
        return NotAllowedInState(
            f"the batch is {batch.status} already and cannot be cancelled any more; its results stay as they are"
        )
    return NotAllowedInState(f"too late to cancel: the batch is {batch.status} and becomes {batch.outcome}")
