"""What broke elsewhere while requests were running (the fault numbers are those of the list of cases)."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batch_pipeline.errors import EngineError, LeaseLost
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import BatchStatus, ChunkState, HeartbeatReply, WorkerState
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from batch_pipeline.worker import Ended, Worker, WorkerReport
from batch_pipeline.worker.patience import Patience
from tests.fakes import engine as fake_engine
from tests.fakes.batches import chat_request, chunk_input, make_batch
from tests.fakes.clock import SteppedClock
from tests.fakes.engine import RunningFake
from tests.fakes.waiting import wait_until
from tests.fakes.workers import (
    MODEL,
    Life,
    attached,
    child_engine,
    in_thread,
    lines_of,
    make_worker,
    put_to_sleep,
    quick,
    start_process,
)


@pytest.fixture
def fake() -> Iterator[RunningFake]:
    """An instant fake engine."""
    with fake_engine.running() as running:
        yield running


def life_of(process: subprocess.Popen[bytes]) -> Life:
    output, _ = process.communicate()
    return msgspec.json.decode(output, type=Life)


def last_worker(ledger: Ledger, store: ObjectStore, settings: Settings, fake: RunningFake) -> Worker:
    """A worker that waits for the chunk of another, however long that keeps it, and leaves once the batch is run."""
    patient = msgspec.structs.replace(settings, worker=msgspec.structs.replace(settings.worker, warm_seconds=600.0))

    def leave(_batch_id: str) -> None:
        ledger.workers.ask_to_leave(worker.worker_id)

    worker = make_worker(ledger, store, patient, attached(fake.url), on_batch_drained=leave)
    return worker


def saved(ledger: Ledger, batch_id: str) -> int:
    """How many requests of a batch's chunks the checkpoints hold."""
    return sum(part.requests for chunk in ledger.chunks.of(batch_id) for part in chunk.parts)


def test_1_killed_worker_costs_only_what_was_in_flight(
    sqlite_url: str, store: ObjectStore, settings_file: Path, settings: Settings
) -> None:
    ledger = Ledger.open(sqlite_url, lease_seconds=3.0)
    batch = make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(200)]])
    short = {"lease_seconds": 3.0, "model": {"max_in_flight": 8}}
    with fake_engine.running("--delay", "0.05") as fake:
        # From the start: were it told half-way, the worker might be through before it hears of it.
        fake.control(hold_after=100)
        with start_process(settings_file, sqlite_url, fake.url, **short) as process:
            wait_until(lambda: saved(ledger, batch.batch_id) == 100, "half of the requests are answered, and saved")
            wait_until(lambda: fake.stats().in_flight == 8, "all places are taken by requests without an answer")
            process.kill()
        wait_until(lambda: fake.stats().in_flight == 0, "the engine has noticed")
        fake.control()
        assert last_worker(ledger, store, quick(settings, **short), fake).run().chunks == 1
        assert fake.stats().calls == 200 + 8
    lines = lines_of(ledger, store, batch.batch_id)
    assert sorted(lines) == list(range(200))
    assert all(line["error"] is None for line in lines.values())
    (chunk,) = ledger.chunks.of(batch.batch_id)
    assert (chunk.state, chunk.token) == (ChunkState.COMMITTED, 2)


@pytest.mark.parametrize("refusal", [(429, ""), (503, ""), (503, "1"), (401, "")])
def test_7_an_engine_that_refuses_for_a_while_is_retried_with_pauses_and_no_request_fails(
    sqlite_url: str, store: ObjectStore, settings: Settings, fake: RunningFake, refusal: tuple[int, str]
) -> None:
    status, retry_after = refusal
    ledger = Ledger.open(sqlite_url)
    batch = make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(100)]])
    # Four in flight, and at most three that are fed before it is clear that the engine refuses all; then single probes.
    fake.control(refuse_status=status, refuse_calls=7, retry_after=retry_after)
    report = make_worker(ledger, store, quick(settings, model={"max_in_flight": 4}), attached(fake.url)).run()
    assert report.requests == 100
    assert all(line["error"] is None for line in lines_of(ledger, store, batch.batch_id).values())
    assert fake.stats().calls == 100 + 7


def test_7_while_the_engine_refuses_the_ledger_shows_why_the_batch_waits(
    sqlite_url: str, store: ObjectStore, settings: Settings, fake: RunningFake
) -> None:
    ledger = Ledger.open(sqlite_url)
    make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(20)]])
    fake.control(refuse_status=503)
    # It stays until it is asked to leave: else it may have left, and say why, before anybody looks.
    worker = make_worker(ledger, store, quick(settings, warm_seconds=600.0), attached(fake.url))
    with in_thread(worker) as ends:
        wait_until(lambda: "overloaded" in (detail(ledger) or ""), "the reason is shown")
        fake.control()
        wait_until(lambda: detail(ledger) is None, "the reason is gone")
        ledger.workers.ask_to_leave(worker.worker_id)
    assert isinstance(ends[0], WorkerReport)


def state(ledger: Ledger) -> WorkerState | None:
    workers = ledger.workers.of_models([MODEL])
    return workers[0].state if workers else None


def detail(ledger: Ledger) -> str | None:
    workers = ledger.workers.of_models([MODEL])
    return workers[0].detail if workers else None


def test_8_a_request_that_always_gets_500_ends_as_engine_error_and_the_others_finish(
    sqlite_url: str, store: ObjectStore, settings: Settings, fake: RunningFake
) -> None:
    ledger = Ledger.open(sqlite_url)
    requests = [chat_request(index, "[[500]]" if index == 7 else f"say {index}") for index in range(100)]
    batch = make_batch(ledger, store, [requests])
    make_worker(ledger, store, quick(settings), attached(fake.url)).run()
    lines = lines_of(ledger, store, batch.batch_id)
    assert [index for index, line in lines.items() if line["error"] is not None] == [7]
    assert lines[7]["error"]["code"] == "engine_error"
    assert "tried 3 times" in lines[7]["error"]["message"]
    assert "500" in lines[7]["error"]["message"]
    assert lines[7]["response"] is None
    assert fake.stats().calls == 99 + 3


def test_a_request_whose_connection_always_breaks_ends_as_engine_error(
    sqlite_url: str, store: ObjectStore, settings: Settings, fake: RunningFake
) -> None:
    ledger = Ledger.open(sqlite_url)
    requests = [chat_request(index, "[[reset]]" if index == 2 else f"say {index}") for index in range(10)]
    batch = make_batch(ledger, store, [requests])
    make_worker(ledger, store, quick(settings), attached(fake.url)).run()
    lines = lines_of(ledger, store, batch.batch_id)
    assert {index: line["error"]["code"] for index, line in lines.items() if line["error"]} == {2: "engine_error"}


def test_9_a_worker_that_slept_past_its_lease_cannot_commit(
    ledger_url: str, store: ObjectStore, settings_file: Path, settings: Settings
) -> None:
    ledger = Ledger.open(ledger_url, lease_seconds=3.0)
    batch = make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(40)]])
    short = {"lease_seconds": 3.0, "heartbeat_seconds": 0.2, "checkpoint_seconds": 0.1}
    with (
        ExitStack() as stack,
        fake_engine.running() as slow,
        fake_engine.running() as fast,
    ):
        # Before it begins, so that it cannot have committed before it sleeps.
        slow.control(hold_after=20)
        process = stack.enter_context(start_process(settings_file, ledger_url, slow.url, **short))
        wait_until(lambda: slow.stats().answered == 20 and slow.stats().in_flight == 16, "the first worker is at it")
        put_to_sleep(process, ledger_url)
        second = last_worker(ledger, store, quick(settings, **short), fast)
        assert second.run().chunks == 1
        # What it waited for is there when it wakes up.
        slow.control()
        process.send_signal(signal.SIGCONT)
        first = life_of(process)
    assert first.report.chunks == 0
    (chunk,) = ledger.chunks.of(batch.batch_id)
    assert (chunk.state, chunk.worker_id) == (ChunkState.COMMITTED, second.worker_id)
    assert sorted(lines_of(ledger, store, batch.batch_id)) == list(range(40))


def test_11_outages_of_the_store_are_outlasted_and_nothing_is_lost(
    sqlite_url: str, store: ObjectStore, settings: Settings, fake: RunningFake
) -> None:
    ledger = Ledger.open(sqlite_url)
    batch = make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(50)]])
    flaky = FlakyStore(store, failures=3)
    report = make_worker(ledger, flaky, quick(settings), attached(fake.url)).run()
    assert flaky.left == 0
    assert report.requests == 50
    assert sorted(lines_of(ledger, store, batch.batch_id)) == list(range(50))
    assert fake.stats().calls == 50


class FlakyStore(ObjectStore):
    """A store whose first writes fail, as if it were away."""

    def __init__(self, store: ObjectStore, failures: int) -> None:
        super().__init__(store._client, store.bucket)
        self.left = failures

    def put(self, key: str, data: bytes, **options: object) -> str:
        """Fail, or write."""
        from batch_pipeline.errors import StoreError

        if self.left:
            self.left -= 1
            raise StoreError("the object store cannot be reached")
        return super().put(key, data, **options)


def test_11_the_database_may_be_restarted_under_a_worker(
    postgres_url: str, store: ObjectStore, settings: Settings
) -> None:
    import sqlalchemy as sa

    ledger = Ledger.open(postgres_url)
    batch = make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(100)]])
    admin = sa.create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    end_connections = sa.text(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with fake_engine.running("--delay", "0.1") as fake:
        worker = make_worker(Ledger.open(postgres_url), store, quick(settings), attached(fake.url))
        with in_thread(worker) as ends, admin.connect() as connection:
            for answered in (10, 40, 70):
                wait_until(lambda answered=answered: fake.stats().answered >= answered, f"{answered} answers")
                connection.execute(end_connections)
        calls = fake.stats().calls
    admin.dispose()
    assert isinstance(ends[0], WorkerReport), ends
    # Afresh: the connections of `ledger` were ended as well.
    assert sorted(lines_of(Ledger.open(postgres_url), store, batch.batch_id)) == list(range(100))
    assert calls == 100


def test_11_an_outage_of_the_database_that_is_longer_than_a_lease_costs_no_work(
    postgres_server: str, postgres_url: str, store: ObjectStore, settings: Settings
) -> None:
    import sqlalchemy as sa

    ledger = Ledger.open(postgres_url, lease_seconds=1.0)
    batch = make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(100)]])
    name = postgres_url.rpartition("/")[2]
    admin = sa.create_engine(postgres_server, isolation_level="AUTOCOMMIT")
    with fake_engine.running("--delay", "0.2") as fake:
        worker = make_worker(
            Ledger.open(postgres_url, lease_seconds=1.0),
            store,
            quick(settings, lease_seconds=1.0, heartbeat_seconds=0.2, model={"max_in_flight": 8}),
            attached(fake.url),
        )
        with in_thread(worker) as ends, admin.connect() as connection:
            wait_until(lambda: fake.stats().answered >= 10, "10 answers")
            connection.execute(sa.text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false"))
            connection.execute(
                sa.text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"), {"name": name}
            )
            began = time.monotonic()
            wait_until(lambda: time.monotonic() > began + 3.0, "three leases long")
            connection.execute(sa.text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true"))
        calls = fake.stats().calls
    admin.dispose()
    assert isinstance(ends[0], WorkerReport), ends
    assert sorted(lines_of(Ledger.open(postgres_url), store, batch.batch_id)) == list(range(100))
    assert calls == 100


def test_12_a_worker_that_cannot_start_says_why(
    ledger: Ledger, store: ObjectStore, settings: Settings, tmp_path: Path
) -> None:
    engine = child_engine(tmp_path / "engine.log", "--no-such-option")
    with pytest.raises(EngineError, match="unrecognized arguments: --no-such-option"):
        make_worker(ledger, store, quick(settings), engine).run()
    (seen,) = ledger.workers.of_models([MODEL])
    assert seen.state is WorkerState.FAILED
    assert "unrecognized arguments: --no-such-option" in (seen.detail or "")


def test_an_attached_engine_that_serves_another_model_is_told_so(
    sqlite_url: str, store: ObjectStore, settings: Settings
) -> None:
    ledger = Ledger.open(sqlite_url)
    with fake_engine.running("--model", "another") as fake, pytest.raises(EngineError, match="serves another and not"):
        make_worker(ledger, store, quick(settings), attached(fake.url)).run()


def test_an_engine_that_does_not_come_back_hands_the_work_back_with_the_reason(
    sqlite_url: str, store: ObjectStore, settings: Settings
) -> None:
    ledger = Ledger.open(sqlite_url)
    batch = make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(100)]])
    with fake_engine.running("--delay", "0.1") as fake:
        fake.control(hold_after=50)
        engine = attached(fake.url)
        with in_thread(make_worker(ledger, store, quick(settings), engine)) as ends:
            wait_until(lambda: saved(ledger, batch.batch_id) > 0, "something is saved")
            # Not before: it would be the time of the first start too.
            engine._start_seconds = 1.0
            fake.process.kill()
    assert isinstance(ends[0], EngineError)
    (chunk,) = ledger.chunks.of(batch.batch_id)
    assert chunk.state is ChunkState.PENDING
    assert "the worker failed" in (chunk.last_error or "")
    assert chunk.parts


def test_15_a_short_batch_does_not_wait_for_a_long_one(sqlite_url: str, store: ObjectStore, settings: Settings) -> None:
    ledger = Ledger.open(sqlite_url)
    long = [[chat_request(100 * number + row, f"say {number} {row}") for row in range(100)] for number in range(20)]
    first = make_batch(ledger, store, long, customer="big")
    second = make_batch(ledger, store, [[chat_request(index, f"ask {index}") for index in range(10)]], customer="small")
    drained: list[str] = []
    with fake_engine.running("--delay", "0.02") as fake:
        quicker = quick(settings, model={"max_in_flight": 32})
        workers = [
            make_worker(ledger, store, quicker, attached(fake.url), on_batch_drained=drained.append) for _ in range(2)
        ]
        with in_thread(workers[0]), in_thread(workers[1]):
            pass
    assert drained == [second.batch_id, first.batch_id]
    assert len(lines_of(ledger, store, first.batch_id)) == 2000


def test_20_ten_errors_among_five_thousand_do_not_lower_the_concurrency(
    sqlite_url: str, store: ObjectStore, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger.open(sqlite_url)
    requests = [
        chat_request(index, f"[[500]] {index}" if index % 500 == 250 else f"say {index}") for index in range(5000)
    ]
    batch = make_batch(ledger, store, [requests[start : start + 1000] for start in range(0, 5000, 1000)])
    # This engine answers only while it is full: a worker that feeds less after an error starves it.
    with fake_engine.running("--want", "32", "--want-until", "4900") as fake:
        make_worker(ledger, store, quick(settings, model={"max_in_flight": 32}), attached(fake.url)).run()
        stats = fake.stats()
    lines = lines_of(ledger, store, batch.batch_id)
    assert sum(line["error"] is not None for line in lines.values()) == 10
    assert stats.calls == 4990 + 30
    assert stats.starved == 0
    # Nor do their retries, which come together at the end, pass for an engine that fails.
    assert "next try in" not in caplog.text


def test_the_engine_never_drains_between_chunks(sqlite_url: str, store: ObjectStore, settings: Settings) -> None:
    ledger = Ledger.open(sqlite_url)
    chunks = [[chat_request(50 * number + row, f"say {number} {row}") for row in range(50)] for number in range(30)]
    make_batch(ledger, store, chunks)
    # This engine answers only while it is full: a worker that waits for the end of a chunk starves it.
    with fake_engine.running("--want", "16", "--want-until", "1490") as fake:
        report = make_worker(ledger, store, quick(settings, model={"max_in_flight": 16}), attached(fake.url)).run()
        stats = fake.stats()
    assert (report.chunks, report.requests) == (30, 1500)
    assert (stats.max_in_flight, stats.starved) == (16, 0)


def test_sigterm_saves_what_is_finished_hands_back_the_rest_and_the_next_worker_runs_only_that(
    sqlite_url: str, store: ObjectStore, settings_file: Path, settings: Settings
) -> None:
    ledger = Ledger.open(sqlite_url)
    requests = [chat_request(index, f"[[slow:100]] {index}" if index == 5 else f"say {index}") for index in range(100)]
    batch = make_batch(ledger, store, [requests])
    with fake_engine.running("--delay", "0.1") as fake:
        with start_process(settings_file, sqlite_url, fake.url, grace_seconds=5.0, checkpoint_seconds=60.0) as process:
            wait_until(lambda: fake.stats().answered >= 30, "some are answered")
            process.terminate()
            life = life_of(process)
        assert process.returncode == 0
        assert life.report.ended is Ended.SIGNAL
        (chunk,) = ledger.chunks.of(batch.batch_id)
        assert chunk.state is ChunkState.PENDING
        done = saved(ledger, batch.batch_id)
        # All but the slow one that had been fed were let finish, and kept.
        assert done == fake.stats().calls - 1
        (seen,) = ledger.workers.of_models([MODEL])
        assert (seen.state, seen.detail) == (WorkerState.STOPPED, "ended: signal")
    plain = [chat_request(index, f"say {index}") for index in range(100)]
    store.put(chunk.input_key, chunk_input(plain))
    with fake_engine.running() as fake:
        make_worker(ledger, store, quick(settings), attached(fake.url)).run()
        assert fake.stats().calls == 100 - done
    assert sorted(lines_of(ledger, store, batch.batch_id)) == list(range(100))


def test_a_worker_gives_back_the_signal_handlers_that_it_found(
    sqlite_url: str, store: ObjectStore, settings: Settings, fake: RunningFake
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    make_worker(Ledger.open(sqlite_url), store, quick(settings), attached(fake.url)).run()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_cancelled_batch_stops_at_once_and_keeps_what_is_finished(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    requests = [chat_request(index, f"say {index}" if index < 5 else f"[[hang]] {index}") for index in range(25)]
    batch = make_batch(ledger, store, [requests])
    drained: list[str] = []
    with fake_engine.running() as fake:
        worker = make_worker(ledger, store, quick(settings), attached(fake.url), on_batch_drained=drained.append)
        with in_thread(worker) as ends:
            wait_until(lambda: fake.stats().answered == 5 and fake.stats().in_flight == 16, "the rest hangs")
            ledger.batches.cancel(batch.batch_id)
    assert isinstance(ends[0], WorkerReport)
    assert ends[0].ended is Ended.IDLE
    (chunk,) = ledger.chunks.of(batch.batch_id)
    assert chunk.state is ChunkState.CANCELLED
    assert saved(ledger, batch.batch_id) == 5
    assert drained == [batch.batch_id]
    assert ledger.batches.get(batch.batch_id).status is BatchStatus.FINALIZING


def test_6_nothing_of_a_batch_past_its_deadline_is_fed(
    sqlite_url: str, store: ObjectStore, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SteppedClock()
    ledger = Ledger.open(sqlite_url, clock=clock)
    heartbeat, between_beats = ledger.workers.heartbeat, threading.Lock()

    def beat(*told: Any) -> HeartbeatReply:
        with between_beats:
            return heartbeat(*told)

    monkeypatch.setattr(ledger.workers, "heartbeat", beat)
    requests = [chat_request(index, f"say {index}" if index < 50 else f"[[hang]] {index}") for index in range(200)]
    batch = make_batch(ledger, store, [requests], window_seconds=3600)
    drained: list[str] = []
    with fake_engine.running() as fake:
        worker = make_worker(ledger, store, quick(settings), attached(fake.url), on_batch_drained=drained.append)
        with in_thread(worker):
            wait_until(lambda: fake.stats().answered == 50 and fake.stats().in_flight == 16, "the rest hangs")
            # At one moment: told of the deadline in between, the worker hands back before the batch expires.
            with between_beats:
                clock.advance(3601)
                ledger.batches.expire_due()
        assert fake.stats().calls == 50 + 16
    (chunk,) = ledger.chunks.of(batch.batch_id)
    assert chunk.state is ChunkState.EXPIRED
    assert saved(ledger, batch.batch_id) == 50
    assert drained == [batch.batch_id]


def test_a_worker_that_is_asked_to_leave_hands_back(sqlite_url: str, store: ObjectStore, settings: Settings) -> None:
    ledger = Ledger.open(sqlite_url)
    batch = make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(500)]])
    with fake_engine.running() as fake:
        # Held until it was asked: it cannot be through before, and what is in flight then ends within the grace.
        fake.control(hold_after=100)
        worker = make_worker(ledger, store, quick(settings), attached(fake.url))
        with in_thread(worker) as ends:
            wait_until(lambda: saved(ledger, batch.batch_id) > 0, "it works")
            ledger.workers.ask_to_leave(worker.worker_id)
            wait_until(lambda: state(ledger) is WorkerState.DRAINING, "it has heard of it")
            fake.control()
        assert isinstance(ends[0], WorkerReport)
        assert ends[0].ended is Ended.ASKED
        assert saved(ledger, batch.batch_id) == fake.stats().calls
    assert ledger.chunks.of(batch.batch_id)[0].state is ChunkState.PENDING


def test_a_worker_leaves_at_the_end_of_its_lifetime(sqlite_url: str, store: ObjectStore, settings: Settings) -> None:
    ledger = Ledger.open(sqlite_url)
    make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(500)]])
    with fake_engine.running("--delay", "0.1") as fake:
        report = make_worker(ledger, store, quick(settings, lifetime_seconds=1.0), attached(fake.url)).run()
    assert report.ended is Ended.LIFETIME


def test_a_request_without_an_answer_in_time_ends_as_request_timeout_while_others_are_answered(
    sqlite_url: str, store: ObjectStore, settings: Settings
) -> None:
    ledger = Ledger.open(sqlite_url)
    requests = [chat_request(index, "[[hang]]" if index == 0 else f"say {index}") for index in range(100)]
    batch = make_batch(ledger, store, [requests])
    with fake_engine.running("--delay", "0.1") as fake:
        impatient = quick(settings, request_timeout_seconds=5.0, model={"max_in_flight": 4})
        make_worker(ledger, store, impatient, attached(fake.url)).run()
        assert fake.stats().calls == 100
    lines = lines_of(ledger, store, batch.batch_id)
    assert {index: line["error"]["code"] for index, line in lines.items() if line["error"]} == {0: "request_timeout"}


@pytest.mark.parametrize(
    ("prompt", "tries", "error"),
    [
        ("[[hang]]", (3,), "no answer within 4 s, while the engine answered other requests"),
        # Its second try has two seconds. On a machine that stands still for one, it takes the third.
        ("[[slow:1.1]] say", (2, 3), None),
    ],
)
def test_a_hanging_request_is_noticed_long_before_the_ceiling_and_a_slow_one_gets_more_time(
    *,
    prompt: str,
    tries: tuple[int, ...],
    error: str | None,
    sqlite_url: str,
    store: ObjectStore,
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = Patience.answered
    # Whatever the machine does beside it: limits follow from the slowest answer. A short one is then waited for for a
    # second, the shortest limit, then two, then four; the long ones around it for a minute.
    monkeypatch.setattr(Patience, "answered", lambda patience, _seconds, tokens: answered(patience, 0.05, tokens))
    ledger = Ledger.open(sqlite_url)
    requests = [chat_request(index, f"say {index}", 2000) for index in range(1500)]
    requests[60] = chat_request(60, prompt, 8)
    batch = make_batch(ledger, store, [requests])
    journal = tmp_path / "calls.txt"
    with fake_engine.running("--delay", "0.02", "--journal", str(journal)) as fake:
        patient = quick(
            settings,
            request_timeout_seconds=3600.0,
            least_request_timeout_seconds=1.0,
            max_request_attempts=3,
            model={"max_in_flight": 4},
        )
        make_worker(ledger, store, patient, attached(fake.url)).run()
        made = journal.read_text().splitlines().count(prompt)
        assert made in tries
        assert fake.stats().calls == 1499 + made
    line = lines_of(ledger, store, batch.batch_id)[60]
    assert (line["error"] or {}) == ({"code": "request_timeout", "message": error} if error else {})


def test_an_engine_that_hangs_is_started_again(
    sqlite_url: str, store: ObjectStore, settings: Settings, tmp_path: Path
) -> None:
    ledger = Ledger.open(sqlite_url)
    requests = [chat_request(index, "[[hang]]" if index == 2 else f"say {index}") for index in range(3)]
    batch = make_batch(ledger, store, [requests])
    engine = child_engine(tmp_path / "engine.log")
    impatient = quick(settings, request_timeout_seconds=3.0, model={"max_in_flight": 1}, max_request_attempts=2)
    make_worker(ledger, store, impatient, engine).run()
    lines = lines_of(ledger, store, batch.batch_id)
    assert {index: line["error"]["code"] for index, line in lines.items() if line["error"]} == {2: "request_timeout"}


def test_an_unreadable_chunk_is_given_up_after_some_attempts_and_the_next_one_runs(
    sqlite_url: str, store: ObjectStore, settings: Settings, fake: RunningFake
) -> None:
    ledger = Ledger.open(sqlite_url, max_failures=2)
    batch = make_batch(ledger, store, [[chat_request(0, "say 0")], [chat_request(1, "say 1")]])
    store.put(ledger.chunks.of(batch.batch_id)[0].input_key, b"not Parquet")
    make_worker(ledger, store, quick(settings), attached(fake.url)).run()
    first, second = ledger.chunks.of(batch.batch_id)
    assert (first.state, second.state) == (ChunkState.FAILED, ChunkState.COMMITTED)
    assert "cannot be read" in (first.last_error or "")


def test_a_dedicated_worker_serves_its_batches_only(
    sqlite_url: str, store: ObjectStore, settings: Settings, fake: RunningFake
) -> None:
    ledger = Ledger.open(sqlite_url)
    other = make_batch(ledger, store, [[chat_request(0, "say 0")]])
    own = make_batch(ledger, store, [[chat_request(0, "say 0")]])
    worker = make_worker(ledger, store, quick(settings), attached(fake.url), only_batches=[own.batch_id])
    assert worker.run().chunks == 1
    assert ledger.batches.get(own.batch_id).status is BatchStatus.FINALIZING
    assert ledger.batches.get(other.batch_id).status is BatchStatus.IN_PROGRESS


def test_a_callers_fault_ends_the_worker_and_is_raised(
    sqlite_url: str, store: ObjectStore, settings: Settings, fake: RunningFake
) -> None:
    ledger = Ledger.open(sqlite_url)
    make_batch(ledger, store, [[chat_request(0, "say 0")]])

    def broken(batch_id: str) -> None:
        raise RuntimeError(f"no record of {batch_id}")

    with pytest.raises(RuntimeError, match="no record of batch_"):
        make_worker(ledger, store, quick(settings), attached(fake.url), on_batch_drained=broken).run()


def test_a_late_write_of_a_lost_lease_is_refused_by_the_ledger(
    ledger: Ledger, store: ObjectStore, settings: Settings, fake: RunningFake
) -> None:
    batch = make_batch(ledger, store, [[chat_request(0, "say 0")]])
    (stale,) = ledger.chunks.lease("somebody", MODEL, 1)
    ledger.chunks.release(stale.ref, "gone")
    make_worker(ledger, store, quick(settings), attached(fake.url)).run()
    with pytest.raises(LeaseLost):
        ledger.chunks.release(stale.ref, "late")
    assert list(lines_of(ledger, store, batch.batch_id)) == [0]


def test_what_a_child_engine_leaves_behind_ends_with_the_worker(
    sqlite_url: str, store: ObjectStore, settings_file: Path, tmp_path: Path
) -> None:
    import psutil

    ledger = Ledger.open(sqlite_url)
    journal = tmp_path / "calls.txt"
    make_batch(ledger, store, [[chat_request(index, f"[[hang]] {index}") for index in range(20)]])
    process = start_process(settings_file, sqlite_url, f"child:{journal}")
    wait_until(lambda: journal.is_file() and bool(journal.read_text()), "the engine runs")
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 2, "the guard and the engine"
    process.kill()
    process.wait()
    gone, alive = psutil.wait_procs(family, timeout=30)
    assert (len(gone), alive) == (2, [])
