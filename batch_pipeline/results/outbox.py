"""The outbox: where a customer reads how a batch stands, and in the end its files.

    outbox/CUSTOMER/NAME/status.json            of the newest batch of that name, from its first minute on
    outbox/CUSTOMER/NAME/{output.jsonl, errors.jsonl, manifest.json}      once the status is a final one
    outbox/CUSTOMER/NAME/rejected.json          a later file of that name that could not be taken
    outbox/CUSTOMER/NAME/cancel.json            what became of a NAME.cancel that cancelled nothing
    outbox/CUSTOMER/NAME/earlier/BATCH/...      the same of an older batch of that name that was still running

A status is written with a condition on the one that was read, and only over an older one, so that it never goes
backwards whoever writes it. Files are copied before the status that says they are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from batch_pipeline.errors import NotAllowedInState, StoreError
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, BatchError
from batch_pipeline.results.status import (
    ERRORS,
    MANIFEST,
    OUTPUT,
    ErrorList,
    StatusDocument,
    batch_object,
    current_status,
    expected_of,
    status_at,
)
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectInfo, ObjectMissing, ObjectStore, PreconditionFailed, keys

STATUS = "status.json"
REJECTED = "rejected.json"
CANCEL = "cancel.json"
SHOWN_END = "final"
"""What the ledger notes as published once the final status is."""
_JSON = "application/json"
_encoder = msgspec.json.Encoder(decimal_format="number")


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a file that could not be taken: there is no batch. Its fields are those of a batch object."""

    id: None = None
    object: str = "batch"
    status: str = "failed"
    errors: ErrorList
    created_at: int
    failed_at: int
    customer: str
    name: str
    as_of: float


class CancelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """cancel.json: why an object NAME.cancel has cancelled nothing, and the batch that it is about, if there is one."""

    customer: str
    name: str
    batch_id: str | None
    status: str | None
    code: str
    message: str
    cancel: str
    """Which object this answers: its time and etag."""
    as_of: float


class Published(NamedTuple):
    """How many statuses were written, and the last batch that was looked at ("" when all have been)."""

    written: int
    after: str
    broken: tuple[str, ...]
    """What kept the status of single batches from being written (a file that is gone), each as one sentence."""
    outage: StoreError | None
    """Why the rest of the page was left alone: the store cannot be used, or not for the batch `after`."""


class _Found(msgspec.Struct):
    """What has to be known of a status.json that is already there; it may be of any batch, or a rejection."""

    id: str | None = None
    revision: int = 0
    progress: int = 0
    as_of: float = 0.0

    @property
    def order(self) -> tuple[int, int, float]:
        return (self.revision, self.progress, self.as_of)


class _Existing(NamedTuple):
    found: _Found
    data: bytes
    etag: str


def publish_status(batch_id: str, *, ledger: Ledger, store: ObjectStore, settings: Settings) -> str:
    """Make the outbox show how a batch stands now; return the folder in which it does (its name, or below `earlier/`).

    Nothing is written of a batch whose files were removed.
    Killed before the status is written, the old one stands; of a final batch some files may lie there already, which
    its status does not name yet. Killed after it, only the ledger's note is missing, and it is written once more.
    Raises NotFound, StoreError.
    """
    batch = ledger.batches.get(batch_id)
    if batch.files_removed_at is not None:
        # Its folder was removed with its files, and may be another's.
        return _folder(batch, ledger)
    touched = False
    while True:
        folder = _folder(batch, ledger)
        if touched and folder != batch.name:
            _restore(batch, ledger, store)
            touched = False
        document = current_status(batch_id, ledger=ledger, settings=settings, folder=folder)
        existing = _read(store, keys.outbox(batch.customer, folder, STATUS))
        is_ours = existing is not None and existing.found.id == batch_id
        if existing is not None and is_ours and existing.found.order >= document.order:
            return folder
        if existing is not None and not is_ours:
            touched = True
            _take_over(batch, folder, existing, store)
        if document.is_final:
            touched = True
            _copy_files(ledger.batches.get(batch_id), folder, store)
        if _write(document, folder, existing, store):
            ledger.batches.mark_published(batch_id, _word(document))
            return folder


def publish_due(
    *, ledger: Ledger, store: ObjectStore, settings: Settings, after: str = "", limit: int = 500
) -> Published:
    """Publish what has changed among the next `limit` open batches after `after`, and ends that are not shown yet.

    To be called again and again, each time with the `after` of the answer. Killed anywhere: the rest is seen next time.
    A batch whose status cannot be written never holds up those behind it: they have their turn in this page, or, where
    it may be the whole store that is away, in the next one.
    """
    page = ledger.moments.publishable(limit=limit, after=after)
    surroundings = ledger.surroundings.of_models({model for moment, _ in page for model in moment.batch.models})
    written = 0
    broken: list[str] = []
    for moment, shown in page:
        expected = expected_of(moment, ledger, settings)
        if _word(status_at(moment, surroundings, expected, settings)) == shown:
            continue
        batch_id = moment.batch.batch_id
        try:
            publish_status(batch_id, ledger=ledger, store=store, settings=settings)
        except (ObjectMissing, PreconditionFailed) as error:
            broken.append(f"the status of {batch_id} cannot be shown: {error}")
        except StoreError as error:
            return Published(written, batch_id, tuple(broken), error)
        else:
            written += 1
    return Published(written, page[-1][0].batch.batch_id if len(page) == limit else "", tuple(broken), None)


def deliver(batch_id: str, *, ledger: Ledger, store: ObjectStore, settings: Settings) -> str:
    """Copy the files of a final batch to the outbox and then show its end; return the folder. May be repeated.

    Killed: see `publish_status`; a reader that sees a final status always finds the files. Raises NotAllowedInState
    before the end.
    """
    status = ledger.batches.get(batch_id).status
    if not status.is_final:
        raise NotAllowedInState(f"batch {batch_id} is {status}: it has no files to deliver yet")
    return publish_status(batch_id, ledger=ledger, store=store, settings=settings)


def answer_rejected(
    customer: str, folder: str, code: str, message: str, *, store: ObjectStore, clock: Callable[[], float] = time.time
) -> None:
    """Tell a customer in the outbox why a file could not be taken: `folder` is the file's name without `.jsonl`.

    The folder of a batch is not touched: there the answer is put beside, as rejected.json. Killed before the write
    there is no answer, and whoever rejects the file must do so again; after it, there is one. Raises StoreError.
    """
    now = clock()
    answer = Rejection(
        errors=ErrorList(data=[BatchError(code, message)]),
        created_at=int(now),
        failed_at=int(now),
        customer=customer,
        name=folder,
        as_of=now,
    )
    data = _encode(answer)
    while True:
        existing = _read(store, keys.outbox(customer, folder, STATUS))
        if existing is not None and existing.found.id is not None:
            store.put(keys.outbox(customer, folder, REJECTED), data, content_type=_JSON)
            return
        if _put(store, keys.outbox(customer, folder, STATUS), data, existing):
            return


def answer_cancel(answer: CancelAnswer, *, store: ObjectStore) -> None:
    """Tell a customer why a cancel has cancelled nothing; no other file of the folder is touched. Raises StoreError."""
    store.put(keys.outbox(answer.customer, answer.name, CANCEL), _encode(answer), content_type=_JSON)


def read_cancel_answer(customer: str, folder: str, store: ObjectStore) -> CancelAnswer | None:
    """Return the newest answer to a cancel of this name, if there is one that can be read. Raises StoreError."""
    try:
        return msgspec.json.decode(store.get(keys.outbox(customer, folder, CANCEL)), type=CancelAnswer)
    except (ObjectMissing, msgspec.DecodeError, UnicodeDecodeError):
        return None


def files_of(batch: Batch, store: ObjectStore, answers_before: float) -> list[ObjectInfo]:
    """Return what the outbox has of a batch, its status last; nothing where another batch has the folder by now.

    Answers to other files of its name (rejected.json, cancel.json) are among them where they were written before
    `answers_before`, in UTC seconds by the store's clock.
    """
    found = [*store.list(keys.outbox_folder(batch.customer, _earlier(batch)))]
    status = _read(store, keys.outbox(batch.customer, batch.name, STATUS))
    if status is not None and status.found.id == batch.batch_id:
        for info in store.list(keys.outbox_folder(batch.customer, batch.name), recursive=False):
            file = info.key.rpartition("/")[2]
            is_old_answer = file in (REJECTED, CANCEL) and info.modified_at < answers_before
            if file in (OUTPUT, ERRORS, MANIFEST, STATUS) or is_old_answer:
                found.append(info)
    return sorted(found, key=lambda info: info.key.endswith(f"/{STATUS}"))


def withdraw(files: Sequence[ObjectInfo], store: ObjectStore) -> None:
    """Delete files of the outbox, in this order, except those that were written again since they were listed.

    With the status last: killed before, the next call still sees whose the folder is.
    """
    for info in files:
        try:
            store.delete(info.key, if_match=info.etag)
        except (PreconditionFailed, ObjectMissing):
            continue


def _folder(batch: Batch, ledger: Ledger) -> str:
    """The newest batch of a name has the folder of that name."""
    newest = ledger.batches.newest_named(batch.customer, batch.name)
    if newest is None or newest.batch_id == batch.batch_id:
        return batch.name
    return _earlier(batch)


def _earlier(batch: Batch) -> str:
    return f"{batch.name}/earlier/{batch.batch_id}"


def _take_over(batch: Batch, folder: str, existing: _Existing, store: ObjectStore) -> None:
    """Clear the folder of what an older batch of the name left there; its own files stay below `batches/`.

    Answers that were given after this batch was created are kept, others are removed.
    """
    answers = [keys.outbox(batch.customer, folder, file) for file in (REJECTED, CANCEL)]
    if existing.found.id is None and existing.found.as_of >= batch.created_at:
        store.put(answers.pop(0), existing.data, content_type=_JSON)
    for answer in answers:
        beside = _read(store, answer)
        if beside is not None and beside.found.as_of < batch.created_at:
            store.delete(answer)
    for file in (OUTPUT, ERRORS, MANIFEST):
        store.delete(keys.outbox(batch.customer, folder, file))


def _copy_files(batch: Batch, folder: str, store: ObjectStore) -> None:
    """Make the folder hold exactly the batch's final files. Killed half-way, no status names them yet."""
    for source, file in ((batch.output_key, OUTPUT), (batch.error_key, ERRORS), (batch.manifest_key, MANIFEST)):
        target = keys.outbox(batch.customer, folder, file)
        if source is None:
            store.delete(target)
            continue
        info = store.head(source)
        if info is None:
            raise ObjectMissing(f"delivering {batch.batch_id}: its file {source} is gone")
        store.copy(info, target)


def _restore(batch: Batch, ledger: Ledger, store: ObjectStore) -> None:
    """Put back the files of a newer batch that took the folder, and ended, while we were writing to it.

    (Killed just before, they are not put back: manifest.json says which batch it is of, so that this can be told.)
    """
    newest = ledger.batches.newest_named(batch.customer, batch.name)
    while newest is not None and newest.status.is_final:
        _copy_files(newest, newest.name, store)
        restored, newest = newest, ledger.batches.newest_named(batch.customer, batch.name)
        if newest is None or newest.batch_id == restored.batch_id:
            return


def _write(document: StatusDocument, folder: str, existing: _Existing | None, store: ObjectStore) -> bool:
    """Write a status over the one that was read; False where somebody else wrote one meanwhile."""
    return _put(store, keys.outbox(document.customer, folder, STATUS), _encode(document), existing)


def _put(store: ObjectStore, key: str, data: bytes, existing: _Existing | None) -> bool:
    try:
        if existing is None:
            store.put(key, data, if_absent=True, content_type=_JSON)
        else:
            store.put(key, data, if_match=existing.etag, content_type=_JSON)
    except (PreconditionFailed, ObjectMissing):
        return False
    return True


def _read(store: ObjectStore, key: str) -> _Existing | None:
    try:
        data, etag = store.get_with_etag(key)
    except ObjectMissing:
        return None
    try:
        found = msgspec.json.decode(data, type=_Found)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Not one of ours: it counts as older than anything.
        found = _Found()
    return _Existing(found, data, etag)


def _encode(document: StatusDocument | Rejection | CancelAnswer) -> bytes:
    return msgspec.json.format(_encoder.encode(document), indent=2) + b"\n"


def _word(document: StatusDocument) -> str:
    """What the ledger notes of a published status: another word means that the outbox is behind."""
    if document.is_final:
        return SHOWN_END
    # Whether there is an estimate and a warning; what they are changes all the time.
    marks = f"{'e' if document.estimated_finish_at is not None else ''}{'w' if document.warning is not None else ''}"
    return f"{document.revision}.{document.progress}{marks} {document.reason or ''}"


__all__ = [
    "CancelAnswer",
    "Published",
    "Rejection",
    "StatusDocument",
    "answer_cancel",
    "answer_rejected",
    "batch_object",
    "current_status",
    "deliver",
    "files_of",
    "publish_due",
    "publish_status",
    "read_cancel_answer",
    "withdraw",
]
