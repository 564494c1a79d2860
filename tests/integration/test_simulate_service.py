"""The simulator and the service are given the same work: chunks are leased in the order that was simulated.

Once by the ledger alone, which sees the simulated times; and once by a worker on a fake engine, which takes its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.leasing import Policy
from batch_pipeline.ledger.records import ChunkResult, IntakeResult, Lease, NewChunk, WorkerState
from batch_pipeline.settings import Intake, Scheduling, Settings
from batch_pipeline.simulate import OURS, POLICIES, Workload, simulate
from batch_pipeline.simulate.arrivals import SimulatedBatch, draw, weights_of
from batch_pipeline.simulate.paper import PaperLease
from batch_pipeline.simulate.workload import Customers, ListedBatch, SimulatedModel, Spread
from batch_pipeline.store import ObjectStore
from tests.fakes import engine as fake_engine
from tests.fakes.batches import chat_request, make_batch
from tests.fakes.clock import SteppedClock
from tests.fakes.ledger_values import finish, new_batch
from tests.fakes.workers import MODEL as FAKE_MODEL
from tests.fakes.workers import attached, make_worker, quick

MODEL = "m"
WORKERS = 2
SPEED_SECONDS = 5.0
"""As in `ledger.chunks`."""


def customer(name: str, answer: float, *batches: tuple[float, int, float]) -> Customers:
    """A customer of which answers have this share of max_tokens; batches of (at seconds, requests, window hours)."""
    return Customers(
        name=name,
        models={MODEL: 1.0},
        prompt_tokens=Spread(median=64.0),
        max_tokens=64,
        output_share=Spread(median=answer, most=1.0),
        batches=[ListedBatch(at_hours=at / 3600, requests=count, window_hours=window) for at, count, window in batches],
    )


@pytest.fixture
def workload() -> Workload:
    """Three customers on two workers, of which one comes back and one has a batch at risk. All times are dyadic, so
    that both sides see the same ones.
    """
    return Workload(
        name="small",
        gpus=WORKERS,
        models={
            MODEL: SimulatedModel(prompt_tokens_per_second=1024.0, output_tokens_per_second=512.0, loading_seconds=16.0)
        },
        customers=[
            customer("acme", 0.5, (0.0, 1000, 24.0), (140.5, 95, 2.0)),
            customer("bolt", 0.25, (24.5, 100, 12.0), (120.25, 33, 1.0), (150.125, 200, 6.0)),
            customer("core", 1.0, (64.75, 600, 0.05), (100.125, 50, 3.0)),
        ],
        speed_seconds=SPEED_SECONDS,
        intake=Intake(chunk_requests=10, chunk_tokens=2560),
        scheduling=Scheduling(at_risk_minutes=2.0, at_risk_share=0.25, chunks_per_worker=1),
    )


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def ledger(tmp_path: Path, clock: SteppedClock, workload: Workload) -> Iterator[Ledger]:
    policy = Policy(
        margin_seconds=workload.scheduling.at_risk_minutes * 60,
        share=workload.scheduling.at_risk_share,
        most_tokens=2.0 * workload.intake.chunk_tokens,
    )
    opened = Ledger.open(f"sqlite:///{tmp_path}/ledger.db", lease_seconds=1e6, policy=policy, clock=clock)
    yield opened
    opened.close()


class Service:
    """The ledger, with two workers that take as long as the simulated ones."""

    def __init__(self, ledger: Ledger, clock: SteppedClock, workload: Workload) -> None:
        self._ledger = ledger
        self._clock = clock
        self._start = clock.time
        self._model = workload.models[MODEL]
        self._events: list[tuple[float, int, str, Lease | SimulatedBatch | None]] = []
        self._drawn: dict[str, SimulatedBatch] = {}
        self._speeds = dict.fromkeys([f"w{number}" for number in range(WORKERS)], 0.0)
        self.leased: list[tuple[float, str, int]] = []
        for worker in self._speeds:
            ledger.workers.register(worker, MODEL, None, "here")
            ledger.workers.set_state(worker, WorkerState.READY)

    def run(self, batches: list[SimulatedBatch]) -> None:
        """Do all of it."""
        for batch in batches:
            self._plan(batch.created_at, "arrives", batch)
        for worker in self._speeds:
            self._plan(self._model.loading_seconds, worker, None)
        while self._events:
            at, _, who, what = heapq.heappop(self._events)
            self._clock.advance(self._start + at - self._clock.time)
            if isinstance(what, SimulatedBatch):
                self._submit(what)
                continue
            if what is not None:
                self._commit(who, what)
            self._lease(who, at)

    def _plan(self, at: float, who: str, what: Lease | SimulatedBatch | None) -> None:
        heapq.heappush(self._events, (at, len(self.leased) + len(self._events) + 1, who, what))

    def _submit(self, batch: SimulatedBatch) -> None:
        window = round(batch.deadline_at - batch.created_at)
        created = self._ledger.batches.create(new_batch(batch.batch_id, batch.customer, window_seconds=window))
        self._drawn[created.batch_id] = batch
        chunks = [
            NewChunk(
                chunk=number,
                model=MODEL,
                input_key=f"chunks/{number}",
                requests=batch.requests_of(number),
                first_index=number * batch.chunk_requests,
                last_index=number * batch.chunk_requests + batch.requests_of(number) - 1,
                prompt_tokens=64 * batch.requests_of(number),
                max_output_tokens=64 * batch.requests_of(number),
            )
            for number in range(batch.chunks)
        ]
        found = IntakeResult(
            total=batch.requests, invalid=0, input_sha256="0" * 64, invalid_key=None, errors=[], chunks=chunks
        )
        self._ledger.batches.record_intake(created.batch_id, found)

    def _lease(self, worker: str, at: float) -> None:
        for other, speed in self._speeds.items():
            self._ledger.workers.heartbeat(other, tokens_per_second=speed)
        for lease in self._ledger.chunks.lease(worker, MODEL, 1):
            batch = self._drawn[lease.ref.batch_id]
            self.leased.append((at, batch.batch_id, lease.ref.chunk))
            self._plan(at + lease.requests * batch.seconds_each, worker, lease)

    def _commit(self, worker: str, lease: Lease) -> None:
        batch = self._drawn[lease.ref.batch_id]
        self._speeds[worker] = batch.real_each / batch.seconds_each
        result = ChunkResult(
            result_key=f"{lease.ref}/results.jsonl",
            lines_key=f"{lease.ref}/lines.parquet",
            output_bytes=100,
            error_bytes=0,
            sha256="0" * 64,
            completed=lease.requests,
            failed=0,
            input_tokens=64 * lease.requests,
            cached_tokens=0,
            output_tokens=round(batch.output_tokens) * lease.requests,
            engine_version="fake-1",
            model_version="1",
        )
        if self._ledger.chunks.commit(lease.ref, result).batch_drained:
            finish(self._ledger, lease.ref.batch_id)


def test_the_service_leases_chunks_in_the_order_that_was_simulated(
    workload: Workload, ledger: Ledger, clock: SteppedClock
) -> None:
    simulated: list[tuple[float, str, int]] = []

    def observe(now: float, lease: PaperLease) -> None:
        simulated.append((now, lease.batch.batch_id, lease.chunk))

    report = simulate(workload, POLICIES[OURS], observe=observe)
    assert (report.met, report.expired) == (report.batches, 0)
    # The help for the batch at risk is a part of what is compared: without it the order is another one.
    unhelped: list[tuple[float, str, int]] = []
    simulate(
        workload,
        POLICIES["no-at-risk"],
        observe=lambda now, lease: unhelped.append((now, lease.batch.batch_id, lease.chunk)),
    )
    assert unhelped != simulated
    service = Service(ledger, clock, workload)
    service.run(draw(workload))
    assert len(simulated) == sum(batch.chunks for batch in draw(workload))
    assert service.leased == simulated


ANSWER_TOKENS = 6
"""Of each answer of the fake engine."""
PROMPT_TOKENS = 2 + 4
"""Of "say it", as the fake engine counts them."""


def of_the_fake_engine(name: str, weight: float, *batches: tuple[float, int, float]) -> Customers:
    """A customer whose requests cost on paper what they cost in the fake engine; batches as in `customer`."""
    return msgspec.structs.replace(
        customer(name, 1.0, *batches),
        weight=weight,
        models={FAKE_MODEL: 1.0},
        prompt_tokens=Spread(median=float(PROMPT_TOKENS)),
        max_tokens=ANSWER_TOKENS,
    )


def test_a_worker_runs_chunks_in_the_order_that_was_simulated(
    sqlite_url: str, store: ObjectStore, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, deadlines within a customer, one that comes late and one that comes back."""
    workload = Workload(
        name="ordered",
        gpus=1,
        models={
            FAKE_MODEL: SimulatedModel(
                prompt_tokens_per_second=64.0, output_tokens_per_second=64.0, loading_seconds=16.0
            )
        },
        customers=[
            of_the_fake_engine("acme", 1.0, (0.0, 60, 24.0), (0.0, 40, 12.0)),
            of_the_fake_engine("bolt", 3.0, (0.0, 90, 20.0), (0.0, 45, 6.0)),
            of_the_fake_engine("core", 1.0, (25.3, 20, 18.0), (25.3, 10, 9.0), (39.7, 33, 8.0)),
        ],
        intake=Intake(chunk_requests=5, chunk_tokens=5 * (PROMPT_TOKENS + ANSWER_TOKENS)),
        scheduling=Scheduling(chunks_per_worker=1),
    )
    times: list[float] = []
    simulated: list[tuple[str, str, int]] = []

    def observe(now: float, lease: PaperLease) -> None:
        times.append(now)
        simulated.append((lease.batch.customer, lease.batch.batch_id, lease.chunk))

    report = simulate(workload, POLICIES[OURS], observe=observe)
    assert (report.met, report.expired) == (report.batches, 0)

    ledger = Ledger.open(sqlite_url, clock=SteppedClock())
    to_come = draw(workload)
    names: dict[str, str] = {}
    leased: list[tuple[str, str, int]] = []
    lease_of_the_ledger = ledger.chunks.lease

    def lease(*args: Any, **options: Any) -> list[Lease]:
        # On paper the first so many leases were given before it came.
        while to_come and sum(at < to_come[0].created_at for at in times) <= len(leased):
            batch = to_come.pop(0)
            names[submit(ledger, store, batch)] = batch.batch_id
            ledger.customers.set(batch.customer, weight=weights_of(workload)[batch.customer], limits={})
        found = lease_of_the_ledger(*args, **options)
        leased.extend((each.customer, names[each.ref.batch_id], each.ref.chunk) for each in found)
        return found

    monkeypatch.setattr(ledger.chunks, "lease", lease)
    with fake_engine.running() as fake:
        made = make_worker(ledger, store, quick(settings, leases=1), attached(fake.url)).run()
    assert made.chunks == len(simulated) == sum(batch.chunks for batch in draw(workload))
    assert leased == simulated
    ledger.close()


def submit(ledger: Ledger, store: ObjectStore, batch: SimulatedBatch) -> str:
    """Make a batch of the service of a simulated one; return its id there."""
    requests = [
        msgspec.structs.replace(chat_request(index, "say it", ANSWER_TOKENS), prompt_tokens=PROMPT_TOKENS)
        for index in range(batch.requests)
    ]
    size = batch.chunk_requests
    chunks = [requests[first : first + size] for first in range(0, len(requests), size)]
    window = round(batch.deadline_at - batch.created_at)
    return make_batch(ledger, store, chunks, customer=batch.customer, window_seconds=window).batch_id
