"""The same creation twice is one batch, whichever door it comes by: under which key, and what must be the same."""

from __future__ import annotations

from collections.abc import Iterable

from batch_pipeline.errors import CustomerError
from batch_pipeline.ledger.records import Batch, Door
from batch_pipeline.wire import codes


def creation_key(door: Door, customer: str, idempotency_key: str) -> str:
    """Return the key under which the ledger knows a creation of this customer by this door."""
    return f"{door}:{customer}:{idempotency_key}"


def key_of(door: Door, customer: str, idempotency_key: str | None, batch_id: str) -> str:
    """Return the key of a creation; without one of the customer's it is that of the batch alone."""
    return f"{door}:{batch_id}" if idempotency_key is None else creation_key(door, customer, idempotency_key)


def check_same(batch: Batch, named: str, compared: Iterable[tuple[str, object, object]]) -> None:
    """Raise CustomerError where the batch of an idempotency key was made from something else.

    `compared` has what it is, as it was then, and as it is wanted now; `named` is how the message begins.
    """
    differences = " and ".join(what for what, then, now in compared if then != now)
    if differences:
        raise CustomerError(
            codes.INVALID_OPTION,
            f"{named} has made {batch.batch_id} with another {differences}: use a new key for a new batch",
        )
