"""Any order of events over the whole service, with crashes at any call, ends with exactly one result per request.

Real parts: the object store, the ledger on SQLite and on Postgres, intake, merge, outbox and verify. Only the workers'
engine is played: what it answers follows from the request. A crash is a `Killed` at the k-th call to store or ledger,
before it happens or after (its answer is lost); what was begun then is begun again by whoever comes next.

After each step: statuses never go back (I6), the lanes are the sums of the chunks, tokens only grow and no two leases
hold one chunk (I3), committed results never change (I4), ended batches have their files and counts (I6, I7), nothing of
one customer lies below another's folder (I8), every wait has a name (I9). At the end every batch ends, `verify` holds
(I1, I2, I5, I7), and every answer in the files is the one that its request must get.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import settings as limits
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from batch_pipeline import ids
from batch_pipeline.errors import LeaseLost, NotAllowedInState, NotFound
from batch_pipeline.intake import drop
from batch_pipeline.intake.chunks import write_chunks
from batch_pipeline.intake.validate import validate
from batch_pipeline.ledger import Ledger, schema
from batch_pipeline.ledger.records import Batch, BatchStatus, ChunkResult, ChunkState, Lease
from batch_pipeline.results import outbox
from batch_pipeline.results.merge import merge
from batch_pipeline.results.status import current_status
from batch_pipeline.results.verify import verify
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys
from batch_pipeline.wire.chunk_files import ChunkRequest, FinishedRequest, read_part, read_requests
from tests.fakes import answered
from tests.fakes.clock import SteppedClock
from tests.fakes.faults import Faults, Killed
from tests.fakes.intake_files import BAD, intake_settings, request_line
from tests.fakes.small_model import NAME, write_model

CUSTOMERS = ("acme", "bolt")
WORKERS = ("w1", "w2")
LEASE_SECONDS = 60.0
_RANK = {BatchStatus.VALIDATING: 0, BatchStatus.IN_PROGRESS: 1, BatchStatus.CANCELLING: 2, BatchStatus.FINALIZING: 3}

any_of = st.integers(min_value=0, max_value=10_000)
crash = st.one_of(st.none(), st.tuples(st.integers(0, 12), st.booleans()))
"""At which call the process dies, and whether that call still happens; None: it does not."""


class ServiceMachine(RuleBasedStateMachine):
    """Customers, the sensors' work, two workers, operators, time; in any order.

    No rule has a precondition: what is there to do depends on the store's times and keys, and hypothesis wants its
    choices to depend on nothing. A rule with nothing to do does nothing.
    """

    def __init__(self, ledger: Ledger, store: ObjectStore, configured: Settings, clock: SteppedClock) -> None:
        super().__init__()
        _empty(ledger, store)
        self.ledger, self.store, self.settings, self.clock = ledger, store, configured, clock
        self.drops = 0
        self.held: list[tuple[str, Lease, list[FinishedRequest]]] = []
        self.seen: dict[str, Batch] = {}
        self.tokens: Counter[tuple[str, int]] = Counter()
        self.committed: dict[tuple[str, int], ChunkResult] = {}

    happened: ClassVar[Counter[str]] = Counter()
    """In all examples: so that a machine which does nothing is found out."""

    def _try(self, crash: tuple[int, bool] | None, work: Callable[[Any, Any], object]) -> bool:
        """Do a piece of work in a process that may die on the way; return whether it came to its end."""
        if crash is None:
            work(self.ledger, self.store)
            return True
        faults = Faults(crash[0], after=crash[1])
        try:
            work(faults.around(self.ledger), faults.around(self.store))
        except Killed:
            self.happened["killed"] += 1
            return False
        return True

    # What happens.

    @initialize(sizes=st.lists(st.integers(2, 9), min_size=1, max_size=2))
    def files_are_dropped(self, sizes: list[int]) -> None:
        for number, size in enumerate(sizes):
            self.a_file_is_dropped(CUSTOMERS[number], size, False, False)
        self.drops_are_taken(None)
        self.intake_runs(0, None)

    @rule(customer=st.sampled_from(CUSTOMERS), size=st.integers(0, 9), bad=st.booleans(), again=st.booleans())
    def a_file_is_dropped(self, customer: str, size: int, bad: bool, again: bool) -> None:
        self.drops += not again
        lines = [request_line(number) for number in range(size)]
        if bad:
            lines[1:1] = [BAD, b"", request_line(0)]
        self.store.put(keys.inbox(customer, f"file-{self.drops % 4}"), b"".join(line + b"\n" for line in lines))

    @rule(crash=crash)
    def drops_are_taken(self, crash: tuple[int, bool] | None) -> None:
        self._try(
            crash,
            lambda ledger, store: drop.take_drops(
                ledger=ledger, store=store, settings=self.settings, limit=10, chance=random.Random(0)
            ),
        )

    @rule(which=any_of, crash=crash)
    def intake_runs(self, which: int, crash: tuple[int, bool] | None) -> None:
        waiting = self.ledger.batches.awaiting_intake(10)
        if not waiting:
            return
        batch_id = waiting[which % len(waiting)].batch_id

        def work(ledger: Any, store: Any) -> None:
            for step in (validate, write_chunks):
                step(batch_id, ledger=ledger, store=store, settings=self.settings, run_id="intake")

        if self._try(crash, work) and which % 3 == 0:
            work(self.ledger, self.store)  # delivered twice

    @rule(worker=st.sampled_from(WORKERS), limit=st.integers(1, 3), crash=crash)
    def a_worker_leases(self, worker: str, limit: int, crash: tuple[int, bool] | None) -> None:
        got: list[Lease] = []
        if self._try(crash, lambda ledger, _: got.extend(ledger.chunks.lease(worker, NAME, limit, run_id="run"))):
            self.held += [(worker, lease, _kept(lease, self.store)) for lease in got]

    @rule(worker=st.sampled_from(WORKERS), crash=crash)
    def a_worker_reports_itself(self, worker: str, crash: tuple[int, bool] | None) -> None:
        refs = [lease.ref for owner, lease, _ in self.held if owner == worker]
        self._try(crash, lambda ledger, _: ledger.workers.heartbeat(worker, refs))

    @rule(which=any_of, count=st.integers(1, 3), crash=crash)
    def requests_finish_and_are_checkpointed(self, which: int, count: int, crash: tuple[int, bool] | None) -> None:
        if not self.held:
            return
        _, lease, finished = self._held(which)
        done = {result.index for result in finished}
        new = [_result(lease, request) for request in _requests(lease, self.store) if request.index not in done][:count]
        if not new:
            return
        with suppress(LeaseLost):
            if self._try(crash, lambda ledger, store: answered.checkpoint(ledger, store, lease, new)):
                finished += new

    @rule(which=any_of, crash=crash, twice=st.booleans())
    def a_chunk_is_committed(self, which: int, crash: tuple[int, bool] | None, twice: bool) -> None:
        if not self.held:
            return
        _, lease, finished = self._held(which)
        done = {result.index: result for result in finished}
        results = [done.get(request.index) or _result(lease, request) for request in _requests(lease, self.store)]

        def work(ledger: Any, store: Any) -> None:
            made = answered.write_result(store, lease, results)
            for _ in range(1 + twice):  # its acknowledgement was lost
                ledger.chunks.commit(lease.ref, made)

        with suppress(LeaseLost):
            self._try(crash, work)

    @rule(which=any_of, failed=st.booleans(), crash=crash)
    def a_chunk_is_handed_back(self, which: int, failed: bool, crash: tuple[int, bool] | None) -> None:
        if not self.held:
            return
        _, lease, _ = self._held(which)
        with suppress(LeaseLost):
            self._try(crash, lambda ledger, _: ledger.chunks.release(lease.ref, "asked to leave", failed))

    @rule(which=any_of, crash=crash)
    def a_batch_is_cancelled(self, which: int, crash: tuple[int, bool] | None) -> None:
        batches = self.ledger.batches.recent()
        if not batches:
            return
        batch = batches[which % len(batches)]
        stranger = CUSTOMERS[batch.customer == CUSTOMERS[0]]
        with pytest.raises(NotFound):
            self.ledger.batches.cancel(batch.batch_id, customer=stranger)
        with suppress(NotAllowedInState):
            self._try(crash, lambda ledger, _: ledger.batches.cancel(batch.batch_id, customer=batch.customer))

    @rule(seconds=st.sampled_from([1.0, 30.0, 61.0, 700.0, 40_000.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(crash=crash)
    def the_sensor_looks_around(self, crash: tuple[int, bool] | None) -> None:
        def work(ledger: Any, store: Any) -> None:
            ledger.chunks.expire_leases()
            ledger.batches.expire_due()
            ledger.batches.settle_all()
            outbox.publish_due(ledger=ledger, store=store, settings=self.settings)

        self._try(crash, work)

    @rule(which=any_of, crash=st.one_of(st.none(), st.tuples(st.integers(0, 30), st.booleans())))
    def a_merge_runs(self, which: int, crash: tuple[int, bool] | None) -> None:
        waiting = self.ledger.batches.awaiting_merge(10)
        if not waiting:
            return
        batch_id = waiting[which % len(waiting)].batch_id

        def work(ledger: Any, store: Any) -> None:
            merge(batch_id, ledger=ledger, store=store, settings=self.settings, run_id="merge")
            outbox.deliver(batch_id, ledger=ledger, store=store, settings=self.settings)

        self._try(crash, work)

    # What holds after each of these.

    @invariant()
    def everything_holds(self) -> None:
        for batch in self.ledger.batches.recent():
            self._never_goes_backwards(batch)
            self._chunks_are_true(batch)
            final = batch.status.is_final
            ends = batch.completed + batch.failed + batch.expired + batch.cancelled + batch.invalid
            assert (batch.manifest_key is not None) == final
            assert not final or batch.total == ends
            assert (current_status(batch.batch_id, ledger=self.ledger, settings=self.settings).reason is None) == final

    def _never_goes_backwards(self, batch: Batch) -> None:
        before = self.seen.get(batch.batch_id)
        if before is not None:
            assert _RANK.get(batch.status, 4) >= _RANK.get(before.status, 4)
            assert batch.input_sha256 == before.input_sha256 or before.input_sha256 is None
            if before.status.is_final:
                assert batch == before
        self.seen[batch.batch_id] = batch

    def _chunks_are_true(self, batch: Batch) -> None:
        chunks = self.ledger.chunks.of(batch.batch_id)
        if batch.input_sha256 is not None:
            assert batch.total == batch.invalid + sum(chunk.requests for chunk in chunks)
        else:
            assert not chunks
        for chunk in chunks:
            name = (batch.batch_id, chunk.chunk)
            assert chunk.token >= self.tokens[name]
            self.tokens[name] = chunk.token
            assert (chunk.result is not None) == (chunk.state == ChunkState.COMMITTED)
            if chunk.result is not None:
                self.happened["committed"] += name not in self.committed
                assert self.committed.setdefault(name, chunk.result) == chunk.result
            else:
                assert name not in self.committed
        for lane in self.ledger.batches.lanes(batch.batch_id):
            states = Counter(chunk.state for chunk in chunks)
            assert (lane.pending, lane.leased) == (states[ChunkState.PENDING], states[ChunkState.LEASED])
            assert lane.committed == states[ChunkState.COMMITTED]

    def teardown(self) -> None:
        """Whatever has happened, the sensors alone bring every batch to its end, with files that prove themselves."""
        self.clock.advance(1)
        while self._settle():
            self.everything_holds()
        for batch in self.ledger.batches.recent():
            assert batch.status.is_final
            proof = verify(batch.batch_id, ledger=self.ledger, store=self.store)
            assert proof.holds, proof.problems
            self.happened["verified"] += 1
            self._answers_are_those_of_their_requests(batch)
        assert [*self.store.list(keys.INBOX)] == []
        self._outbox_is_each_customers_own()

    def _settle(self) -> bool:
        """One round of the sensors after the last deadline; return whether there was anything to do."""
        self.drops_are_taken(None)
        while self.ledger.batches.awaiting_intake(1):
            self.intake_runs(1, None)
        self.clock.advance(100_000.0)
        self.the_sensor_looks_around(None)
        while self.ledger.batches.awaiting_merge(1):
            self.a_merge_runs(0, None)
        self.the_sensor_looks_around(None)
        return bool(self.ledger.moments.publishable()) or any(True for _ in self.store.list(keys.INBOX))

    def _answers_are_those_of_their_requests(self, batch: Batch) -> None:
        source = self.store.get(batch.input_key).splitlines()
        if batch.output_key is None:
            return
        for line in self.store.get(batch.output_key).splitlines():
            found = json.loads(line)
            index = ids.index_of(batch.batch_id, found["id"])
            assert index is not None
            assert found["custom_id"] == json.loads(source[index])["custom_id"]
            assert found["response"]["body"]["answer"] == f"{batch.customer} {found['custom_id']}"

    def _outbox_is_each_customers_own(self) -> None:
        for info in self.store.list(keys.OUTBOX):
            customer, _, rest = info.key.removeprefix(keys.OUTBOX).partition("/")
            if rest.endswith("status.json"):
                document = json.loads(self.store.get(info.key))
                assert document["customer"] == customer
                assert document["status"] in ("completed", "failed", "expired", "cancelled")
            elif rest.endswith("output.jsonl"):
                assert all(
                    json.loads(line)["response"]["body"]["answer"].startswith(f"{customer} ")
                    for line in self.store.get(info.key).splitlines()
                )

    def _held(self, which: int) -> tuple[str, Lease, list[FinishedRequest]]:
        """The newest leases are the likeliest, so that most of what happens is not about stale ones."""
        return self.held[-1 - which % min(len(self.held), 4)]


def _requests(lease: Lease, store: ObjectStore) -> list[ChunkRequest]:
    return read_requests(store.get(lease.input_key))


def _kept(lease: Lease, store: ObjectStore) -> list[FinishedRequest]:
    found: dict[int, FinishedRequest] = {}
    for part in lease.parts:
        for result in read_part(store.get(part.key)):
            found.setdefault(result.index, result)
    return list(found.values())


def _result(lease: Lease, request: ChunkRequest) -> FinishedRequest:
    """What the engine answers: it names the customer and the request; a refusal for every fifth."""
    if request.index % 5 == 4:
        plain = answered.refusal(lease.ref.batch_id, request.index)
    else:
        plain = answered.answer(lease.ref.batch_id, request.index)
    line = json.loads(plain.line)
    line["custom_id"] = request.custom_id
    if not plain.is_error:
        line["response"]["body"]["answer"] = f"{lease.customer} {request.custom_id}"
    return msgspec.structs.replace(plain, line=json.dumps(line).encode() + b"\n")


def _empty(ledger: Ledger, store: ObjectStore) -> None:
    with ledger._database.write() as tx:
        for table in reversed(schema.metadata.sorted_tables):
            if table is not schema.schema_info:
                tx.connection.execute(table.delete())
    for info in [*store.list("")]:
        store.delete(info.key)


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def stepped_ledger(ledger_url: str, clock: SteppedClock) -> Iterator[Ledger]:
    ledger = Ledger.open(ledger_url, lease_seconds=LEASE_SECONDS, max_failures=3, clock=clock)
    yield ledger
    ledger.close()


def test_any_order_of_events_and_crashes_ends_with_exactly_one_result_per_request(
    stepped_ledger: Ledger,
    clock: SteppedClock,
    store: ObjectStore,
    settings: Settings,
    tmp_path: Path,
) -> None:
    configured = intake_settings(settings, write_model(tmp_path / "model"), tmp_path / "scratch", chunk_requests=3)

    class Machine(ServiceMachine):
        def __init__(self) -> None:
            super().__init__(stepped_ledger, store, configured, clock)

    ServiceMachine.happened.clear()
    run_state_machine_as_test(Machine, settings=_LIMITS)
    assert min(ServiceMachine.happened[what] for what in ("killed", "committed", "verified")) > 0


_LIMITS = limits(
    max_examples=10,
    derandomize=True,  # the same few examples each time, so that what they reach can be required
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes here
)
