"""The drop folder on the real S3 server and both databases: each file becomes one batch, whatever happens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from batch_pipeline import ids
from batch_pipeline.errors import StoreError
from batch_pipeline.intake import drop, ops
from batch_pipeline.intake.drop import Taken
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import BatchStatus, OnInvalid
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectInfo, ObjectStore, keys
from tests.fakes.faults import Faults, Killed
from tests.fakes.intake_files import file_of, request_line

MOST_CALLS = 60
DATA = file_of([request_line(1), request_line(2)])


Put = Callable[..., None]


@pytest.fixture
def put(store: ObjectStore, tmp_path: Path) -> Put:
    """Drops a file as a customer does; options are its metadata, with `_` for `-`."""

    def drop_file(key: str, data: bytes = DATA, **options: str) -> None:
        file = tmp_path / "dropped"
        file.write_bytes(data)
        store.upload(file, key, {name.replace("_", "-"): value for name, value in options.items()})

    return drop_file


def take(ledger: Ledger, store: ObjectStore, settings: Settings, limit: int = 50) -> list[Taken]:
    """One tick."""
    return drop.take_drops(ledger=ledger, store=store, settings=settings, limit=limit, chance=random.Random(3))


def inbox(store: ObjectStore) -> list[str]:
    """The keys that lie in the inbox."""
    return sorted(info.key for info in store.list(keys.INBOX))


def status_of(store: ObjectStore, customer: str, folder: str) -> dict[str, Any]:
    """What a customer reads."""
    found: dict[str, Any] = json.loads(store.get(keys.outbox(customer, folder, "status.json")))
    return found


def test_a_dropped_file_becomes_a_batch(ledger: Ledger, store: ObjectStore, settings: Settings, put: Put) -> None:
    put("inbox/acme/night.v2.jsonl")
    (taken,) = take(ledger, store, settings)
    batch = ledger.batches.get(str(taken.batch_id))
    assert (batch.customer, batch.name, batch.door) == ("acme", "night.v2", "drop")
    assert (batch.endpoint, batch.window_seconds) == ("/v1/chat/completions", 86_400)
    assert (batch.on_invalid, batch.status) == (OnInvalid.SKIP, BatchStatus.VALIDATING)
    assert (batch.input_key, batch.input_bytes) == (keys.input_file(batch.batch_id), len(DATA))
    assert store.get(batch.input_key) == DATA
    assert status_of(store, "acme", "night.v2")["status"] == "validating"
    assert inbox(store) == []
    assert take(ledger, store, settings) == []


def test_options_are_metadata(ledger: Ledger, store: ObjectStore, settings: Settings, put: Put) -> None:
    options = {
        "completion_window": "90m",
        "on_invalid": "fail",
        "endpoint": "/v1/embeddings",
        "share_identical": "yes",
    }
    put("inbox/acme/a.jsonl", **options, metadata_team="search", mtime="1700000000.5")
    batch = ledger.batches.get(str(take(ledger, store, settings)[0].batch_id))
    assert (batch.window_seconds, batch.on_invalid, batch.endpoint) == (5400, OnInvalid.FAIL, "/v1/embeddings")
    assert batch.metadata == {"team": "search", "share-identical": "yes"}


@pytest.mark.parametrize(
    "case",
    [
        ({"completion_window": "soon"}, "completion window"),
        ({"completion_window": "1m"}, "completion window"),
        ({"completion_window": "8d"}, "completion window"),
        ({"on_invalid": "ignore"}, "on-invalid"),
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"share_identical": "maybe"}, "share-identical"),
        ({"complection_window": "24h"}, "complection-window"),
        ({"metadata_x": "y" * 600}, "metadata x"),
    ],
)
def test_a_bad_option_is_answered_by_name(
    ledger: Ledger, store: ObjectStore, settings: Settings, put: Put, case: tuple[dict[str, str], str]
) -> None:
    options, named = case
    put("inbox/acme/a.jsonl", **options)
    (taken,) = take(ledger, store, settings)
    assert (taken.batch_id, taken.code) == (None, "invalid_option")
    answer = status_of(store, "acme", "a")
    assert answer["status"] == "failed"
    (error,) = answer["errors"]["data"]
    assert (error["code"], error["line"], named in error["message"]) == ("invalid_option", None, True)
    assert inbox(store) == []
    assert _kept(store) == [("inbox/acme/a.jsonl", DATA)]


def _kept(store: ObjectStore) -> list[tuple[str, bytes]]:
    """Where rejected files lay, and their bytes."""
    listed = [info.key for info in store.list(keys.REJECTED)]
    reasons = [key for key in listed if key.endswith("/reason.json")]
    assert len(listed) == 2 * len(reasons)
    return sorted(
        (json.loads(store.get(key))["key"], store.get(key.replace("reason.json", "object"))) for key in reasons
    )


def test_files_that_cannot_be_taken_are_moved_away_and_answered_where_it_is_safe(
    ledger: Ledger, store: ObjectStore, settings: Settings, put: Put
) -> None:
    small = msgspec.structs.replace(settings, intake=msgspec.structs.replace(settings.intake, max_file_bytes=400))
    bad = {
        "inbox/acme/notes.txt": "invalid_name",
        "inbox/acme/.hidden.jsonl": "invalid_name",
        "inbox/acme/name with blanks & more.jsonl": "invalid_name",
        "inbox/acme/folder/a.jsonl": "invalid_name",
        "inbox/acme/large.jsonl": "file_too_large",
        "inbox/Not A Customer/a.jsonl": "invalid_name",
        "inbox/a.jsonl": "invalid_name",
    }
    for key, code in bad.items():
        put(key, DATA * 3 if code == "file_too_large" else b"x")
    store.put("inbox/acme/", b"")
    put("inbox/acme/good.jsonl")

    taken = take(ledger, store, small)

    assert {entry.key: entry.code for entry in taken} == {**bad, "inbox/acme/good.jsonl": None}
    assert inbox(store) == ["inbox/acme/"]
    assert [key for key, _ in _kept(store)] == sorted(bad)
    answered = {info.key.split("/")[1] for info in store.list(keys.OUTBOX)}
    assert answered == {"acme"}
    assert status_of(store, "acme", "notes.txt")["errors"]["data"][0]["code"] == "invalid_name"
    assert status_of(store, "acme", "large")["errors"]["data"][0]["code"] == "file_too_large"
    folders = {info.key.split("/")[2] for info in store.list(keys.OUTBOX)}
    assert all(ids.NAME_PATTERN.fullmatch(folder) for folder in folders)
    assert len(folders) == 6
    assert take(ledger, store, small) == []


def test_an_empty_file_is_a_batch_that_fails(
    ledger: Ledger, store: ObjectStore, settings: Settings, tmp_path: Path, put: Put
) -> None:
    own = msgspec.structs.replace(settings.intake, scratch_dir=str(tmp_path / "scratch"))
    settings = msgspec.structs.replace(settings, intake=own)
    put("inbox/acme/empty.jsonl", b"")
    batch_id = str(take(ledger, store, settings)[0].batch_id)
    ops.validate(batch_id, ledger=ledger, store=store, settings=settings)
    result = ops.write_chunks(batch_id, ledger=ledger, store=store, settings=settings)
    assert [error.code for error in result.errors] == ["empty_batch"]
    assert ledger.batches.get(batch_id).outcome == BatchStatus.FAILED


@pytest.mark.parametrize("how", [(".jsonl", 1, False), (".jsonl", 1, True), (".txt", 0, False), (".txt", 0, True)])
def test_killed_between_any_two_steps_loses_and_doubles_nothing(
    ledger: Ledger, store: ObjectStore, settings: Settings, put: Put, how: tuple[str, int, bool]
) -> None:
    extension, batches, reply_lost = how
    # Each round has a name of its own in one folder: the calls of a tick do not grow with the rounds.
    for call in range(MOST_CALLS):
        name = f"file-{call}"
        put(f"inbox/acme/{name}{extension}")
        faults = Faults(at_call=call, after=reply_lost)
        try:
            take(faults.around(ledger), faults.around(store), settings)
        except Killed:
            take(ledger, store, settings)
        else:
            break
        made = [batch for batch in ledger.batches.recent() if batch.name == name]
        assert len(made) == batches, call
        assert inbox(store) == []
        assert all(store.get(batch.input_key) == DATA for batch in made)
        folder = name if batches else f"{name}{extension}"
        assert len(list(store.list(keys.outbox("acme", folder, "")))) == 1, call
    else:
        pytest.fail("the calls of a tick have no end")
    assert call >= 8
    assert len(list(store.list(keys.BATCHES))) == batches * (call + 1)


class _Meddling:
    """A store at whose `operation` somebody else does something first."""

    def __init__(self, store: ObjectStore, operation: str, meddle: Callable[[], None]) -> None:
        self._store = store
        self._operation = operation
        self._meddle = meddle

    def __getattr__(self, name: str) -> Any:
        if name == self._operation:
            self._operation = ""
            self._meddle()
        return getattr(self._store, name)


def meddling(store: ObjectStore, operation: str, meddle: Callable[[], None]) -> ObjectStore:
    """The store, with somebody else at work."""
    return cast("ObjectStore", _Meddling(store, operation, meddle))


def test_a_file_that_is_overwritten_while_it_is_taken_is_taken_as_it_is_then(
    ledger: Ledger, store: ObjectStore, settings: Settings, put: Put
) -> None:
    """Fault 18, and the time before it."""
    newer = DATA + DATA
    for operation, expected in (("copy", [newer]), ("delete", [DATA, newer])):
        customer = f"at-{operation}"
        key = f"inbox/{customer}/a.jsonl"
        put(key)
        meddled = meddling(store, operation, partial(put, key, newer))
        take(ledger, meddled, settings)
        take(ledger, store, settings)
        made = ledger.batches.recent(customer=customer)
        assert sorted(store.get(batch.input_key) for batch in made) == expected
        assert inbox(store) == []


def test_a_file_that_is_deleted_while_it_is_taken_is_no_batch(
    ledger: Ledger, store: ObjectStore, settings: Settings, put: Put
) -> None:
    put("inbox/acme/a.jsonl")
    meddled = meddling(store, "copy", lambda: store.delete("inbox/acme/a.jsonl"))
    assert take(ledger, meddled, settings) == []
    assert ledger.batches.recent() == []


def test_the_same_name_dropped_again_is_a_new_batch(
    ledger: Ledger, store: ObjectStore, settings: Settings, put: Put
) -> None:
    for data in (DATA, DATA + b"\n"):
        put("inbox/acme/a.jsonl", data)
        take(ledger, store, settings)
    first, second = sorted(ledger.batches.recent(), key=lambda batch: batch.input_bytes)
    assert (store.get(first.input_key), store.get(second.input_key)) == (DATA, DATA + b"\n")


def test_many_files_of_one_customer_keep_nobody_waiting(
    ledger: Ledger, store: ObjectStore, settings: Settings, put: Put
) -> None:
    for number in range(30):
        store.put(f"inbox/busy/{number:04d}.jsonl", DATA)
    store.put("inbox/quiet/one.jsonl", DATA)
    store.put("inbox/other/one.jsonl", DATA)
    taken = take(ledger, store, settings, limit=10)
    assert len(taken) == 10
    assert {entry.key.split("/")[1] for entry in taken} == {"busy", "quiet", "other"}
    assert len(inbox(store)) == 22
    rest = [entry for _ in range(3) for entry in take(ledger, store, settings, limit=10)]
    assert len(rest) == 22
    assert len(ledger.batches.recent(customer="busy")) == 30


def test_a_file_at_which_the_store_fails_holds_up_no_other(
    ledger: Ledger, store: ObjectStore, settings: Settings, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [f"inbox/acme/a{number}.jsonl" for number in range(5)]
    for key in [*bad, "inbox/acme/b.jsonl", "inbox/acme/c.jsonl"]:
        put(key)
    copy = store.copy

    def failing(source: ObjectInfo, target: str) -> None:
        if source.key in bad:
            raise StoreError("copying: the object store answered 500")
        copy(source, target)

    monkeypatch.setattr(store, "copy", failing)
    assert [entry.key for entry in take(ledger, store, settings)] == ["inbox/acme/b.jsonl", "inbox/acme/c.jsonl"]
    monkeypatch.undo()
    assert [entry.key for entry in take(ledger, store, settings)] == bad


def test_a_store_that_goes_away_meanwhile_ends_the_call(
    ledger: Ledger, store: ObjectStore, settings: Settings, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys_dropped = [f"inbox/acme/{number}.jsonl" for number in range(3)]
    for key in keys_dropped:
        put(key)
    list_folders, looked_at = store.list_folders, []

    def away(key: str) -> None:
        looked_at.append(key)
        raise StoreError("the object store cannot be reached")

    monkeypatch.setattr(store, "head", away)
    monkeypatch.setattr(store, "list_folders", lambda prefix: away(prefix) if looked_at else list_folders(prefix))
    with pytest.raises(StoreError, match="cannot be reached"):
        take(ledger, store, settings)
    assert looked_at == [keys_dropped[0], "inbox/"]
    monkeypatch.undo()
    assert [entry.key for entry in take(ledger, store, settings)] == keys_dropped
