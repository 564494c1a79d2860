"""Any order of events leaves the ledger as a simple model says, its invariants unbroken, and every batch finishable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from batch_pipeline.errors import LeaseLost, NotAllowedInState, NotFound, ProofFailed
from batch_pipeline.ledger import Ledger, schema
from batch_pipeline.ledger.records import Batch, BatchStatus, Chunk, ChunkState, Lease, OnInvalid
from batch_pipeline.settings import Limits
from tests.fakes.clock import SteppedClock
from tests.fakes.ledger_model import LedgerModel, ModelBatch
from tests.fakes.ledger_values import counted, intake_result, new_batch, part_of, result_of

MODELS = ("model-a", "model-b")
WORKERS = ("w1", "w2", "w3")
LEASE_SECONDS = 60.0
MAX_FAILURES = 2
MAX_ENQUEUED_TOKENS = 500
"""Of one model: six chunks' worth, as they are made here."""
_RANK = {BatchStatus.VALIDATING: 0, BatchStatus.IN_PROGRESS: 1, BatchStatus.CANCELLING: 2, BatchStatus.FINALIZING: 3}

any_of = st.integers(min_value=0, max_value=10_000)
"""Names one of the things there are, modulo how many there are."""
mostly_not = st.integers(0, 4).map(lambda number: number == 4)


class LedgerMachine(RuleBasedStateMachine):
    """Customers, three workers, an intake, a merge and sweeps, in any order; the clock stands still between."""

    def __init__(self, ledger: Ledger, clock: SteppedClock) -> None:
        super().__init__()
        _empty(ledger)
        self.ledger = ledger
        self.clock = clock
        self.model = LedgerModel(clock.time, LEASE_SECONDS, MAX_FAILURES, MAX_ENQUEUED_TOKENS)
        self.leases: list[tuple[str, Lease]] = []
        self.seen: dict[str, Batch] = {}
        self.tokens: Counter[tuple[str, int]] = Counter()
        self.parts = 0
        self.orders = 0

    # What happens.

    @initialize(shapes=st.lists(st.lists(st.sampled_from(MODELS), min_size=1, max_size=4), min_size=1, max_size=3))
    def batches_in_progress(self, shapes: list[list[str]]) -> None:
        """Most of what is interesting happens to batches that have chunks."""
        for number, models in enumerate(shapes):
            self.submit(number, "acme" if number else "bolt", 7200, OnInvalid.SKIP)
            self.record_intake(number, models, 0)

    @rule(
        number=st.integers(0, 4),
        customer=st.sampled_from(["acme", "bolt"]),
        window_seconds=st.sampled_from([600, 7200]),
        on_invalid=st.sampled_from(OnInvalid),
    )
    def submit(self, number: int, customer: str, window_seconds: int, on_invalid: OnInvalid) -> None:
        new = new_batch(f"drop/{number}", customer, window_seconds=window_seconds, on_invalid=on_invalid)
        created = self.ledger.batches.create(new)
        self.model.create(new)
        assert created.customer == self.model.batches[new.batch_id].made.customer

    @precondition(lambda self: self.model.batches)
    @rule(
        which=any_of,
        models=st.lists(st.sampled_from(MODELS), max_size=4),
        invalid=st.sampled_from([0, 0, 0, 2]),
        miscounted=mostly_not,
    )
    def record_intake(self, which: int, models: list[str], invalid: int, miscounted: bool = False) -> None:
        batch_id = self._batch(which)
        intake = intake_result(models, requests=4, invalid=invalid)
        if miscounted and self.model.batches[batch_id].intake is None:
            with pytest.raises(ProofFailed):
                self.ledger.batches.record_intake(batch_id, msgspec.structs.replace(intake, total=1))
            return
        self.ledger.batches.record_intake(batch_id, intake, run_id="run")
        self.model.record_intake(batch_id, intake)

    @rule(worker=st.sampled_from(WORKERS), model=st.sampled_from(MODELS), limit=st.integers(0, 3))
    def lease(self, worker: str, model: str, limit: int) -> None:
        got = self.ledger.chunks.lease(worker, model, limit, run_id="run")
        self.model.expire_leases()
        leasable = self.model.leasable(model)
        assert len(got) == min(limit, len(leasable))
        for lease in got:
            ref = lease.ref
            assert (ref.batch_id, ref.chunk) in leasable
            assert ref.token == self.model.chunk(ref).token + 1
            assert {part.key for part in lease.parts} == set(self.model.chunk(ref).parts)
            self.model.lease(ref)
            self.leases.append((worker, lease))

    @precondition(lambda self: any(self.model.leasable(model) for model in MODELS))
    @rule(
        worker=st.sampled_from(WORKERS),
        limit=st.integers(1, 4),
        then=st.lists(st.sampled_from(["checkpoint", "commit", "give way", "fail", "die"]), min_size=1, max_size=4),
    )
    def lease_and(self, worker: str, limit: int, then: list[str]) -> None:
        before = len(self.leases)
        self.lease(worker, next(model for model in MODELS if self.model.leasable(model)), limit)
        for number, what in zip(range(len(self.leases) - before), then, strict=False):
            if what == "checkpoint":
                self.checkpoint(number, False, False)
            elif what == "commit":
                self.commit(number, number, False, "")
            elif what != "die":
                self.release(number, what == "fail")

    @precondition(lambda self: self.leases)
    @rule(worker=st.sampled_from(WORKERS), newest=st.integers(1, 6))
    def heartbeat(self, worker: str, newest: int) -> None:
        refs = [lease.ref for owner, lease in self.leases if owner == worker][-newest:]
        assert self.ledger.workers.heartbeat(worker, refs).standings == self.model.heartbeat(refs)

    @precondition(lambda self: self.leases)
    @rule(which=any_of, failed=st.booleans(), acknowledgement_lost=st.booleans())
    def checkpoint(self, which: int, failed: bool, acknowledgement_lost: bool) -> None:
        lease = self._lease(which)
        chunk = self.model.chunk(lease.ref)
        if not self.model.is_valid(lease.ref):
            with pytest.raises(LeaseLost):
                self.ledger.chunks.checkpoint(lease.ref, part_of(lease, -1))
        elif chunk.finished < lease.requests:
            self.parts += 1
            part = part_of(lease, self.parts, completed=int(not failed), failed=int(failed))
            for _ in range(2 if acknowledgement_lost else 1):
                self.ledger.chunks.checkpoint(lease.ref, part)
            chunk.parts[part.key] = part

    @precondition(lambda self: self.leases)
    @rule(which=any_of, failed=st.integers(0, 4), acknowledgement_lost=st.booleans(), name=st.sampled_from(["", "b"]))
    def commit(self, which: int, failed: int, acknowledgement_lost: bool, name: str) -> None:
        lease = self._lease(which)
        chunk = self.model.chunk(lease.ref)
        result = result_of(lease, failed=failed, name=name)
        if self.model.is_valid(lease.ref):
            drained = self.model.commit(lease.ref, result)
            assert self.ledger.chunks.commit(lease.ref, result).batch_drained == drained
            if acknowledgement_lost:
                assert not self.ledger.chunks.commit(lease.ref, result).batch_drained
        elif chunk.result == result and chunk.token == lease.ref.token:
            assert not self.ledger.chunks.commit(lease.ref, result).batch_drained
        else:
            with pytest.raises(LeaseLost):
                self.ledger.chunks.commit(lease.ref, result)

    @precondition(lambda self: self.leases)
    @rule(which=any_of, failed=st.booleans())
    def release(self, which: int, failed: bool) -> None:
        ref = self._lease(which).ref
        if self.model.is_valid(ref):
            drained = self.model.let_go(ref, "released", failed)
            assert self.ledger.chunks.release(ref, "asked to leave", failed).batch_drained == drained
        else:
            with pytest.raises(LeaseLost):
                self.ledger.chunks.release(ref, "asked to leave", failed)

    @rule(seconds=st.sampled_from([1.0, 1.0, 30.0, 30.0, 61.0, 61.0, 700.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.model.now = self.clock.time

    @rule()
    def sweep(self) -> None:
        assert self.ledger.chunks.expire_leases() == self.model.expire_leases()
        assert set(self.ledger.batches.expire_due()) == self.model.expire_due()
        assert self.ledger.batches.settle_all() == []

    @precondition(lambda self: self.model.batches)
    @rule(which=any_of, stranger=mostly_not)
    def cancel(self, which: int, stranger: bool) -> None:
        batch_id = self._batch(which)
        batch = self.model.batches[batch_id]
        if stranger:
            with pytest.raises(NotFound):
                self.ledger.batches.cancel(batch_id, customer="somebody-else")
        elif batch.status.is_final:
            with pytest.raises(NotAllowedInState):
                self.ledger.batches.cancel(batch_id, customer=batch.made.customer)
        else:
            self.model.cancel(batch_id)
            assert self.ledger.batches.cancel(batch_id, customer=batch.made.customer).status == batch.status

    @precondition(lambda self: any(batch.is_mergeable for batch in self.model.batches.values()))
    @rule(which=any_of, miscounted=mostly_not)
    def merge(self, which: int, miscounted: bool) -> None:
        batch_id = self._batch(which)
        before = self.ledger.batches.get(batch_id)
        files = counted(before, self.ledger.chunks.of(batch_id))
        if miscounted:
            files = msgspec.structs.replace(files, completed=files.completed + 1)
        if before.status.is_final:
            assert self.ledger.batches.finish(batch_id, files) == before
        elif not self.model.batches[batch_id].is_mergeable:
            with pytest.raises(NotAllowedInState):
                self.ledger.batches.finish(batch_id, files)
        elif miscounted:
            with pytest.raises(ProofFailed):
                self.ledger.batches.finish(batch_id, files)
        else:
            self.model.finish(batch_id)
            self.ledger.batches.finish(batch_id, files, run_id="run")

    @precondition(lambda self: self.model.has_failed_chunks)
    @rule(which=any_of)
    def want_again(self, which: int) -> None:
        batch_id = self._batch(which)
        assert self.ledger.chunks.want_again(batch_id, "operator") == self.model.want_again(batch_id)

    @precondition(lambda self: any(batch.intake is not None for batch in self.model.batches.values()))
    @rule(which=any_of, version=st.sampled_from([None, "1", "2"]))
    def run_again(self, which: int, version: str | None) -> None:
        batch_id = self._batch(which)
        batch = self.model.batches[batch_id]
        self.orders += 1
        order = f"order-{self.orders}"
        if batch.status != BatchStatus.IN_PROGRESS or batch.outcome is not None:
            with pytest.raises(NotAllowedInState):
                self.ledger.chunks.run_again(batch_id, "operator", order=order, model_version=version)
            return
        anew = self.model.run_again(batch_id, version)
        assert self.ledger.chunks.run_again(batch_id, "operator", order=order, model_version=version) == anew
        assert self.ledger.chunks.run_again(batch_id, "operator", order=order, model_version=version) == 0

    # What holds after each of these.

    @invariant()
    def quotas_are_what_is_open(self) -> None:
        assert self.ledger.quotas.kept() == self.ledger.quotas.recount() == dict(self.model.enqueued())

    @invariant()
    def everything_holds(self) -> None:
        for batch_id, expected in self.model.batches.items():
            batch = self.ledger.batches.get(batch_id)
            chunks = self.ledger.chunks.of(batch_id)
            assert (batch.status, batch.outcome) == (expected.status, expected.outcome)
            self._never_goes_backwards(batch)
            self._chunks_are_as_expected(chunks, expected)
            self._lanes_are_sums(batch_id, chunks)
            _stopping_batches_have_nothing_pending(batch, chunks)
            _end_and_files_appear_together(batch)

    def _never_goes_backwards(self, batch: Batch) -> None:
        before = self.seen.get(batch.batch_id)
        if before is not None:
            assert _RANK.get(batch.status, 4) >= _RANK.get(before.status, 4)
            assert before == batch or before.revision < batch.revision
            assert before.outcome in (None, batch.outcome)
            if before.status.is_final:
                assert batch == before
        self.seen[batch.batch_id] = batch

    def _chunks_are_as_expected(self, chunks: list[Chunk], expected: ModelBatch) -> None:
        assert len(chunks) == len(expected.chunks)
        for chunk, model in zip(chunks, expected.chunks, strict=True):
            assert (chunk.state, chunk.token, chunk.failures) == (model.state, model.token, model.failures)
            assert (chunk.result, [part.key for part in chunk.parts]) == (model.result, list(model.parts))
            assert chunk.expires_at == (model.expires_at if model.state == ChunkState.LEASED else None)
            assert chunk.token >= self.tokens[chunk.batch_id, chunk.chunk]
            self.tokens[chunk.batch_id, chunk.chunk] = chunk.token

    def _lanes_are_sums(self, batch_id: str, chunks: list[Chunk]) -> None:
        lanes = {lane.model: lane for lane in self.ledger.batches.lanes(batch_id)}
        assert set(lanes) == {chunk.model for chunk in chunks}
        for model, lane in lanes.items():
            of_model = [chunk for chunk in chunks if chunk.model == model]
            states = Counter(chunk.state for chunk in of_model)
            open_states = states[ChunkState.PENDING] + states[ChunkState.LEASED] + states[ChunkState.COMMITTED]
            assert lane.pending == states[ChunkState.PENDING]
            assert lane.leased == states[ChunkState.LEASED]
            assert lane.committed == states[ChunkState.COMMITTED]
            assert lane.stopped == len(of_model) - open_states
            assert lane.requests == sum(chunk.requests for chunk in of_model)
            assert lane.pending_tokens == sum(
                chunk.prompt_tokens + chunk.max_output_tokens for chunk in of_model if chunk.state == ChunkState.PENDING
            )
            done = [source for chunk in of_model for source in ([chunk.result] if chunk.result else chunk.parts)]
            for name in ("completed", "failed", "input_tokens", "cached_tokens", "output_tokens"):
                assert getattr(lane, name) == sum(getattr(source, name) for source in done), name

    def teardown(self) -> None:
        """Every batch that is still open comes to an end by the sweeps, an intake and a merge, whatever has happened;
        and the audit trail tells all of it.
        """
        for batch_id, batch in self.model.batches.items():
            if batch.intake is None:
                self.record_intake(list(self.model.batches).index(batch_id), ["model-a"], 0)
        while self.parts % 2 and any(self.model.leasable(model) for model in MODELS):
            self.lease_and("w1", 4, ["commit"] * 4)  # Some end because their work is done, some by their deadline.
        self.time_passes(10_000.0)
        self.sweep()
        assert {batch.batch_id for batch in self.ledger.batches.awaiting_merge(100)} == {
            batch_id for batch_id, batch in self.model.batches.items() if not batch.status.is_final
        }
        for number in range(len(self.model.batches)):
            self.merge(number, False)
        self.everything_holds()
        for batch_id, expected in self.model.batches.items():
            assert self.ledger.batches.get(batch_id).status.is_final
            told = list(self.ledger.events.of(batch_id))
            assert [event.event for event in told if event.chunk is None] == expected.events
            for number, chunk in enumerate(expected.chunks):
                assert [(event.event, event.token) for event in told if event.chunk == number] == chunk.events

    def _batch(self, which: int) -> str:
        return list(self.model.batches)[which % len(self.model.batches)]

    def _lease(self, which: int) -> Lease:
        """The newest leases are the likeliest, so that most of what happens is not about stale ones."""
        return self.leases[-1 - (which % len(self.leases))][1]


def _stopping_batches_have_nothing_pending(batch: Batch, chunks: list[Chunk]) -> None:
    states = {chunk.state for chunk in chunks}
    if batch.outcome is not None:
        assert ChunkState.PENDING not in states
    if batch.status.is_final or batch.status == BatchStatus.FINALIZING:
        assert ChunkState.LEASED not in states


def _end_and_files_appear_together(batch: Batch) -> None:
    assert (batch.manifest_key is not None) == batch.status.is_final
    assert (batch.ended_at is not None) == batch.status.is_final
    if batch.status.is_final:
        assert batch.total == batch.completed + batch.failed + batch.expired + batch.cancelled + batch.invalid
        assert (batch.output_key is not None) == (batch.completed > 0)
        assert (batch.error_key is not None) == (batch.completed < batch.total)
    else:
        assert batch.output_key is None
        assert batch.error_key is None


def _empty(ledger: Ledger) -> None:
    with ledger._database.write() as tx:
        for table in reversed(schema.metadata.sorted_tables):
            if table is not schema.schema_info:
                tx.connection.execute(table.delete())


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def stepped_ledger(ledger_url: str, clock: SteppedClock) -> Iterator[Ledger]:
    ledger = Ledger.open(
        ledger_url,
        lease_seconds=LEASE_SECONDS,
        max_failures=MAX_FAILURES,
        limits=Limits(max_enqueued_tokens=MAX_ENQUEUED_TOKENS),
        clock=clock,
    )
    yield ledger
    ledger.close()


def test_any_order_of_events_leaves_a_true_ledger(stepped_ledger: Ledger, clock: SteppedClock, ledger_url: str) -> None:
    class Machine(LedgerMachine):
        def __init__(self) -> None:
            super().__init__(stepped_ledger, clock)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=60 if ledger_url.startswith("sqlite") else 25,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target],  # shrinking takes minutes here
        ),
    )
