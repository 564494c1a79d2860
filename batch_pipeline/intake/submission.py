"""A file that is handed to us directly, without the drop folder: it becomes a batch (docs/architecture.md).

    check ──> upload to batches/BATCH/input.jsonl ──> ledger: create ──> first status.json

Killed before the create there is no batch, only an object that nothing points at. Killed after it, the batch runs and
its status is published by whoever publishes next. With an idempotency key the same submission again returns the batch
that the first one made, wherever that was killed: the ledger decides which of two creations counts, and the bytes that
the other one uploaded are removed again.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from batch_pipeline import ids
from batch_pipeline import settings as configuration
from batch_pipeline.errors import CustomerError, LimitReached
from batch_pipeline.intake.idempotency import check_same, creation_key, key_of
from batch_pipeline.intake.options import Options
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, Door, NewBatch
from batch_pipeline.results import outbox
from batch_pipeline.store import ObjectStore, keys
from batch_pipeline.wire import codes

MAX_IDEMPOTENCY_KEY_CHARACTERS = 256
_BLOCK_BYTES = 1024 * 1024


class Submitted(NamedTuple):
    """The batch, and whether this submission created it."""

    batch: Batch
    is_new: bool


def submit(
    file: Path,
    *,
    customer: str,
    name: str,
    door: Door,
    options: Options,
    idempotency_key: str | None = None,
    ledger: Ledger,
    store: ObjectStore,
    settings: configuration.Settings,
) -> Submitted:
    """Make a batch of a local file and publish its first status. Cost: with an idempotency key one more reading of the
    file, for its hash.

    Raises CustomerError where the customer, the name or the file cannot be accepted, or where the idempotency key was
    used for another submission; LimitReached where the customer has as many open batches as it may have; StoreError;
    OSError where the file cannot be read.
    """
    size = check(file, customer, name, settings.intake, ledger)
    if idempotency_key is not None and not 1 <= len(idempotency_key) <= MAX_IDEMPOTENCY_KEY_CHARACTERS:
        raise CustomerError(
            codes.INVALID_OPTION,
            f"the idempotency key has {len(idempotency_key)} characters: give it 1 to {MAX_IDEMPOTENCY_KEY_CHARACTERS}",
        )
    batch = sha256 = None
    if idempotency_key is not None:
        sha256 = file_sha256(file)
        batch = ledger.batches.by_creation_key(creation_key(door, customer, idempotency_key))
    is_new = False
    if batch is None:
        batch_id = ids.new_batch_id()
        input_key = keys.input_file(batch_id)
        store.upload(file, input_key)
        taken = store.head(input_key)
        if taken is None or taken.size != size:
            store.delete(input_key)
            raise CustomerError(codes.INVALID_REQUEST, f"{file} changed while it was read: submit it again")
        batch = _create(
            ledger,
            store,
            NewBatch(
                batch_id=batch_id,
                customer=customer,
                name=name,
                door=door,
                endpoint=options.endpoint,
                window_seconds=options.window_seconds,
                on_invalid=options.on_invalid,
                creation_key=key_of(door, customer, idempotency_key, batch_id),
                input_key=input_key,
                input_bytes=size,
                input_etag=taken.etag,
                metadata=options.metadata,
                sent_sha256=sha256,
            ),
        )
        is_new = batch.batch_id == batch_id
        if not is_new:
            store.delete(input_key)
    if not is_new:
        _check_same(batch, sha256, options, str(idempotency_key))
    outbox.publish_status(batch.batch_id, ledger=ledger, store=store, settings=settings)
    return Submitted(batch, is_new)


def _create(ledger: Ledger, store: ObjectStore, new: NewBatch) -> Batch:
    """Create the batch. Raises LimitReached where its customer may have no more, once what was uploaded is removed."""
    try:
        return ledger.batches.create(new, actor=new.door)
    except LimitReached:
        store.delete(new.input_key)
        raise


def check(file: Path, customer: str, name: str, intake: configuration.Intake, ledger: Ledger) -> int:
    """Return the file's size in bytes. Raises CustomerError for what can be refused before anything is sent."""
    if not ids.CUSTOMER_PATTERN.fullmatch(customer):
        raise CustomerError(
            codes.INVALID_NAME,
            f"customer {customer!r}: 1 to 64 lower-case letters, digits, '-' and '_', a letter or digit at both ends",
        )
    if not ids.NAME_PATTERN.fullmatch(name):
        raise CustomerError(
            codes.INVALID_NAME,
            f"name {name!r}: 1 to 200 letters, digits, '.', '_' and '-', starting with a letter or digit and not "
            "ending with a dot",
        )
    check_is_file(file)
    size = file.stat().st_size
    limits = configuration.limited(intake, ledger.customers.limits_of(customer))
    if size > limits.max_file_bytes:
        raise CustomerError(codes.FILE_TOO_LARGE, f"{file} has {size} bytes; at most {limits.max_file_bytes} are taken")
    return size


def check_is_file(file: Path) -> None:
    """Raise CustomerError where there is no file of that name."""
    if not file.is_file():
        kind = "is a folder" if file.is_dir() else "does not exist" if not file.exists() else "is not a regular file"
        raise CustomerError(codes.INVALID_NAME, f"{file} {kind}: name a file of requests, one JSON object a line")


@contextmanager
def spooled(stream: BinaryIO, limits: configuration.Intake) -> Iterator[Path]:
    """Copy a stream to a file of its own, yield that, and remove it. Raises CustomerError where it is too large."""
    scratch = Path(limits.scratch_dir)
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=scratch, prefix="submission-", suffix=".jsonl") as spool:
        size = 0
        while block := stream.read(_BLOCK_BYTES):
            size += len(block)
            if size > limits.max_file_bytes:
                raise CustomerError(codes.FILE_TOO_LARGE, f"more than {limits.max_file_bytes} bytes were sent")
            spool.write(block)
        spool.flush()
        yield Path(spool.name)


def file_sha256(file: Path) -> str:
    """Return the hash of a local file, in hex."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _check_same(batch: Batch, sha256: str | None, options: Options, idempotency_key: str) -> None:
    """Raise CustomerError where the batch of an idempotency key was made from something else."""
    compared = (
        ("file", batch.sent_sha256, sha256),
        ("endpoint", batch.endpoint, options.endpoint),
        ("completion window", batch.window_seconds, options.window_seconds),
        ("on-invalid", batch.on_invalid, options.on_invalid),
    )
    check_same(batch, f"idempotency key {idempotency_key!r}", compared)
