"""The drop folder: takes the files that customers have put there, and makes a batch of each (docs/architecture.md).

    inbox/CUSTOMER/NAME.jsonl ──HEAD──> copy to batches/BATCH/input.jsonl ──> ledger: create ──> status.json ──> delete
                                └─ cannot be taken ──> copy to rejected/DROP/ ──> reason.json ──> answer ──> delete

A drop is known by its key, etag and time; its batch's id is made from these, so that taking it again after a crash
between any two steps makes the same batch, and each step finds what the last one left. The copy is conditional on the
etag: a file that was overwritten since it was looked at waits for the next tick. So is the removal, in stores that
know conditional deletes (S3 and SeaweedFS do); in one that does not, a file that is overwritten in the instant
between the last look and the removal would be lost. The same bytes dropped again under the same name within the same
second are the same drop.

An object NAME.cancel cancels the newest batch of that name (`drop_cancel`). Whichever of NAME.jsonl and NAME.cancel is
listed first: a file that was there when the cancel came is taken and then cancelled; one that came after it is
cancelled only where there is no other batch that the cancel can be about.

Left alone: folder markers (`.../`). Anything else that is no `CUSTOMER/NAME.jsonl` is moved
away with its reason, so that nothing is looked at twice; it is answered in the outbox where the customer's folder is
a customer's.
"""

from __future__ import annotations

import hashlib
import logging
import random
import re
from collections import deque
from collections.abc import Iterator

import msgspec

from batch_pipeline import ids
from batch_pipeline.errors import CustomerError, StoreError
from batch_pipeline.intake import drop_cancel
from batch_pipeline.intake.drop_inbox import ACTOR, CANCEL, FILE, Drop, Taken, drop_of, remove
from batch_pipeline.intake.options import SHARE_IDENTICAL, Options, choose
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, Door, NewBatch
from batch_pipeline.results import outbox
from batch_pipeline.settings import Settings, limited
from batch_pipeline.store import ObjectInfo, ObjectMissing, ObjectStore, PreconditionFailed, keys
from batch_pipeline.wire import codes

_LEFT_ALONE = "/"
_METADATA_PREFIX = "metadata-"
_OPTIONS = ("completion-window", "on-invalid", "endpoint", SHARE_IDENTICAL)
_TOOLS_OWN = frozenset({"mtime", "md5chksum", "s3cmd-attrs", "src_last_modified_millis"})
"""Metadata that upload tools add by themselves."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")

_log = logging.getLogger(__name__)


class _Reason(msgspec.Struct, frozen=True):
    """reason.json: what operators find beside a file that could not be taken."""

    key: str
    code: str
    message: str
    etag: str
    metadata: dict[str, str]


def take_drops(
    *, ledger: Ledger, store: ObjectStore, settings: Settings, limit: int, chance: random.Random | None = None
) -> list[Taken]:
    """Deal with up to `limit` dropped files, one of each customer in turn, beginning with a customer by `chance`.

    Killed at any point: what was begun is finished by the next call, nothing is lost and nothing taken twice. A file
    at which the store fails is logged and left for the next call, so that it holds up no other. Raises StoreError where
    the inbox cannot be listed, at the beginning or after such a failure.
    """
    taken: list[Taken] = []
    failures = 0
    for listed in _in_turn(store, limit, chance or random.SystemRandom()):
        try:
            done = _deal_with(listed.key, ledger=ledger, store=store, settings=settings)
        except StoreError:
            _log.exception("%r is left for later", listed.key)
            failures += 1
            # Is it that file, or the store? While that is away there is no use in going on.
            next(store.list_folders(keys.INBOX), None)
        else:
            taken += done
        if max(len(taken), failures) >= limit:
            break
    return taken


def awaited_ids(store: ObjectStore, most: int) -> set[str] | None:
    """Return the ids of the batches that the files in the inbox will become, whatever was copied for them already.

    None where there are more than `most` files. Raises StoreError.
    """
    awaited: set[str] = set()
    for count, listed in enumerate(store.list(keys.INBOX), start=1):
        if count > most:
            return None
        info = store.head(listed.key)
        if info is not None:
            awaited.add(drop_of(info).batch_id)
    return awaited


def _in_turn(store: ObjectStore, limit: int, chance: random.Random) -> Iterator[ObjectInfo]:
    """Yield what lies in the inbox, one object of each folder in turn. Memory: a page of keys for each folder."""
    folders = [*store.list_folders(keys.INBOX)]
    chance.shuffle(folders)
    # What lies in no folder is a folder of its own here.
    beside = store.list(keys.INBOX, page=limit + 1, recursive=False)
    queue = deque([beside, *(store.list(folder, page=limit + 1) for folder in folders)])
    while queue:
        objects = queue.popleft()
        found = next((info for info in objects if not info.key.endswith(_LEFT_ALONE)), None)
        if found is not None:
            yield found
            queue.append(objects)


def _deal_with(key: str, *, ledger: Ledger, store: ObjectStore, settings: Settings) -> list[Taken]:
    """Deal with one object; nothing where it is gone, or has been overwritten while it was looked at."""
    info = store.head(key)
    if info is None:
        return []
    drop = drop_of(info)
    if key.endswith(CANCEL) and drop.has_good_name:
        return _cancel(drop, ledger=ledger, store=store, settings=settings)
    done = []
    if key.endswith(FILE) and drop.has_good_name:
        done = _cancel_before(drop, ledger=ledger, store=store, settings=settings)
    taken = _take_or_reject(drop, ledger=ledger, store=store, settings=settings)
    return done if taken is None else [*done, taken]


def _cancel(cancel: Drop, *, ledger: Ledger, store: ObjectStore, settings: Settings) -> list[Taken]:
    """Carry out a cancel; first take the file of its name, where that lies in the inbox and is what it is about."""
    batch = ledger.batches.newest_named(cancel.customer, cancel.name)
    file = store.head(keys.inbox(cancel.customer, cancel.name))
    done = []
    if file is not None and not _is_after(file, cancel, batch, ledger=ledger, store=store):
        taken = _take_or_reject(drop_of(file), ledger=ledger, store=store, settings=settings)
        if taken is None:
            # It has been changed meanwhile: both are looked at again.
            return []
        done.append(taken)
        batch = None if taken.batch_id is None else ledger.batches.get(taken.batch_id)
    return [*done, drop_cancel.carry_out(cancel, batch, ledger=ledger, store=store, settings=settings)]


def _cancel_before(drop: Drop, *, ledger: Ledger, store: ObjectStore, settings: Settings) -> list[Taken]:
    """Carry out a cancel that came before a file of its name and is about the batch before it."""
    info = store.head(keys.inbox_cancel(drop.customer, drop.name))
    if info is None:
        return []
    cancel = drop_of(info)
    batch = ledger.batches.newest_named(drop.customer, drop.name)
    if not _is_after(drop.info, cancel, batch, ledger=ledger, store=store):
        return []
    return [drop_cancel.carry_out(cancel, batch, ledger=ledger, store=store, settings=settings)]


def _is_after(file: ObjectInfo, cancel: Drop, batch: Batch | None, *, ledger: Ledger, store: ObjectStore) -> bool:
    """Whether a file came after a cancel that is about the batch before it."""
    return file.modified_at > cancel.info.modified_at and drop_cancel.is_meant(
        cancel, batch, ledger=ledger, store=store
    )


def _take_or_reject(drop: Drop, *, ledger: Ledger, store: ObjectStore, settings: Settings) -> Taken | None:
    """Make a batch of a file, or move it away with a reason; None where it is gone or has been overwritten."""
    file = drop.info.key.removeprefix(keys.INBOX).partition("/")[2]
    try:
        try:
            options = _check(drop, file, ledger, settings)
            return _take(drop, options, ledger=ledger, store=store, settings=settings)
        except CustomerError as error:
            return _reject(drop, error, store)
    except (PreconditionFailed, ObjectMissing):
        _log.info("%r was changed while it was taken; it is looked at again", drop.info.key)
        return None


def _check(drop: Drop, file: str, ledger: Ledger, settings: Settings) -> Options:
    """Return the drop's options. Raises CustomerError where it cannot be taken."""
    if not ids.CUSTOMER_PATTERN.fullmatch(drop.customer) or not file:
        raise CustomerError(
            codes.INVALID_NAME,
            "files belong into a folder of their customer, inbox/CUSTOMER/NAME.jsonl; a customer's name has 1 to 64 "
            "lower-case letters, digits, '-' and '_', with a letter or digit at both ends",
        )
    if not file.endswith(FILE):
        mend = f"drop it under a name that ends in {FILE}"
        raise CustomerError(codes.INVALID_NAME, f"only files of JSON lines are taken; {mend}")
    if not ids.NAME_PATTERN.fullmatch(drop.name):
        raise CustomerError(
            codes.INVALID_NAME,
            "a file's name has 1 to 200 letters, digits, '.', '_' and '-' before .jsonl, starts with a letter or "
            "digit, does not end with a dot, and lies directly in its customer's folder; drop it under another name",
        )
    limits = limited(settings.intake, ledger.customers.limits_of(drop.customer))
    if drop.info.size > limits.max_file_bytes:
        raise CustomerError(
            codes.FILE_TOO_LARGE,
            f"the file has {drop.info.size} bytes, and at most {limits.max_file_bytes} are taken; divide it",
        )
    return _options(drop.info.metadata, settings)


def _options(metadata: dict[str, str], settings: Settings) -> Options:
    """Return the options in an object's metadata. Raises CustomerError, also for one that is not known."""
    given: dict[str, str] = {}
    own: dict[str, str] = {}
    for name, value in metadata.items():
        option = name.lower()
        if option.startswith(_METADATA_PREFIX):
            own[option.removeprefix(_METADATA_PREFIX)] = value
        elif option in _OPTIONS:
            given[option] = value
        elif option not in _TOOLS_OWN:
            known = ", ".join([*_OPTIONS, f"{_METADATA_PREFIX}..."])
            raise CustomerError(codes.INVALID_OPTION, f"{option[:60]!r} is not an option; the options are {known}")
    return choose(
        settings.intake,
        endpoint=given.get("endpoint"),
        window=given.get("completion-window"),
        on_invalid=given.get("on-invalid"),
        share_identical=given.get(SHARE_IDENTICAL),
        metadata=own,
    )


def _take(drop: Drop, options: Options, *, ledger: Ledger, store: ObjectStore, settings: Settings) -> Taken:
    """Make a batch of a drop. Killed between any two steps, the next call goes on with the same batch.

    Raises LimitReached where the customer has as many open batches as it may have.
    """
    batch = ledger.batches.by_creation_key(drop.creation_key)
    if batch is None:
        batch_id = drop.batch_id
        input_key = keys.input_file(batch_id)
        copied = _copy_once(drop.info, input_key, store)
        new = NewBatch(
            batch_id=batch_id,
            customer=drop.customer,
            name=drop.name,
            door=Door.DROP,
            endpoint=options.endpoint,
            window_seconds=options.window_seconds,
            on_invalid=options.on_invalid,
            creation_key=drop.creation_key,
            input_key=input_key,
            input_bytes=copied.size,
            input_etag=copied.etag,
            metadata=options.metadata,
        )
        # Where this is refused the copy stays, as an upload that never became a batch: another one who takes the same
        # drop at this moment may have made a batch of it, by the same key.
        batch = ledger.batches.create(new, actor=ACTOR)
    outbox.publish_status(batch.batch_id, ledger=ledger, store=store, settings=settings)
    remove(drop.info, store)
    return Taken(drop.info.key, batch.batch_id)


def _reject(drop: Drop, error: CustomerError, store: ObjectStore) -> Taken:
    """Move a file out of the way, keep the reason beside it, and tell its customer where that can be done safely."""
    info = drop.info
    drop_id = hashlib.sha256(f"{info.key}:{info.etag}:{info.modified_at}".encode()).hexdigest()[:32]
    _copy_once(info, keys.rejected(drop_id, "object"), store)
    reason = _Reason(info.key, error.code, error.message, info.etag, info.metadata)
    store.put(keys.rejected(drop_id, "reason.json"), msgspec.json.encode(reason), content_type="application/json")
    if ids.CUSTOMER_PATTERN.fullmatch(drop.customer):
        folder = _answer_folder(drop.name, drop_id)
        outbox.answer_rejected(drop.customer, folder, error.code, error.message, store=store)
    else:
        _log.warning("%r cannot be taken and its customer cannot be told: it is kept as rejected/%s", info.key, drop_id)
    remove(info, store)
    return Taken(info.key, None, error.code)


def _answer_folder(name: str, drop_id: str) -> str:
    """Return the outbox folder of a file that may have any name."""
    if ids.NAME_PATTERN.fullmatch(name):
        return name
    safe = _UNSAFE.sub("_", name)[:100].strip("._-")
    return f"{safe or 'file'}-{drop_id[:8]}"


def _copy_once(info: ObjectInfo, target: str, store: ObjectStore) -> ObjectInfo:
    """Copy the object as it was looked at, unless that was done before; return the copy.

    Raises PreconditionFailed where it has been overwritten, ObjectMissing where it is gone.
    """
    copied = store.head(target)
    if copied is None or copied.size != info.size:
        store.copy(info, target)
        copied = store.head(target)
    if copied is None or copied.size != info.size:
        raise ObjectMissing(f"copying {info.key}: the copy is not there")
    return copied


__all__ = ["Taken", "awaited_ids", "take_drops"]
