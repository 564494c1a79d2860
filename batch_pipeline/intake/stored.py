"""A file that lies in the store already, uploaded by the API: it becomes a batch (docs/architecture.md).

    HEAD ──> copy to batches/BATCH/input.jsonl, conditional on the etag ──> ledger: create

No byte passes through us. The batch runs on its own copy: what becomes of the file afterwards does not matter to it.
Killed before the create there is no batch, only a copy that nothing points at; after it the batch runs. With an
idempotency key the same creation again returns the batch that the first one made: the ledger decides which of two
counts, and the copy of the other one is removed again. The first status.json is written by whoever publishes next.
"""

from __future__ import annotations

from typing import NamedTuple

from batch_pipeline import ids
from batch_pipeline.errors import CustomerError, LimitReached, NotFound
from batch_pipeline.intake.idempotency import check_same, creation_key, key_of
from batch_pipeline.intake.options import Options
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, Door, NewBatch
from batch_pipeline.store import ObjectMissing, ObjectStore, PreconditionFailed, keys
from batch_pipeline.wire import codes


class Source(NamedTuple):
    """The file that a batch is made from."""

    object_key: str
    file_id: str | None
    """As the API names it; None where it was made for this batch alone."""
    sha256: str | None = None
    """Of its bytes, where they are known."""


class Wish(NamedTuple):
    """What a creation asks for, beside the file."""

    options: Options
    name: str | None = None
    """Its folder in the outbox; None: the batch's id."""
    window_asked: str | None = None
    """The window in the customer's words, to be given back as it was asked for."""
    output_expires_seconds: int | None = None
    idempotency_key: str | None = None


def made_before(customer: str, source: Source, wish: Wish, *, door: Door, ledger: Ledger) -> Batch | None:
    """Return the batch that this creation's idempotency key has made, if any.

    Raises CustomerError where it was made from something else.
    """
    if wish.idempotency_key is None:
        return None
    batch = ledger.batches.by_creation_key(creation_key(door, customer, wish.idempotency_key))
    if batch is not None:
        _check_same(batch, source, wish)
    return batch


def submit_stored(
    customer: str, source: Source, wish: Wish, *, door: Door, ledger: Ledger, store: ObjectStore
) -> Batch:
    """Make a batch of a stored file. The caller has checked that the file is the customer's.

    Raises NotFound where the file's object is gone, LimitReached, CustomerError (see `made_before`; also for a name
    that is none), StoreError.
    """
    if wish.name is not None and not ids.NAME_PATTERN.fullmatch(wish.name):
        raise CustomerError(
            codes.INVALID_NAME,
            "name: 1 to 200 letters, digits, '.', '_' and '-', starting with a letter or digit, not ending with a dot",
            param="name",
        )
    before = made_before(customer, source, wish, door=door, ledger=ledger)
    if before is not None:
        return before
    batch_id = ids.new_batch_id()
    input_key = keys.input_file(batch_id)
    size, etag = _copy(source, input_key, store)
    new = NewBatch(
        batch_id=batch_id,
        customer=customer,
        name=wish.name or batch_id,
        door=door,
        endpoint=wish.options.endpoint,
        window_seconds=wish.options.window_seconds,
        on_invalid=wish.options.on_invalid,
        creation_key=key_of(door, customer, wish.idempotency_key, batch_id),
        input_key=input_key,
        input_bytes=size,
        input_etag=etag,
        metadata=wish.options.metadata,
        input_file_id=source.file_id,
        window_asked=wish.window_asked,
        output_expires_seconds=wish.output_expires_seconds,
        sent_sha256=source.sha256,
    )
    try:
        batch = ledger.batches.create(new, actor=door)
    except LimitReached:
        store.delete(input_key)
        raise
    if batch.batch_id != batch_id:
        store.delete(input_key)
        _check_same(batch, source, wish)
    return batch


def _copy(source: Source, target: str, store: ObjectStore) -> tuple[int, str]:
    """Copy the file as it is now; return the copy's size and etag."""
    info = store.head(source.object_key)
    try:
        if info is not None:
            store.copy(info, target)
            copied = store.head(target)
            if copied is not None and copied.size == info.size:
                return copied.size, copied.etag
    except (PreconditionFailed, ObjectMissing):
        pass
    raise NotFound(f"the file {source.file_id or source.object_key} is gone; upload it again")


def _check_same(batch: Batch, source: Source, wish: Wish) -> None:
    """Raise CustomerError where the batch of an idempotency key was made from something else."""
    is_same_file = batch.input_file_id == source.file_id or (
        # The same file, uploaded once more.
        source.sha256 is not None and batch.sent_sha256 == source.sha256
    )
    compared = (
        ("file", True, is_same_file),
        ("endpoint", batch.endpoint, wish.options.endpoint),
        ("completion window", batch.window_seconds, wish.options.window_seconds),
        ("on-invalid", batch.on_invalid, wish.options.on_invalid),
        ("metadata", batch.metadata, wish.options.metadata),
        ("name", batch.name, wish.name or batch.batch_id),
        ("output_expires_after", batch.output_expires_seconds, wish.output_expires_seconds),
    )
    check_same(batch, "this idempotency key", compared)
