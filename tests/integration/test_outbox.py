"""The outbox: a status from the first minute on that never goes backwards, and files that are there before it says."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from batch_pipeline import settings as configuration
from batch_pipeline.errors import NotAllowedInState, StoreError
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, BatchStatus, WorkerState
from batch_pipeline.results import outbox
from batch_pipeline.results.merge import merge
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectInfo, ObjectMissing, ObjectStore, keys
from tests.fakes import answered
from tests.fakes.clock import SteppedClock
from tests.fakes.faults import Faults, Killed

FILES = ("output.jsonl", "errors.jsonl", "manifest.json")
RANK = ["validating", "in_progress", "cancelling", "finalizing", "completed", "cancelled", "expired", "failed"]


def read(store: ObjectStore, folder: str = "questions", customer: str = "acme") -> dict[str, Any]:
    """The status.json of a folder."""
    document: dict[str, Any] = json.loads(store.get(keys.outbox(customer, folder, "status.json")))
    return document


def files(store: ObjectStore, folder: str = "questions") -> dict[str, bytes]:
    """The final files in a folder."""
    found = {}
    for file in FILES:
        key = keys.outbox("acme", folder, file)
        if store.head(key) is not None:
            found[file] = store.get(key)
    return found


def ended(
    ledger: Ledger, store: ObjectStore, settings: Settings, *, refused: tuple[int, ...] = (1,), count: int = 3
) -> Batch:
    """A batch named `questions` whose files have been merged and not delivered."""
    chunk = list(range(count))
    batch, leases = answered.in_progress(ledger, store, [chunk])
    answered.commit_all(ledger, store, leases, [chunk], refused=refused)
    merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    return ledger.batches.get(batch.batch_id)


def publish(batch: Batch, ledger: Ledger, store: ObjectStore, settings: Settings) -> str:
    """Publish as the service does."""
    return outbox.publish_status(batch.batch_id, ledger=ledger, store=store, settings=settings)


def test_status_is_openais_batch_object_from_the_first_minute_to_the_end(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    batch = answered.create(ledger, store, [answered.input_line(index) for index in range(4)] + [b"{"])
    assert publish(batch, ledger, store, settings) == "questions"
    first = read(store)
    assert (first["id"], first["object"], first["status"]) == (batch.batch_id, "batch", "validating")
    assert (first["output_file_id"], first["completed_at"], first["errors"]) == (None, None, None)
    assert (first["completion_window"], first["expires_at"] - first["created_at"]) == ("24h", 86_400)
    assert first["reason"] == "waiting for validation: it is not its turn yet"
    assert first["metadata"] == {"project": "tests"}

    answered.take_in(ledger, store, batch.batch_id, [[0, 1], [2, 3]], invalid=[4])
    leases = answered.lease_all(ledger)
    answered.commit_all(ledger, store, {0: leases[0]}, [[0, 1]], refused=[1])
    publish(batch, ledger, store, settings)
    running = read(store)
    assert running["status"] == "in_progress"
    assert running["request_counts"] == {"total": 5, "completed": 1, "failed": 2}
    assert running["counts"]["invalid"] == 1
    assert "silent" in running["reason"] or "none is running" in running["reason"]
    assert running["estimated_finish_at"] is None, "nobody works on it"
    assert running["model"] == answered.MODEL
    assert running["files"] == {"output": None, "errors": None, "manifest": None}
    assert isinstance(running["created_at"], int)

    answered.commit_all(ledger, store, {1: leases[1]}, [[0, 1], [2, 3]])
    merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    outbox.deliver(batch.batch_id, ledger=ledger, store=store, settings=settings)
    last = read(store)
    assert (last["status"], last["reason"], last["estimated_finish_at"]) == ("completed", None, None)
    assert last["request_counts"] == {"total": 5, "completed": 3, "failed": 2}
    assert last["usage"]["total_tokens"] == last["usage"]["input_tokens"] + last["usage"]["output_tokens"] > 0
    assert last["cost"] == pytest.approx(json.loads(files(store)["manifest.json"])["cost"])
    for file, shown in zip(FILES, ("output", "errors", "manifest"), strict=True):
        assert store.get(last["files"][shown]) == store.get(keys.final(batch.batch_id, file))


def test_waiting_has_a_reason(ledger: Ledger, store: ObjectStore, settings: Settings) -> None:
    """Fault 12: a worker that cannot start is named in the status."""
    batch, leases = answered.in_progress(ledger, store, [[0]])
    ledger.chunks.release(leases[0].ref, "gives way")
    ledger.workers.register("worker-1", answered.MODEL, None, "host")
    ledger.workers.set_state("worker-1", WorkerState.FAILED, "unknown option --dtyp")
    publish(batch, ledger, store, settings)
    assert "worker cannot start: unknown option --dtyp" in read(store)["reason"]


def test_all_failed_has_no_output_file_in_the_outbox(ledger: Ledger, store: ObjectStore, settings: Settings) -> None:
    """Fault 13."""
    batch = ended(ledger, store, settings, refused=(0, 1, 2))
    outbox.deliver(batch.batch_id, ledger=ledger, store=store, settings=settings)
    assert set(files(store)) == {"errors.jsonl", "manifest.json"}
    assert read(store)["files"]["output"] is None
    assert (read(store)["status"], read(store)["output_file_id"]) == ("completed", None)


def test_final_status_is_never_visible_before_the_files(ledger: Ledger, store: ObjectStore, settings: Settings) -> None:
    """Fault 14, and killed at each call: a reader that sees `completed` finds every file that the status names."""
    batch = ended(ledger, store, settings)
    call, after = 0, False
    while True:
        faults = Faults(at_call=call, after=after)
        try:
            outbox.deliver(batch.batch_id, ledger=faults.around(ledger), store=faults.around(store), settings=settings)
        except Killed:
            call, after = call + after, not after
            try:
                status = read(store)
            except ObjectMissing:
                continue
            assert status["status"] == "completed"
            assert set(files(store)) == set(FILES)
            continue
        break
    assert call > 8
    assert read(store)["status"] == "completed"
    assert outbox.publish_due(ledger=ledger, store=store, settings=settings).written == 0


def test_reader_that_polls_while_the_merge_finishes_never_misses_a_file(
    sqlite_url: str, store: ObjectStore, settings: Settings
) -> None:
    ledger = Ledger.open(sqlite_url)
    batch, leases = answered.in_progress(ledger, store, [[0, 1, 2]])
    publish(batch, ledger, store, settings)
    seen: list[str] = []
    wrong: list[str] = []
    done = threading.Event()

    def poll() -> None:
        while not done.is_set():
            status = read(store)
            seen.append(status["status"])
            for key in status["files"].values():
                if key is not None and store.head(key) is None:
                    wrong.append(key)

    reader = threading.Thread(target=poll)
    reader.start()
    try:
        answered.commit_all(ledger, store, leases, [[0, 1, 2]], refused=[1])
        publish(batch, ledger, store, settings)
        merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
        outbox.deliver(batch.batch_id, ledger=ledger, store=store, settings=settings)
    finally:
        done.set()
        reader.join()
    assert wrong == []
    assert [RANK.index(status) for status in seen] == sorted(RANK.index(status) for status in seen)


def test_status_does_not_go_backwards_with_several_writers(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    """Writers that work from snapshots of any age, all at once, while the batch goes on."""
    chunks = [[index] for index in range(12)]
    batch, leases = answered.in_progress(ledger, store, chunks)
    publish(batch, ledger, store, settings)
    done = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            while not done.is_set():
                publish(batch, ledger, store, settings)
        except BaseException as error:  # noqa: BLE001 - told to the test
            failures.append(error)

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    completed: list[int] = []
    try:
        for number, lease in leases.items():
            answered.commit(ledger, store, lease, [answered.answer(batch.batch_id, number)])
            completed.append(read(store)["request_counts"]["completed"])
    finally:
        done.set()
        for writer in writers:
            writer.join()
    assert failures == []
    assert completed == sorted(completed)
    publish(batch, ledger, store, settings)
    assert read(store)["request_counts"]["completed"] == 12


def test_older_snapshot_does_not_replace_a_newer_status(ledger: Ledger, store: ObjectStore, settings: Settings) -> None:
    batch, leases = answered.in_progress(ledger, store, [[0], [1]])
    answered.commit_all(ledger, store, {0: leases[0]}, [[0], [1]])
    publish(batch, ledger, store, settings)
    newer = read(store)
    newer["progress"] += 1
    store.put(keys.outbox("acme", "questions", "status.json"), json.dumps(newer).encode())
    publish(batch, ledger, store, settings)
    assert read(store) == newer


def test_newest_batch_of_a_name_has_the_folder(ledger_url: str, store: ObjectStore, settings: Settings) -> None:
    """An older one that still runs goes on below `earlier/`; neither ever shows the other's files or status."""
    clock = SteppedClock()
    ledger = Ledger.open(ledger_url, clock=clock)
    older, leases = answered.in_progress(ledger, store, [[0, 1]])
    publish(older, ledger, store, settings)
    clock.advance(30)
    newer, newer_leases = answered.in_progress(ledger, store, [[0]])
    assert publish(newer, ledger, store, settings) == "questions"
    assert read(store)["id"] == newer.batch_id

    clock.advance(1)
    answered.commit_all(ledger, store, leases, [[0, 1]])
    merge(older.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    folder = outbox.deliver(older.batch_id, ledger=ledger, store=store, settings=settings)
    assert folder == f"questions/earlier/{older.batch_id}"
    assert (read(store)["id"], files(store)) == (newer.batch_id, {})
    assert (read(store, folder)["status"], set(files(store, folder))) == (
        "completed",
        {"output.jsonl", "manifest.json"},
    )

    answered.commit_all(ledger, store, newer_leases, [[0]], refused=[0])
    merge(newer.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    outbox.deliver(newer.batch_id, ledger=ledger, store=store, settings=settings)
    assert (read(store)["id"], read(store)["status"]) == (newer.batch_id, "completed")
    assert set(files(store)) == {"errors.jsonl", "manifest.json"}


def test_delivery_that_is_overtaken_by_a_newer_batch_leaves_the_newer_files(
    ledger_url: str, store_settings: configuration.Store, store: ObjectStore, settings: Settings
) -> None:
    """Between two copies of an older batch's delivery a newer one of its name comes, ends and is delivered."""
    clock = SteppedClock()
    ledger = Ledger.open(ledger_url, clock=clock)
    older = ended(ledger, store, settings)
    newer: list[Batch] = []

    class Overtaken(ObjectStore):
        def copy(self, source: ObjectInfo, target: str) -> None:
            if not newer:
                clock.advance(1)
                newer.append(ended(ledger, store, settings, refused=(), count=2))
                outbox.deliver(newer[0].batch_id, ledger=ledger, store=store, settings=settings)
            super().copy(source, target)

    slow = Overtaken.open(store_settings)
    folder = outbox.deliver(older.batch_id, ledger=ledger, store=slow, settings=settings)
    assert folder == f"questions/earlier/{older.batch_id}"
    assert read(store)["id"] == newer[0].batch_id
    assert set(files(store)) == {"output.jsonl", "manifest.json"}
    assert files(store)["output.jsonl"] == store.get(str(newer[0].output_key))
    assert files(store, folder)["output.jsonl"] == store.get(str(older.output_key))


def test_folder_is_cleared_when_a_new_batch_takes_its_name(
    ledger_url: str, store: ObjectStore, settings: Settings
) -> None:
    clock = SteppedClock()
    ledger = Ledger.open(ledger_url, clock=clock)
    old = ended(ledger, store, settings)
    outbox.deliver(old.batch_id, ledger=ledger, store=store, settings=settings)
    assert set(files(store)) == set(FILES)
    clock.advance(60)
    new = answered.create(ledger, store, [answered.input_line(0)])
    publish(new, ledger, store, settings)
    assert (read(store)["id"], files(store)) == (new.batch_id, {})
    assert store.head(keys.final(old.batch_id, "output.jsonl")) is not None


def test_delivery_needs_an_end(ledger: Ledger, store: ObjectStore, settings: Settings) -> None:
    batch, _ = answered.in_progress(ledger, store, [[0]])
    with pytest.raises(NotAllowedInState):
        outbox.deliver(batch.batch_id, ledger=ledger, store=store, settings=settings)


def test_due_statuses_are_published_in_pages_until_nothing_is_behind(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    made = [answered.create(ledger, store, [answered.input_line(0)], name=f"file-{number}") for number in range(5)]
    after, written = "", 0
    for _ in range(3):
        page = outbox.publish_due(ledger=ledger, store=store, settings=settings, after=after, limit=2)
        written, after = written + page.written, page.after
    assert (written, after) == (5, "")
    assert {read(store, batch.name)["id"] for batch in made} == {batch.batch_id for batch in made}
    assert outbox.publish_due(ledger=ledger, store=store, settings=settings).written == 0
    ledger.batches.cancel(made[3].batch_id)
    assert outbox.publish_due(ledger=ledger, store=store, settings=settings).written == 1
    assert read(store, "file-3")["status"] == "cancelling"


def test_batch_whose_files_are_gone_does_not_hold_up_the_others(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    broken = ended(ledger, store, settings)
    store.delete(str(broken.output_key))
    others = [answered.create(ledger, store, [answered.input_line(0)], name=f"file-{number}") for number in range(4)]
    shown = outbox.publish_due(ledger=ledger, store=store, settings=settings)
    assert (shown.written, shown.after, shown.outage) == (4, "", None)
    [problem] = shown.broken
    assert broken.batch_id in problem
    assert str(broken.output_key) in problem
    assert {read(store, batch.name)["id"] for batch in others} == {batch.batch_id for batch in others}


def test_batch_for_which_the_store_fails_does_not_hold_up_the_next_page(
    ledger: Ledger, store_settings: configuration.Store, store: ObjectStore, settings: Settings
) -> None:
    """One object that the store cannot read looks like a store that is away."""
    made = [answered.create(ledger, store, [answered.input_line(0)], name=f"file-{number}") for number in range(5)]
    made.sort(key=lambda batch: batch.batch_id)
    unreadable = keys.outbox("acme", made[1].name, "status.json")

    class Damaged(ObjectStore):
        def get_with_etag(self, key: str) -> tuple[bytes, str]:
            if key == unreadable:
                raise StoreError(f"reading {key}: the object store answered InternalError")
            return super().get_with_etag(key)

    damaged = Damaged.open(store_settings)
    first = outbox.publish_due(ledger=ledger, store=damaged, settings=settings)
    assert (first.written, first.after) == (1, made[1].batch_id)
    assert "InternalError" in str(first.outage)
    second = outbox.publish_due(ledger=ledger, store=damaged, settings=settings, after=first.after)
    assert (second.written, second.after, second.outage) == (3, "", None)


def test_rejected_file_is_answered_with_a_failed_batch(store: ObjectStore) -> None:
    outbox.answer_rejected("acme", "questions", "invalid_option", "completion-window: mend it", store=store)
    answer = read(store)
    assert (answer["id"], answer["status"]) == (None, "failed")
    assert answer["errors"]["data"] == [
        {"code": "invalid_option", "message": "completion-window: mend it", "line": None, "param": None}
    ]


def test_rejected_file_does_not_hide_a_batch(ledger_url: str, store: ObjectStore, settings: Settings) -> None:
    clock = SteppedClock()
    ledger = Ledger.open(ledger_url, clock=clock)
    batch = ended(ledger, store, settings)
    outbox.deliver(batch.batch_id, ledger=ledger, store=store, settings=settings)
    outbox.answer_rejected("acme", "questions", "invalid_option", "no", store=store, clock=lambda: clock.time + 1)
    assert read(store)["id"] == batch.batch_id
    assert json.loads(store.get(keys.outbox("acme", "questions", "rejected.json")))["status"] == "failed"

    clock.advance(60)
    mended = answered.create(ledger, store, [answered.input_line(0)])
    publish(mended, ledger, store, settings)
    assert store.head(keys.outbox("acme", "questions", "rejected.json")) is None, "the mended file is its answer"


def test_batch_takes_the_folder_of_an_earlier_rejection(
    ledger_url: str, store: ObjectStore, settings: Settings
) -> None:
    clock = SteppedClock()
    ledger = Ledger.open(ledger_url, clock=clock)
    outbox.answer_rejected("acme", "questions", "invalid_option", "no", store=store, clock=lambda: clock.time - 9)
    batch = answered.create(ledger, store, [answered.input_line(0)])
    publish(batch, ledger, store, settings)
    assert read(store)["id"] == batch.batch_id
    assert store.head(keys.outbox("acme", "questions", "rejected.json")) is None


def test_cancelled_and_expired_batches_are_delivered(ledger: Ledger, store: ObjectStore, settings: Settings) -> None:
    batch, leases = answered.in_progress(ledger, store, [[0, 1]])
    ledger.batches.cancel(batch.batch_id)
    ledger.chunks.release(leases[0].ref, "cancelled")
    merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    outbox.deliver(batch.batch_id, ledger=ledger, store=store, settings=settings)
    status = read(store)
    assert (status["status"], status["counts"]["cancelled"], status["cost"]) == (BatchStatus.CANCELLED, 2, 0)
    assert status["cancelled_at"] is not None
