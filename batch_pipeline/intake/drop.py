"""The drop folder: takes the files that customers have put there, and makes a batch of each (docs/architecture.md).

    inbox/CUSTOMER/NAME.jsonl ──HEAD──> copy to batches/BATCH/input.jsonl ──> ledger: create ──> status.json ──> delete
                                └─ cannot be taken ──> copy to rejected/DROP/ ──> reason.json ──> answer ──> delete

A drop is known by its key, etag and time; its batch's id is made from these, so that taking it again after a crash
between any two steps makes the same batch, and each step finds what the last one left. The copy is conditional on the
etag: a file that was overwritten since it was looked at waits for the next tick. So is the removal, in stores that
know conditional deletes (S3 and SeaweedFS do); in one that does not, a file that is overwritten in the instant
between the last look and the removal would be lost. The same bytes dropped again under the same name within the same
second are the same drop.

Left alone: folder markers (`.../`) and `.cancel` objects. Anything else that is no `CUSTOMER/NAME.jsonl` is moved
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
from typing import NamedTuple

import msgspec

from batch_pipeline import ids
from batch_pipeline.errors import CustomerError, StoreError
from batch_pipeline.intake.options import Options, choose
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Door, NewBatch
from batch_pipeline.results import outbox
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectInfo, ObjectMissing, ObjectStore, PreconditionFailed, keys
from batch_pipeline.wire import codes

ACTOR = "drop folder"
_EXTENSION = ".jsonl"
_LEFT_ALONE = ("/", ".cancel")
_METADATA_PREFIX = "metadata-"
_OPTIONS = ("completion-window", "on-invalid", "endpoint")
_TOOLS_OWN = frozenset({"mtime", "md5chksum", "s3cmd-attrs", "src_last_modified_millis"})
"""Metadata that upload tools add by themselves."""
_MOST_FAILURES = 3
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")

_log = logging.getLogger(__name__)


class Taken(NamedTuple):
    """A dropped file that is dealt with: it became a batch, or was rejected with an error code."""

    key: str
    batch_id: str | None
    code: str | None = None


class _Reason(msgspec.Struct, frozen=True):
    """reason.json: what operators find beside a file that could not be taken."""

    key: str
    code: str
    message: str
    etag: str
    metadata: dict[str, str]


class _Drop(NamedTuple):
    """A dropped file: the name that its key gives it, and what a HEAD tells."""

    customer: str
    name: str
    info: ObjectInfo

    @property
    def creation_key(self) -> str:
        """The same for the same bytes dropped by the same upload, another for every other."""
        return f"drop:{self.customer}/{self.name}:{self.info.etag}:{self.info.modified_at}"


def take_drops(
    *, ledger: Ledger, store: ObjectStore, settings: Settings, limit: int, chance: random.Random | None = None
) -> list[Taken]:
    """Deal with up to `limit` dropped files, one of each customer in turn, beginning with a customer by `chance`.

    Killed at any point: what was begun is finished by the next call, nothing is lost and nothing taken twice. A file
    at which the store fails is logged and left for the next call, so that it holds up no other; after a few of them
    this call ends. Raises StoreError where the inbox cannot be listed.
    """
    taken: list[Taken] = []
    failures = 0
    for listed in _in_turn(store, limit, chance or random.SystemRandom()):
        try:
            done = _deal_with(listed.key, ledger=ledger, store=store, settings=settings)
        except StoreError:
            _log.exception("%s is left for later", listed.key)
            failures += 1
            if failures == _MOST_FAILURES:
                break
            continue
        if done is not None:
            taken.append(done)
            if len(taken) >= limit:
                break
    return taken


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


def _deal_with(key: str, *, ledger: Ledger, store: ObjectStore, settings: Settings) -> Taken | None:
    """Take or reject one file; None where it is gone, or has been overwritten while it was looked at."""
    info = store.head(key)
    if info is None:
        return None
    folder, _, file = key.removeprefix(keys.INBOX).partition("/")
    drop = _Drop(folder, file.removesuffix(_EXTENSION), info)
    try:
        try:
            options = _check(drop, file, settings)
        except CustomerError as error:
            return _reject(drop, error, store)
        return _take(drop, options, ledger=ledger, store=store, settings=settings)
    except (PreconditionFailed, ObjectMissing):
        _log.info("%s was changed while it was taken; it is looked at again", key)
        return None


def _check(drop: _Drop, file: str, settings: Settings) -> Options:
    """Return the drop's options. Raises CustomerError where it cannot be taken."""
    if not ids.CUSTOMER_PATTERN.fullmatch(drop.customer) or not file:
        raise CustomerError(
            codes.INVALID_NAME,
            "files belong into a folder of their customer, inbox/CUSTOMER/NAME.jsonl; a customer's name has 1 to 64 "
            "lower-case letters, digits, '-' and '_', with a letter or digit at both ends",
        )
    if not file.endswith(_EXTENSION):
        mend = f"drop it under a name that ends in {_EXTENSION}"
        raise CustomerError(codes.INVALID_NAME, f"only files of JSON lines are taken; {mend}")
    if not ids.NAME_PATTERN.fullmatch(drop.name):
        raise CustomerError(
            codes.INVALID_NAME,
            "a file's name has 1 to 200 letters, digits, '.', '_' and '-' before .jsonl, starts with a letter or "
            "digit, does not end with a dot, and lies directly in its customer's folder; drop it under another name",
        )
    if drop.info.size > settings.intake.max_file_bytes:
        raise CustomerError(
            codes.FILE_TOO_LARGE,
            f"the file has {drop.info.size} bytes, and at most {settings.intake.max_file_bytes} are taken; divide it",
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
        metadata=own,
    )


def _take(drop: _Drop, options: Options, *, ledger: Ledger, store: ObjectStore, settings: Settings) -> Taken:
    """Make a batch of a drop. Killed between any two steps, the next call goes on with the same batch."""
    batch = ledger.batches.by_creation_key(drop.creation_key)
    if batch is None:
        batch_id = ids.batch_id_from(drop.creation_key)
        input_key = keys.input_file(batch_id)
        copied = _copy_once(drop.info, input_key, store)
        batch = ledger.batches.create(
            NewBatch(
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
            ),
            actor=ACTOR,
        )
    outbox.publish_status(batch.batch_id, ledger=ledger, store=store, settings=settings)
    _remove(drop.info, store)
    return Taken(drop.info.key, batch.batch_id)


def _reject(drop: _Drop, error: CustomerError, store: ObjectStore) -> Taken:
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
    _remove(info, store)
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


def _remove(info: ObjectInfo, store: ObjectStore) -> None:
    """Remove the object from the inbox if it is still the one that was dealt with; a newer one stays for its own
    turn.
    """
    now = store.head(info.key)
    if now is None or (now.etag, now.modified_at) != (info.etag, info.modified_at):
        return
    try:
        store.delete(info.key, if_match=info.etag)
    except PreconditionFailed:
        _log.info("%s was overwritten when its predecessor was taken; it is taken next", info.key)
