"""Cancel by drop on the real S3 server: NAME.cancel cancels the newest batch of that name, and nothing else."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from batch_pipeline.intake import drop
from batch_pipeline.intake.drop import Taken
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import BatchStatus, LeaseRef
from batch_pipeline.results import merge, outbox, verify
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectInfo, ObjectStore, keys
from tests.fakes import answered
from tests.fakes.faults import Faults, Killed
from tests.fakes.intake_files import file_of, request_line

DATA = file_of([request_line(1), request_line(2)])
FILE, CANCEL = "inbox/acme/questions.jsonl", "inbox/acme/questions.cancel"
MOST_CALLS = 60


@pytest.fixture
def ledger(sqlite_url: str) -> Ledger:
    """What a cancel does in the ledger is tested on both databases elsewhere."""
    return Ledger.open(sqlite_url)


class Dated(ObjectStore):
    """The store, as if objects of the inbox had been written at other times."""

    def __init__(self, store: ObjectStore, times: dict[str, float]) -> None:
        super().__init__(store._client, store.bucket)
        self._times = times

    def head(self, key: str) -> ObjectInfo | None:
        info = super().head(key)
        return info if info is None or key not in self._times else info._replace(modified_at=self._times[key])


def take(ledger: Ledger, store: ObjectStore, settings: Settings, chance: int = 3) -> list[Taken]:
    """One tick."""
    return drop.take_drops(ledger=ledger, store=store, settings=settings, limit=50, chance=random.Random(chance))


def read(store: ObjectStore, file: str, name: str = "questions") -> dict[str, Any]:
    """What a customer reads."""
    found: dict[str, Any] = json.loads(store.get(keys.outbox("acme", name, file)))
    return found


def inbox(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list(keys.INBOX)]


def ended(ledger: Ledger, store: ObjectStore, settings: Settings) -> str:
    """A batch of that name that has completed and was delivered."""
    batch, leases = answered.in_progress(ledger, store, [[0, 1]])
    answered.commit_all(ledger, store, leases, [[0, 1]])
    merge.merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    outbox.deliver(batch.batch_id, ledger=ledger, store=store, settings=settings)
    return batch.batch_id


def test_a_running_batch_is_cancelled_and_what_is_finished_is_returned(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    chunks = [[0, 1], [2, 3], [4, 5]]
    batch, leases = answered.in_progress(ledger, store, chunks)
    answered.commit_all(ledger, store, {0: leases[0]}, chunks)
    store.put(CANCEL, b"please stop")
    assert take(ledger, store, settings) == [Taken(CANCEL, batch.batch_id)]
    assert inbox(store) == []
    assert read(store, "status.json")["status"] == "cancelling"
    for number in (1, 2):
        ledger.chunks.release(leases[number].ref, "its batch was cancelled")
    merge.merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    outbox.deliver(batch.batch_id, ledger=ledger, store=store, settings=settings)
    assert read(store, "status.json")["counts"]["cancelled"] == 4
    assert len(store.get(keys.outbox("acme", "questions", "output.jsonl")).splitlines()) == 2
    assert verify.verify(batch.batch_id, ledger=ledger, store=store).problems == []


def test_a_cancel_twice_is_one_cancel(ledger: Ledger, store: ObjectStore, settings: Settings) -> None:
    batch, _ = answered.in_progress(ledger, store, [[0]])
    for _ in range(2):
        store.put(CANCEL, b"")
        assert take(ledger, store, settings) == [Taken(CANCEL, batch.batch_id)]
    assert [event.event for event in ledger.events.of(batch.batch_id)].count("cancelling") == 1
    assert store.head(keys.outbox("acme", "questions", "cancel.json")) is None


def test_a_cancel_after_the_end_says_so_and_leaves_the_results_alone(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    batch_id = ended(ledger, store, settings)
    before = {info.key: store.get(info.key) for info in store.list("outbox/")}
    store.put(CANCEL, b"")
    assert take(ledger, store, settings) == [Taken(CANCEL, batch_id, "invalid_state")]
    assert inbox(store) == []
    answer = read(store, "cancel.json")
    assert (answer["batch_id"], answer["status"], answer["code"]) == (batch_id, "completed", "invalid_state")
    assert "completed already" in answer["message"]
    assert {key: store.get(key) for key in before} == before


def test_a_cancel_while_the_results_are_merged_says_that_it_is_too_late(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    """Fault 5."""
    batch, leases = answered.in_progress(ledger, store, [[0]])
    answered.commit_all(ledger, store, leases, [[0]])
    store.put(CANCEL, b"")
    assert take(ledger, store, settings) == [Taken(CANCEL, batch.batch_id, "invalid_state")]
    assert "too late" in read(store, "cancel.json")["message"]
    merge.merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    assert ledger.batches.get(batch.batch_id).status == BatchStatus.COMPLETED


def test_an_unknown_name_is_answered_and_a_bad_one_rejected(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    other, _ = answered.in_progress(ledger, store, [[0]])
    store.put("inbox/rival/questions.cancel", b"")
    store.put("inbox/acme/.cancel", b"")
    found = {entry.key: (entry.batch_id, entry.code) for entry in take(ledger, store, settings)}
    assert found == {
        "inbox/rival/questions.cancel": (None, "not_found"),
        "inbox/acme/.cancel": (None, "invalid_name"),
    }
    assert json.loads(store.get("outbox/rival/questions/cancel.json"))["batch_id"] is None
    assert inbox(store) == []
    assert ledger.batches.get(other.batch_id).status == BatchStatus.IN_PROGRESS


@pytest.mark.parametrize("case", [*itertools.product(("cancel", "jsonl"), (False, True))])
def test_a_file_and_its_cancel_together_end_as_cancelled_whichever_is_listed_first(
    ledger: Ledger,
    store: ObjectStore,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[str, bool],
) -> None:
    first, with_an_earlier_batch = case
    if with_an_earlier_batch:
        ended(ledger, store, settings)
    store.put(FILE, DATA)
    store.put(CANCEL, b"")
    _list_first(store, monkeypatch, first)
    cancelled = {entry.batch_id for entry in take(ledger, store, settings)}
    assert inbox(store) == []
    (batch_id,) = cancelled
    batch = ledger.batches.get(str(batch_id))
    assert (batch.status, batch.outcome) == (BatchStatus.CANCELLING, BatchStatus.CANCELLED)
    assert read(store, "status.json")["status"] == "cancelling"


@pytest.mark.parametrize("first", ["cancel", "jsonl"])
def test_a_file_that_came_after_the_cancel_runs_and_the_batch_before_it_is_cancelled(
    ledger: Ledger, store: ObjectStore, settings: Settings, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    running, _ = answered.in_progress(ledger, store, [[0]])
    store.put(FILE, DATA)
    store.put(CANCEL, b"")
    dated = Dated(store, {CANCEL: 1000.0, FILE: 1001.0})
    _list_first(dated, monkeypatch, first)
    taken = {entry.key: entry.batch_id for entry in take(ledger, dated, settings)}
    # (Removing them asks for the time as well.)
    assert inbox(store) == []
    assert ledger.batches.get(running.batch_id).outcome == BatchStatus.CANCELLED
    assert taken[CANCEL] == running.batch_id
    assert ledger.batches.get(str(taken[FILE])).status == BatchStatus.VALIDATING


def _list_first(store: ObjectStore, monkeypatch: pytest.MonkeyPatch, extension: str) -> None:
    listed = store.list

    def ordered(prefix: str, page: int = 1000, *, recursive: bool = True) -> Any:
        found = listed(prefix, page, recursive=recursive)
        return iter(sorted(found, key=lambda info: not info.key.endswith(extension)))

    monkeypatch.setattr(store, "list", ordered)


@pytest.mark.parametrize("case", ["running", "ended", "with its file", "before a file"])
def test_killed_anywhere_a_cancel_is_carried_out_once_and_answered(
    ledger: Ledger, store: ObjectStore, settings: Settings, case: str
) -> None:
    """Between two calls the batch may even end: the file that came later is still not the one that is cancelled."""
    for call in range(MOST_CALLS):
        for info in store.list(keys.OUTBOX):
            store.delete(info.key)
        one = ended(ledger, store, settings) if case == "ended" else None
        if case in ("running", "before a file"):
            one = answered.in_progress(ledger, store, [[0]])[0].batch_id
        if case in ("with its file", "before a file"):
            store.put(FILE, DATA + b"\n" * call)
        store.put(CANCEL, b"")
        seen = store if case != "before a file" else Dated(store, {CANCEL: 1000.0 + call, FILE: 1000.5 + call})
        faults = Faults(call)
        try:
            drop.take_drops(
                ledger=faults.around(ledger),
                store=faults.around(seen),
                settings=settings,
                limit=50,
                chance=random.Random(3),
            )
        except Killed:
            if case == "before a file" and ledger.batches.get(str(one)).outcome == BatchStatus.CANCELLED:
                _finish(ledger, store, settings, str(one))
            take(ledger, seen, settings)
            dead = True
        else:
            dead = False
        assert inbox(store) == []
        newest = ledger.batches.newest_named("acme", "questions")
        assert newest is not None
        if case == "ended":
            assert (newest.batch_id, newest.status) == (one, BatchStatus.COMPLETED)
            assert read(store, "cancel.json")["batch_id"] == one
        elif case == "before a file":
            assert ledger.batches.get(str(one)).outcome == BatchStatus.CANCELLED
            assert (newest.status, newest.batch_id == one) == (BatchStatus.VALIDATING, False)
        else:
            assert newest.outcome == BatchStatus.CANCELLED
            assert read(store, "status.json")["status"] == newest.status
            assert one is None or newest.batch_id == one
        if not dead:
            return
    raise AssertionError("it takes more calls than this test makes")


def _finish(ledger: Ledger, store: ObjectStore, settings: Settings, batch_id: str) -> None:
    for chunk in ledger.chunks.of(batch_id):
        if chunk.state == "leased":
            ledger.chunks.release(LeaseRef(batch_id, chunk.chunk, chunk.token), "cancelled")
    merge.merge(batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
