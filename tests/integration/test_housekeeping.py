"""Housekeeping on the real S3 server: what is over goes, and never what a final file needs, wherever it is killed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from batch_pipeline import housekeeping, ids
from batch_pipeline.errors import LeaseLost, NotAllowedInState, ProofFailed
from batch_pipeline.housekeeping import Report, Step
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, BatchStatus, Lease, OnInvalid, Stored, WorkerState
from batch_pipeline.results import collect, demand, manifest, outbox
from batch_pipeline.results.audit import audit
from batch_pipeline.results.merge import _stopped_chunks, merge
from batch_pipeline.results.status import current_status
from batch_pipeline.results.verify import verify
from batch_pipeline.settings import Retention, Settings
from batch_pipeline.store import ObjectStore, keys
from batch_pipeline.wire import chunk_files
from tests.fakes import answered
from tests.fakes.clock import SteppedClock
from tests.fakes.faults import Faults, Killed

MOST_CALLS = 80
DAY = 86_400.0
CHUNKS = [[0, 1], [2, 3], [4, 5]]


class House(NamedTuple):
    """The parts, and the time in the test's hand: `tidy` sees objects as old as the clock has moved on."""

    ledger: Ledger
    store: ObjectStore
    settings: Settings
    clock: SteppedClock
    began: float
    wall: float

    def tidy(self, *, dry_run: bool = False, call: int | None = None) -> Report:
        """One run; killed at `call`."""
        faults = Faults(10**9 if call is None else call)
        return housekeeping.tidy(
            ledger=faults.around(self.ledger),
            store=faults.around(self.store),
            settings=self.settings,
            dry_run=dry_run,
            clock=lambda: self.wall + self.clock.time - self.began + 2,
            chance=random.Random(5),
        )

    def merge(self, batch_id: str) -> Batch:
        """End a batch whose chunks have stopped, and deliver it."""
        merge(batch_id, ledger=self.ledger, store=self.store, settings=self.settings, run_id="merge-run")
        outbox.deliver(batch_id, ledger=self.ledger, store=self.store, settings=self.settings)
        return self.ledger.batches.get(batch_id)

    def keys(self, prefix: str = "") -> set[str]:
        """What lies in the bucket."""
        return {info.key for info in self.store.list(prefix)}


@pytest.fixture
def house(sqlite_url: str, store: ObjectStore, settings: Settings) -> House:
    clock = SteppedClock()
    return House(Ledger.open(sqlite_url, clock=clock), store, settings, clock, clock.time, time.time())


def run_to_end(house: House, *, expire: bool = False, name: str = "questions") -> Batch:
    """A batch with garbage of a lost attempt, checkpoints, an invalid line, and (with `expire`) a stopped chunk."""
    ledger, store = house.ledger, house.store
    batch, leases = answered.in_progress(ledger, store, CHUNKS, invalid=[6], name=name)
    batch_id = batch.batch_id
    store.put(keys.request_table(batch_id), b"table")
    answered.checkpoint(ledger, store, leases[0], [answered.answer(batch_id, 0)])
    answered.write_result(store, leases[0], [answered.answer(batch_id, index) for index in CHUNKS[0]])
    ledger.chunks.release(leases[0].ref, "gives way")
    answered.checkpoint(ledger, store, leases[2], [answered.refusal(batch_id, 4)])
    again = answered.lease_all(ledger)
    answered.commit_all(ledger, store, {0: again[0], 1: leases[1]}, CHUNKS)
    if expire:
        house.clock.advance(DAY + 1)
        ledger.batches.expire_due()
        ledger.chunks.expire_leases()
    else:
        answered.commit_all(ledger, store, {2: leases[2]}, CHUNKS, refused=[4])
    return house.merge(batch_id)


def test_every_transition_is_in_the_manifest_and_the_trail_is_the_same_without_the_rows(house: House) -> None:
    batch = run_to_end(house, expire=True)
    data = house.store.get(str(batch.manifest_key))
    events = manifest.events_in(data)
    assert [event.event for event in events if event.chunk is None] == [
        "created",
        "in_progress",
        "expiring",
        "finalizing",
    ]
    of_first = [(event.event, event.actor, event.token, event.run_id) for event in events if event.chunk == 0]
    worker, run = answered.WORKER, answered.RUN
    assert of_first == [
        ("leased", worker, 1, run),
        ("released", worker, 1, run),
        ("leased", worker, 2, run),
        ("committed", worker, 2, run),
    ]
    assert b"merge-run" not in data
    before = audit(batch.batch_id, ledger=house.ledger, store=house.store)
    summary = demand.summarise(batch.batch_id, house.ledger, house.store)
    document = current_status(batch.batch_id, ledger=house.ledger, settings=house.settings)

    house.clock.advance(3600)
    report = house.tidy()

    assert [removal.subject for removal in report.of(Step.ARCHIVE)] == [batch.batch_id]
    assert house.ledger.chunks.of(batch.batch_id) == []
    assert all(event.chunk is None for event in house.ledger.events.of(batch.batch_id))
    after = audit(batch.batch_id, ledger=house.ledger, store=house.store)
    assert after.events[:-1] == before.events
    assert after.events[-1].event == "archived"
    assert [chunk.sha256 for chunk in after.chunks] == [chunk.sha256 for chunk in before.chunks]
    one = audit(batch.batch_id, ledger=house.ledger, store=house.store, index=3).requests[0]
    assert one.source_is_identical
    assert demand.summarise(batch.batch_id, house.ledger, house.store) == summary
    now = current_status(batch.batch_id, ledger=house.ledger, settings=house.settings)
    assert (now.cost, now.counts, now.progress) == (document.cost, document.counts, document.progress)
    assert verify(batch.batch_id, ledger=house.ledger, store=house.store).problems == []
    files = final_bytes(house, batch)
    merge(batch.batch_id, ledger=house.ledger, store=house.store, settings=house.settings, run_id="again", rebuild=True)
    assert final_bytes(house, batch) == files


def final_bytes(house: House, batch: Batch) -> dict[str, bytes]:
    """The final files that there are."""
    return {key: house.store.get(key) for key in sorted(house.keys(keys.final(batch.batch_id, "")))}


def test_the_life_after_the_end_step_by_step(house: House, tmp_path: Path) -> None:
    batch = run_to_end(house)
    folder = keys.batch(batch.batch_id)
    files = final_bytes(house, batch)
    assert house.tidy().removals == [], "nothing is over yet"
    house.clock.advance(2 * DAY)
    planned = house.tidy(dry_run=True)
    assert {removal.step for removal in planned.removals} == {Step.ARCHIVE}
    assert house.ledger.batches.get(batch.batch_id) == batch, "a dry run changes nothing"
    report = house.tidy()
    assert [removal.step for removal in report.removals] == [Step.ARCHIVE, Step.WORK]
    assert house.keys(folder) == {*files, batch.input_key, str(batch.invalid_key)}
    assert final_bytes(house, batch) == files
    assert verify(batch.batch_id, ledger=house.ledger, store=house.store).problems == []
    with pytest.raises(NotAllowedInState, match="chunk results were removed"):
        merge(
            batch.batch_id, ledger=house.ledger, store=house.store, settings=house.settings, run_id=None, rebuild=True
        )
    request = audit(batch.batch_id, ledger=house.ledger, store=house.store, index=3).requests[0]
    assert request.chunk is not None
    assert (request.chunk.chunk, request.source) == (1, None)
    assert "removed" in str(request.note)
    assert house.tidy().removals == []

    house.clock.advance(31 * DAY)
    assert [removal.step for removal in house.tidy().removals] == [Step.FILES]
    assert house.keys() == set()
    gone = house.ledger.batches.get(batch.batch_id)
    assert gone.stored == Stored.NOTHING
    assert gone.files_removed_at is not None
    assert list(house.ledger.events.of(batch.batch_id)) == []
    document = current_status(batch.batch_id, ledger=house.ledger, settings=house.settings)
    assert (document.status, document.counts.completed, document.output_file_id) == ("completed", 5, None)
    for reading in (
        lambda: verify(batch.batch_id, ledger=house.ledger, store=house.store),
        lambda: audit(batch.batch_id, ledger=house.ledger, store=house.store),
        lambda: demand.summarise(batch.batch_id, house.ledger, house.store),
        lambda: collect.collect(gone, tmp_path, house.store),
    ):
        with pytest.raises(NotAllowedInState, match="were removed 33 days after its end"):
            reading()
    outbox.publish_status(batch.batch_id, ledger=house.ledger, store=house.store, settings=house.settings)
    assert house.tidy().removals == []
    assert house.keys() == set(), "nothing comes back"


@pytest.mark.parametrize("end", ["strict", "empty", "cancelled", "expired"])
def test_however_a_batch_ended_its_chunks_leave_and_the_manifest_speaks_for_them(house: House, end: str) -> None:
    ledger, store = house.ledger, house.store
    if end == "empty":
        batch = answered.create(ledger, store, [])
        answered.take_in(ledger, store, batch.batch_id, [])
    else:
        strict = OnInvalid.FAIL if end == "strict" else OnInvalid.SKIP
        batch, leases = answered.in_progress(ledger, store, CHUNKS, invalid=[6], on_invalid=strict)
        if end == "cancelled":
            answered.checkpoint(ledger, store, leases[1], [answered.answer(batch.batch_id, 2)])
            ledger.batches.cancel(batch.batch_id)
            for lease in leases.values():
                ledger.chunks.release(lease.ref, "cancelled")
        if end == "expired":
            house.clock.advance(DAY + 1)
            ledger.batches.expire_due()
            ledger.chunks.expire_leases()
    ended = house.merge(batch.batch_id)
    before = audit(batch.batch_id, ledger=ledger, store=store)
    house.clock.advance(3600)
    (removal,) = house.tidy().of(Step.ARCHIVE)
    assert removal.rows == len(before.chunks) + sum(event.chunk is not None for event in before.events)
    assert ledger.chunks.of(batch.batch_id) == []
    after = audit(batch.batch_id, ledger=ledger, store=store)
    assert after.events[:-1] == before.events
    assert [chunk.state for chunk in after.chunks] == [chunk.state for chunk in before.chunks]
    files = final_bytes(house, ended)
    merge(batch.batch_id, ledger=ledger, store=store, settings=house.settings, run_id=None, rebuild=True)
    assert final_bytes(house, ended) == files
    house.clock.advance(2 * DAY)
    assert [removal.step for removal in house.tidy().removals] == [Step.WORK]
    assert verify(batch.batch_id, ledger=ledger, store=store).problems == []


def test_the_outbox_of_a_newer_batch_is_left_alone(house: House) -> None:
    old = run_to_end(house)
    house.clock.advance(31 * DAY)
    new = run_to_end(house)
    house.tidy()
    assert house.ledger.batches.get(old.batch_id).stored == Stored.NOTHING
    assert house.keys(keys.OUTBOX) == {
        keys.outbox("acme", "questions", file)
        for file in ("status.json", "output.jsonl", "errors.jsonl", "manifest.json")
    }
    assert house.keys(keys.batch(old.batch_id)) == set()
    assert verify(new.batch_id, ledger=house.ledger, store=house.store).problems == []


@pytest.mark.parametrize("days", [0.5, 2.0, 40.0])
def test_killed_at_any_call_the_next_run_finishes_and_no_needed_file_is_gone(house: House, days: float) -> None:
    batch = run_to_end(house)
    files = final_bytes(house, batch)
    house.clock.advance(days * DAY)
    for call in range(MOST_CALLS):
        try:
            house.tidy(call=call)
        except Killed:
            if days < 30:
                assert verify(batch.batch_id, ledger=house.ledger, store=house.store).problems == []
                assert len(audit(batch.batch_id, ledger=house.ledger, store=house.store).chunks) == 3
        else:
            break
    else:
        raise AssertionError("it takes more calls than this test makes")
    after = house.ledger.batches.get(batch.batch_id)
    assert after.stored == {0.5: Stored.ALL, 2.0: Stored.FILES, 40.0: Stored.NOTHING}[days]
    assert after.archived_at is not None
    assert final_bytes(house, batch) == ({} if days > 30 else files)
    assert (house.keys() == set()) == (days > 30)


@pytest.mark.parametrize("damage", ["manifest", "output", "garbled"])
def test_a_batch_whose_files_are_damaged_keeps_what_they_can_be_made_from(house: House, damage: str) -> None:
    batch = run_to_end(house)
    chunks = house.keys(keys.chunks(batch.batch_id))
    if damage == "garbled":
        data = house.store.get(str(batch.manifest_key)).replace(b'"completed":2', b'"completed":1', 1)
        house.store.put(str(batch.manifest_key), data)
    else:
        house.store.delete(str(batch.manifest_key if damage == "manifest" else batch.output_key))
    house.clock.advance(2 * DAY)
    report = house.tidy()
    assert batch.batch_id in report.held
    assert report.removals == []
    assert house.keys(keys.chunks(batch.batch_id)) == chunks
    assert len(house.ledger.chunks.of(batch.batch_id)) == 3
    if damage != "garbled":
        merge(
            batch.batch_id, ledger=house.ledger, store=house.store, settings=house.settings, run_id=None, rebuild=True
        )
        assert [removal.step for removal in house.tidy().removals] == [Step.ARCHIVE, Step.WORK]
        assert verify(batch.batch_id, ledger=house.ledger, store=house.store).problems == []


def test_what_an_attempt_wrote_in_vain_goes_and_what_may_still_count_stays(house: House) -> None:
    ledger, store = house.ledger, house.store
    batch, leases = answered.in_progress(ledger, store, CHUNKS)
    batch_id = batch.batch_id
    inputs = house.keys()
    answered.checkpoint(ledger, store, leases[0], [answered.answer(batch_id, 0)])
    part = house.keys() - inputs
    lost = answered.write_result(store, leases[0], [answered.answer(batch_id, index) for index in CHUNKS[0]])
    ledger.chunks.release(leases[0].ref, "gives way")
    second = answered.lease_all(ledger)[0]
    mine = answered.write_result(store, second, [answered.answer(batch_id, index) for index in CHUNKS[0]])
    assert house.tidy().of(Step.LEFTOVERS) == [], "too young"
    _move_on(house, [second, leases[1], leases[2]], 2 * 3600)

    (removal,) = house.tidy().of(Step.LEFTOVERS)

    assert removal.objects == 2
    assert not {lost.result_key, lost.lines_key} & house.keys()
    assert {*part, mine.result_key, mine.lines_key} <= house.keys()
    ledger.chunks.commit(second.ref, mine)
    answered.commit_all(ledger, store, {1: leases[1], 2: leases[2]}, CHUNKS)
    house.merge(batch_id)
    assert verify(batch_id, ledger=ledger, store=store).problems == []


def _move_on(house: House, leases: list[Lease], seconds: float) -> None:
    """Let time go by while workers keep their leases."""
    for _ in range(round(seconds / 50)):
        house.clock.advance(50)
        house.ledger.workers.heartbeat(answered.WORKER, [lease.ref for lease in leases])


@pytest.mark.parametrize("seed", range(3))
def test_at_any_moment_of_a_batchs_life_housekeeping_costs_it_nothing(house: House, seed: int) -> None:
    """Retention of nothing but garbage's age; any step may be followed by a run that is killed, or is not."""
    chance = random.Random(seed)
    eager = Retention(ledger_minutes=0.001, work_hours=0.001, files_days=30.0, leftovers_hours=1e-6, orphans_hours=1.0)
    house = house._replace(settings=msgspec.structs.replace(house.settings, retention=eager))
    ledger, store = house.ledger, house.store

    def pause() -> None:
        house.clock.advance(chance.choice([0, 10, 30, 70]))
        try:
            house.tidy(call=chance.choice([2, 5, 9, 10**6]))
        except Killed:
            house.tidy()

    lines = [answered.input_line(index) for index in range(6)]
    batch = answered.create(ledger, store, lines)
    pause()
    answered.take_in(ledger, store, batch.batch_id, CHUNKS)
    pause()
    while ledger.batches.get(batch.batch_id).status == BatchStatus.IN_PROGRESS:
        for lease in ledger.chunks.lease(answered.WORKER, answered.MODEL, 2, run_id=answered.RUN):
            _attempt(house, lease, chance, pause)
    house.merge(batch.batch_id)
    pause()
    ended = ledger.batches.get(batch.batch_id)
    assert (ended.status, ended.completed) == (BatchStatus.COMPLETED, 6)
    assert verify(batch.batch_id, ledger=ledger, store=store).problems == []
    house.clock.advance(100)
    house.tidy()
    assert house.keys(keys.chunks(batch.batch_id)) == set()
    assert verify(batch.batch_id, ledger=ledger, store=store).problems == []


def _attempt(house: House, lease: Lease, chance: random.Random, pause: Callable[[], None]) -> None:
    """A worker that saves, stalls, gives way, dies or commits."""
    indexes = CHUNKS[lease.ref.chunk]
    known = {request for part in lease.parts for request in _indexes(house, part.key)}
    left = [index for index in indexes if index not in known]
    batch_id = lease.ref.batch_id
    try:
        if left and chance.random() < 0.6:
            answered.checkpoint(house.ledger, house.store, lease, [answered.answer(batch_id, left[0])])
        pause()
        result = answered.write_result(
            house.store, lease, [answered.answer(batch_id, index) for index in sorted(indexes)]
        )
        pause()
        if chance.random() < 0.3:
            house.ledger.chunks.release(lease.ref, "gives way")
        elif chance.random() < 0.7:
            house.ledger.chunks.commit(lease.ref, result)
    except LeaseLost:
        return


def _indexes(house: House, key: str) -> list[int]:
    return [request.index for request in chunk_files.read_part(house.store.get(key))]


def test_uploads_that_never_became_a_batch_go_and_those_that_will_stay(house: House) -> None:
    orphan = ids.new_batch_id()
    house.store.put(keys.input_file(orphan), b"x")
    house.store.put("inbox/acme/next.jsonl", b"y")
    info = house.store.head("inbox/acme/next.jsonl")
    assert info is not None
    awaited = ids.batch_id_from(f"drop:acme/next:{info.etag}:{info.modified_at}")
    house.store.put(keys.input_file(awaited), b"y")
    batch = answered.create(house.ledger, house.store, [answered.input_line(0)])
    house.store.put("batches/notes.txt", b"somebody's")
    assert house.tidy().removals == []
    house.clock.advance(2 * DAY)
    assert [removal.subject for removal in house.tidy().of(Step.ORPHAN)] == [orphan]
    assert {keys.input_file(awaited), batch.input_key, "batches/notes.txt"} <= house.keys()


def test_forgotten_multipart_uploads_are_aborted_but_not_the_customers(house: House) -> None:
    for key in ("batches/x/final/output.jsonl", "inbox/acme/large.jsonl"):
        house.store.multipart(key).write(b"x" * 6_000_000)
    assert house.tidy().removals == []
    house.clock.advance(2 * DAY)
    assert [removal.subject for removal in house.tidy().of(Step.UPLOAD)] == ["batches/x/final/output.jsonl"]
    assert [upload.key for upload in house.store.uploads("")] == ["inbox/acme/large.jsonl"]


def test_silent_workers_and_old_rejected_files_go(house: House) -> None:
    house.ledger.workers.register("gone", answered.MODEL, None, "host")
    house.store.put(keys.rejected("d" * 32, "object"), b"x")
    house.clock.advance(2 * DAY)
    house.ledger.workers.register("here", answered.MODEL, None, "host")
    house.ledger.workers.set_state("here", WorkerState.READY)
    assert [removal.rows for removal in house.tidy(dry_run=True).of(Step.WORKERS)] == [1]
    assert [removal.rows for removal in house.tidy().of(Step.WORKERS)] == [1]
    assert [worker.worker_id for worker in house.ledger.workers.of_models([answered.MODEL], 10 * DAY)] == ["here"]
    assert house.keys(keys.REJECTED) == {keys.rejected("d" * 32, "object")}
    house.clock.advance(31 * DAY)
    assert [removal.objects for removal in house.tidy().of(Step.REJECTED)] == [1]


def test_a_merge_that_comes_late_finds_the_batch_ended_and_writes_nothing(house: House) -> None:
    """Its chunks leave the ledger while it reads them: nothing may be made from a part of them."""
    ledger, store = house.ledger, house.store
    batch, leases = answered.in_progress(ledger, store, CHUNKS)
    answered.commit_all(ledger, store, leases, CHUNKS)
    late = ledger.batches.get(batch.batch_id)
    house.merge(batch.batch_id)
    files = final_bytes(house, batch)
    house.clock.advance(3600)
    house.tidy()
    assert _stopped_chunks(late, ledger) is None
    assert final_bytes(house, batch) == files


def test_nothing_of_an_open_batch_can_be_let_go(house: House) -> None:
    batch, _ = answered.in_progress(house.ledger, house.store, CHUNKS)
    for refused in (
        lambda: house.ledger.retention.archive(batch.batch_id, 3),
        lambda: house.ledger.retention.begin_work_removal(batch.batch_id),
        lambda: house.ledger.retention.begin_file_removal(batch.batch_id),
    ):
        with pytest.raises(NotAllowedInState, match="it needs what it has"):
            refused()
    ended = run_to_end(house, name="other")
    with pytest.raises(ProofFailed, match="has 3 chunks"):
        house.ledger.retention.archive(ended.batch_id, 2)
