"""Whatever holds a batch up has a name in its status, and there is an estimate once there is a rate (invariant I9)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batch_pipeline import alarms
from batch_pipeline.engine import VllmServer
from batch_pipeline.errors import EngineError, StoreError
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.alarms import AlarmKind
from batch_pipeline.ledger.records import BatchStatus, WorkerState
from batch_pipeline.models import Model
from batch_pipeline.results import outbox
from batch_pipeline.results.status import StatusDocument, current_status
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys
from sensors.runs import store_watch
from tests.fakes import answered
from tests.fakes import engine as fake_engine
from tests.fakes.answered import MODEL, answer
from tests.fakes.batches import chat_request, make_batch
from tests.fakes.clock import SteppedClock
from tests.fakes.waiting import wait_until
from tests.fakes.workers import attached, in_thread, make_worker, quick


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def ledger(sqlite_url: str, clock: SteppedClock) -> Iterator[Ledger]:
    """A ledger whose clock stands still."""
    opened = Ledger.open(sqlite_url, clock=clock)
    yield opened
    opened.close()


def shown(batch_id: str, ledger: Ledger, store: ObjectStore, settings: Settings, clock: SteppedClock) -> StatusDocument:
    """The status that the ledger tells; status.json must say the same."""
    clock.advance(1)
    outbox.publish_due(ledger=ledger, store=store, settings=settings)
    document = current_status(batch_id, ledger=ledger, settings=settings)
    written = json.loads(store.get(keys.outbox(document.customer, document.name, outbox.STATUS)))
    assert (written["reason"], written["status"]) == (document.reason, document.status)
    return document


def test_each_wait_has_its_name_in_status_json(
    ledger: Ledger, store: ObjectStore, settings: Settings, clock: SteppedClock
) -> None:
    chunks = [[0, 1, 2, 3], [4, 5, 6, 7]]
    batch = answered.create(ledger, store, [answered.input_line(index) for index in range(8)])
    batch_id = batch.batch_id

    def reason() -> str:
        return str(shown(batch_id, ledger, store, settings, clock).reason)

    assert reason() == "waiting for validation: it is not its turn yet"
    ledger.batches.note_intake_requested(batch_id, 0)
    assert reason() == "waiting for validation: its run is queued or under way"
    for _ in range(2):
        ledger.batches.note_intake_requested(batch_id, 0)
    assert "validation: requested 3 times" in reason()
    answered.take_in(ledger, store, batch_id, chunks)
    assert reason() == f"waiting for a worker of {MODEL}: none is running yet"
    ledger.workers.register("w1", MODEL, None, "host")
    assert reason() == f"waiting for a worker of {MODEL}: its engine is loading the model"
    ledger.workers.set_state("w1", WorkerState.FAILED, "no such option --dtipe")
    assert reason() == f"waiting for a worker of {MODEL}: worker cannot start: no such option --dtipe"
    ledger.workers.register("w2", MODEL, None, "host")
    ledger.workers.set_state("w2", WorkerState.READY)
    assert "busy with other batches" in reason()
    lease = ledger.chunks.lease("w2", MODEL, 1)[0]
    assert reason() == f"running on {MODEL}"
    ledger.workers.set_state("w2", WorkerState.READY, "the engine refuses requests: 503")
    assert reason() == f"running on {MODEL}, held up: the engine refuses requests: 503"
    ledger.workers.set_state("w2", WorkerState.STARTING, "the engine died; it is being started again")
    assert "the engine died" in reason()
    clock.advance(61)
    assert "fallen silent" in reason() or "none is running" in reason()
    ledger.workers.set_state("w2", WorkerState.READY)
    answered.commit(ledger, store, lease, [answer(batch_id, index) for index in chunks[lease.ref.chunk]])
    ledger.chunks.lease("w2", MODEL, 1)
    ledger.batches.cancel(batch_id)
    assert reason() == "stopping: waiting for workers to hand back the chunk that one is running"
    clock.advance(61)
    ledger.chunks.expire_leases()
    assert reason() == "waiting for the results file: it is not its turn yet"
    for _ in range(4):
        ledger.batches.note_merge_requested(batch_id, 0)
    assert "the results file: requested 4 times" in reason()


def test_there_is_an_estimate_once_a_speed_is_known_and_then_before_there_is_a_worker_as_well(
    ledger: Ledger, store: ObjectStore, settings: Settings, clock: SteppedClock
) -> None:
    batch, leases = answered.in_progress(ledger, store, [[0, 1, 2, 3], [4, 5, 6, 7]])

    def left() -> float | None:
        clock.advance(5)
        finish = shown(batch.batch_id, ledger, store, settings, clock).estimated_finish_at
        return None if finish is None else finish - clock.time

    assert left() is None, "nobody knows how fast a worker is"
    answered.checkpoint(ledger, store, leases[0], [answer(batch.batch_id, 0), answer(batch.batch_id, 1)])
    ledger.workers.register("w", MODEL, None, "host")
    clock.advance(30)
    ledger.workers.set_state("w", WorkerState.READY)
    assert left() is None, "it has measured nothing yet"
    ledger.workers.heartbeat("w", tokens_per_second=1.0)
    with_worker = left()
    assert with_worker is not None
    assert with_worker > 0
    ledger.workers.heartbeat("w", tokens_per_second=2.0)
    assert left() == pytest.approx(with_worker / 2)
    ledger.workers.set_state("w", WorkerState.STOPPED)
    # What it has measured tells of the next one, which has to load first, as long as this one did.
    assert left() == pytest.approx(with_worker / 2 + 30.0)
    none = msgspec.structs.replace(settings, scheduling=msgspec.structs.replace(settings.scheduling, total_gpus=0))
    clock.advance(5)
    assert current_status(batch.batch_id, ledger=ledger, settings=none).estimated_finish_at is None


def test_a_batch_that_cannot_be_in_time_with_all_workers_says_so_and_runs(
    ledger: Ledger, store: ObjectStore, settings: Settings, clock: SteppedClock
) -> None:
    slow = msgspec.structs.replace(settings.models[MODEL], tokens_per_second=0.001)
    settings = msgspec.structs.replace(settings, models={MODEL: slow})
    batch = answered.create(ledger, store, [answered.input_line(index) for index in range(8)])
    answered.take_in(ledger, store, batch.batch_id, [[0, 1, 2, 3], [4, 5, 6, 7]])
    document = shown(batch.batch_id, ledger, store, settings, clock)
    assert document.warning is not None
    assert "it cannot be done by its deadline, even with all that" in document.warning
    assert "tokens are left, its one worker does 0 a second, which takes" in document.warning
    assert document.status == "in_progress"
    assert len(ledger.chunks.lease("w", MODEL, 2)) == 2
    (change,) = alarms.look_at_risks(ledger, settings)
    assert (change.on_time, change.text) == (False, document.warning)
    assert [alarm.kind for alarm in ledger.alarms.recent()] == [AlarmKind.BATCH_AT_RISK]
    assert alarms.look_at_risks(ledger, settings) == [], "told once"


def test_a_store_that_is_away_is_named_where_no_status_json_can_be_written(
    ledger: Ledger, store: ObjectStore, settings: Settings, clock: SteppedClock
) -> None:
    batch, _ = answered.in_progress(ledger, store, [[0, 1]])
    with pytest.raises(StoreError), store_watch(ledger):
        raise StoreError("listing inbox/: the object store cannot be reached:\n\x1b[31mno route")
    document = current_status(batch.batch_id, ledger=ledger, settings=settings)
    assert document.reason is not None
    assert "the object store cannot be used: listing inbox/: the object store cannot be reached" in document.reason
    assert document.reason.isprintable()
    clock.advance(121)
    assert "object store" not in str(current_status(batch.batch_id, ledger=ledger, settings=settings).reason)
    with pytest.raises(StoreError), store_watch(ledger):
        raise StoreError("again")
    with store_watch(ledger):
        pass
    assert "object store" not in str(shown(batch.batch_id, ledger, store, settings, clock).reason)


class _Away:
    """A store that cannot be reached until it is told to be back."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.is_away = True

    def __getattr__(self, name: str) -> Any:
        if self.is_away:
            raise StoreError(f"{name}: the object store cannot be reached: connection refused")
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        """Read an object, unless the store is away."""
        if self.is_away:
            raise StoreError(f"reading {key}: the object store cannot be reached: connection refused")
        return self._store.get(key)

    def put(self, key: str, data: bytes, **options: Any) -> str:
        """Write an object, unless the store is away."""
        if self.is_away:
            raise StoreError(f"writing {key}: the object store cannot be reached: connection refused")
        return self._store.put(key, data, **options)


def test_a_worker_says_that_its_store_is_away_and_that_it_is_back(
    sqlite_url: str, store: ObjectStore, settings: Settings
) -> None:
    ledger = Ledger.open(sqlite_url)
    batch = make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(4)]])
    away: Any = _Away(store)

    def reason() -> str:
        return str(current_status(batch.batch_id, ledger=ledger, settings=settings).reason)

    with fake_engine.running() as fake, in_thread(make_worker(ledger, away, quick(settings), attached(fake.url))):
        wait_until(lambda: "held up: the object store cannot be used: reading" in reason(), "the reason is told")
        away.is_away = False
    assert ledger.batches.get(batch.batch_id).status is BatchStatus.FINALIZING
    assert "object store" not in reason()
    ledger.close()


def test_a_worker_that_cannot_start_says_why(
    sqlite_url: str, store: ObjectStore, settings: Settings, tmp_path: Path
) -> None:
    ledger = Ledger.open(sqlite_url)
    batch = make_batch(ledger, store, [[chat_request(0, "say 0")]])
    broken = "import sys; sys.exit('error: unrecognized arguments: --dtipe')"
    engine = VllmServer(
        MODEL,
        Model(source="none", context_length=64),
        tmp_path / "engine.log",
        command=lambda _port: [sys.executable, "-c", broken],
    )
    with pytest.raises(EngineError):
        make_worker(ledger, store, quick(settings), engine).run()
    reason = current_status(batch.batch_id, ledger=ledger, settings=settings).reason
    assert reason is not None
    assert "worker cannot start" in reason
    assert "unrecognized arguments: --dtipe" in reason
    ledger.close()
