"""The worker on a real store and both ledgers, with a fake engine in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from batch_pipeline.errors import LeaseLost
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import (
    BatchStatus,
    ChunkResult,
    ChunkState,
    CommitReply,
    Lease,
    LeaseRef,
    WorkerState,
)
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from batch_pipeline.worker import Ended
from tests.fakes import engine as fake_engine
from tests.fakes.batches import chat_request, make_batch
from tests.fakes.engine import RunningFake
from tests.fakes.faults import Faults
from tests.fakes.waiting import wait_until
from tests.fakes.workers import attached, child_engine, in_thread, lines_of, make_worker, quick


@pytest.fixture
def fake() -> Iterator[RunningFake]:
    """An instant fake engine."""
    with fake_engine.running() as running:
        yield running


def test_every_request_of_every_chunk_gets_its_answer(
    ledger: Ledger, store: ObjectStore, settings: Settings, fake: RunningFake
) -> None:
    chunks = [[chat_request(100 * number + row, f"say {number} {row}") for row in range(100)] for number in range(3)]
    batch = make_batch(ledger, store, chunks)
    drained: list[str] = []
    worker = make_worker(ledger, store, quick(settings), attached(fake.url), on_batch_drained=drained.append)
    report = worker.run()
    assert report.ended is Ended.IDLE
    assert (report.chunks, report.requests) == (3, 300)
    assert drained == [batch.batch_id]
    assert ledger.batches.get(batch.batch_id).status is BatchStatus.FINALIZING
    lines = lines_of(ledger, store, batch.batch_id)
    assert sorted(lines) == list(range(300))
    assert all(line["custom_id"] == f"request-{index}" for index, line in lines.items())
    assert all(line["response"]["status_code"] == 200 for line in lines.values())
    assert fake.stats().calls == 300
    (lane,) = ledger.batches.lanes(batch.batch_id)
    assert (lane.completed, lane.failed, lane.committed) == (300, 0, 3)
    assert (
        lane.input_tokens
        == report.input_tokens
        == sum(line["response"]["body"]["usage"]["prompt_tokens"] for line in lines.values())
    )
    assert lane.output_tokens == 300 * 6
    (seen,) = ledger.workers.of_models([worker_model(settings)])
    assert (seen.state, seen.detail) == (WorkerState.STOPPED, "ended: idle")


def test_a_chunk_costs_the_store_three_calls_and_the_engine_no_new_connections_however_many_requests_it_has(
    sqlite_url: str, store: ObjectStore, settings: Settings, fake: RunningFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A store that is slow for some seconds leaves the engine without work: its connections are to stay open meanwhile.
    monkeypatch.setattr("batch_pipeline.engine.client._KEEPALIVE_SECONDS", 600.0)
    ledger = Ledger.open(sqlite_url)
    chunks = [[chat_request(500 * number + row, "say") for row in range(500)] for number in range(4)]
    make_batch(ledger, store, chunks)
    # Calls are counted, and no checkpoint is due.
    counted = Faults(at_call=1_000_000)
    quiet = quick(settings, model={"max_in_flight": 16}, checkpoint_seconds=600.0)
    report = make_worker(ledger, counted.around(store), quiet, attached(fake.url)).run()
    assert (report.requests, fake.stats().calls) == (2000, 2000)
    # Its input is read; its results and their table are written.
    assert counted.calls == 3 * len(chunks)
    assert fake.stats().connections <= 16


def test_small_chunks_are_leased_and_committed_several_at_a_time(
    ledger: Ledger, store: ObjectStore, settings: Settings, fake: RunningFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [[chat_request(2 * number + row, f"say {number} {row}") for row in range(2)] for number in range(60)]
    batch = make_batch(ledger, store, chunks)
    leased: list[int] = []
    committed: list[int] = []
    lease, commit_all = ledger.chunks.lease, ledger.chunks.commit_all

    def counting_lease(*args: Any, **options: Any) -> list[Lease]:
        leases = lease(*args, **options)
        leased.extend([len(leases)] if leases else [])
        return leases

    def counting_commit(results: Mapping[LeaseRef, ChunkResult]) -> dict[LeaseRef, CommitReply | LeaseLost]:
        committed.append(len(results))
        return commit_all(results)

    monkeypatch.setattr(ledger.chunks, "lease", counting_lease)
    monkeypatch.setattr(ledger.chunks, "commit_all", counting_commit)
    many = quick(settings, model={"max_in_flight": 16}, leases=12)
    report = make_worker(ledger, store, many, attached(fake.url)).run()
    assert (report.chunks, report.requests, fake.stats().calls) == (60, 120, 120)
    assert sorted(lines_of(ledger, store, batch.batch_id)) == list(range(120))
    assert sum(leased) == sum(committed) == 60
    assert leased[0] == 1 < max(leased) <= 12
    assert len(committed) < 60


def worker_model(settings: Settings) -> str:
    (name,) = settings.models
    return name


def test_a_refused_request_is_an_error_line_with_the_engines_words_and_is_not_retried(
    ledger: Ledger, store: ObjectStore, settings: Settings, fake: RunningFake
) -> None:
    requests = [chat_request(index, "[[400]] no" if index == 3 else f"say {index}") for index in range(8)]
    batch = make_batch(ledger, store, [requests])
    make_worker(ledger, store, quick(settings), attached(fake.url)).run()
    lines = lines_of(ledger, store, batch.batch_id)
    assert lines[3]["error"] is None
    assert lines[3]["response"]["status_code"] == 400
    assert "asked for by the prompt" in lines[3]["response"]["body"]["error"]["message"]
    assert sum(line["response"]["status_code"] == 200 for line in lines.values()) == 7
    assert fake.stats().calls == 8


def test_killed_engine_is_started_again_and_only_what_was_in_flight_runs_again(
    ledger: Ledger, store: ObjectStore, settings: Settings, tmp_path: Path
) -> None:
    batch = make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(60)]])
    journal = tmp_path / "calls.txt"
    # Killed with all places taken and half of the work left, however late this test comes to that.
    options = ("--journal", str(journal))
    engine = child_engine(tmp_path / "engine.log", *options, at_first=("--hold-after", "30"))
    worker = make_worker(ledger, store, quick(settings, model={"max_in_flight": 8}), engine)
    with in_thread(worker) as ends:
        wait_until(lambda: journal.is_file() and len(journal.read_text().splitlines()) == 38, "30 answers, 8 in flight")
        kill_engine(engine.pid)
    assert getattr(ends[0], "ended", ends[0]) is Ended.IDLE
    lines = lines_of(ledger, store, batch.batch_id)
    assert sorted(lines) == list(range(60))
    assert all(line["error"] is None for line in lines.values())
    assert len(journal.read_text().splitlines()) == 60 + 8


def kill_engine(guard: int) -> None:
    """Kill -9 the process that the guard runs."""
    import psutil

    (child,) = psutil.Process(guard).children()
    child.kill()


def test_a_request_that_kills_the_engine_ends_as_engine_crash_and_its_neighbours_finish(
    ledger: Ledger, store: ObjectStore, settings: Settings, tmp_path: Path
) -> None:
    requests = [chat_request(index, "[[die]]" if index == 5 else f"say {index}") for index in range(12)]
    batch = make_batch(ledger, store, [requests])
    journal = tmp_path / "calls.txt"
    engine = child_engine(tmp_path / "engine.log", "--journal", str(journal), "--delay", "0.2")
    make_worker(ledger, store, quick(settings, model={"max_in_flight": 4}), engine).run()
    lines = lines_of(ledger, store, batch.batch_id)
    assert lines[5]["response"] is None
    assert lines[5]["error"]["code"] == "engine_crash"
    assert [index for index, line in lines.items() if line["error"] is not None] == [5]
    assert journal.read_text().splitlines().count("[[die]]") == 4  # once among others, three times alone
    assert ledger.chunks.of(batch.batch_id)[0].state is ChunkState.COMMITTED
