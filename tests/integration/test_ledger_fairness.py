"""How the ledger keeps the service of its customers: nobody starves, nobody saves up credit, weights count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import sqlalchemy as sa

from batch_pipeline import ids
from batch_pipeline.ledger import Ledger, schema
from batch_pipeline.ledger.leasing import Policy
from batch_pipeline.ledger.records import ChunkResult, Lease, WorkerState
from tests.fakes.clock import SteppedClock
from tests.fakes.ledger_values import CHUNK_TOKENS, MODEL, counted, part_of, result_of, submitted


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    opened = Ledger.open(ledger_url, clock=SteppedClock())
    yield opened
    opened.close()


def serve(ledger: Ledger, chunks: int, at_once: int = 1) -> Counter[str]:
    """Lease and commit so many chunks; returns how many of each customer."""
    got: Counter[str] = Counter()
    while got.total() < chunks:
        leases = ledger.chunks.lease("w", MODEL, min(at_once, chunks - got.total()))
        if not leases:
            break
        for lease in leases:
            ledger.chunks.commit(lease.ref, result_of(lease))
            got[lease.customer] += 1
    return got


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_customer_that_comes_late_shares_from_then_on_and_does_not_catch_up(ledger: Ledger, at_once: int) -> None:
    submitted(ledger, "huge", [MODEL] * 100, "acme")
    serve(ledger, 40)
    submitted(ledger, "later", [MODEL] * 30, "bolt")
    assert serve(ledger, 20, at_once) == {"acme": 10, "bolt": 10}


def test_a_small_batch_that_comes_after_a_huge_one_is_done_within_a_few_chunks(ledger: Ledger) -> None:
    submitted(ledger, "huge", [MODEL] * 100, "acme")
    serve(ledger, 30)
    submitted(ledger, "small", [MODEL], "bolt")
    assert serve(ledger, 2)["bolt"] == 1


def test_a_customer_that_comes_back_has_no_credit_for_the_time_it_was_away(ledger: Ledger) -> None:
    submitted(ledger, "a", [MODEL] * 100, "acme")
    submitted(ledger, "b1", [MODEL] * 2, "bolt")
    serve(ledger, 50)  # bolt's two, and then acme's alone
    submitted(ledger, "b2", [MODEL] * 30, "bolt")
    assert serve(ledger, 20) == {"acme": 10, "bolt": 10}


def test_a_customer_whose_last_chunk_is_still_running_has_no_credit_either(ledger: Ledger) -> None:
    submitted(ledger, "b1", [MODEL], "bolt")
    (running,) = ledger.chunks.lease("slow", MODEL, 1)
    submitted(ledger, "a", [MODEL] * 100, "acme")
    serve(ledger, 50)
    submitted(ledger, "b2", [MODEL] * 30, "bolt")
    assert serve(ledger, 20) == {"acme": 10, "bolt": 10}
    ledger.chunks.commit(running.ref, result_of(running))


def test_a_customer_that_was_served_while_alone_owes_nothing_to_one_that_comes_when_it_is_gone(ledger: Ledger) -> None:
    submitted(ledger, "a1", [MODEL] * 50, "acme")
    assert serve(ledger, 50) == {"acme": 50}  # and then nobody waits
    submitted(ledger, "b", [MODEL] * 30, "bolt")
    submitted(ledger, "a2", [MODEL] * 30, "acme")
    assert serve(ledger, 20) == {"acme": 10, "bolt": 10}


def test_a_second_batch_of_a_customer_that_waits_already_lifts_nobody(ledger: Ledger) -> None:
    submitted(ledger, "a", [MODEL] * 50, "acme")
    submitted(ledger, "b1", [MODEL] * 20, "bolt")
    serve(ledger, 10)
    submitted(ledger, "b2", [MODEL] * 20, "bolt")
    assert serve(ledger, 20) == {"acme": 10, "bolt": 10}


def test_service_of_one_model_does_not_count_on_another(ledger: Ledger) -> None:
    submitted(ledger, "other-model", ["model-b"] * 20, "acme")
    ledger.chunks.lease("w", "model-b", 20)
    submitted(ledger, "a", [MODEL] * 20, "acme")
    submitted(ledger, "b", [MODEL] * 20, "bolt")
    assert serve(ledger, 10) == {"acme": 5, "bolt": 5}


def test_weights_of_one_and_three_give_service_one_to_three(ledger: Ledger) -> None:
    submitted(ledger, "a", [MODEL] * 50, "acme")
    submitted(ledger, "b", [MODEL] * 50, "bolt")
    with ledger._database.write() as tx:
        tx.connection.execute(schema.customers.update().where(schema.customers.c.customer == "bolt").values(weight=3.0))
    got = serve(ledger, 40)
    assert abs(got["bolt"] - 30) <= 1


def test_an_operators_priority_and_then_the_deadline_order_a_customers_batches(ledger: Ledger) -> None:
    late = submitted(ledger, "late", window_seconds=9000).batch_id
    soon = submitted(ledger, "soon", window_seconds=1000).batch_id
    asked = submitted(ledger, "asked", window_seconds=99_000).batch_id
    ledger.batches.set_priority(asked, 1, "operator")
    leases = [ledger.chunks.lease("w", MODEL, 1)[0] for _ in range(3)]
    assert [lease.ref.batch_id for lease in leases] == [asked, soon, late]


# Batches at risk.


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def helping(ledger_url: str, clock: SteppedClock) -> Iterator[Ledger]:
    """A ledger in which a batch with less than ten minutes of slack may have a quarter of the service out of turn, and
    at once four chunks; its one worker does a chunk in ten seconds.
    """
    policy = Policy(margin_seconds=600.0, share=0.25, most_tokens=4.0 * CHUNK_TOKENS)
    opened = Ledger.open(ledger_url, clock=clock, policy=policy)
    opened.workers.register("w", MODEL, None, "here")
    opened.workers.set_state("w", WorkerState.READY)
    opened.workers.heartbeat("w", tokens_per_second=CHUNK_TOKENS / 10.0)
    yield opened
    opened.close()


def test_a_batch_at_risk_goes_ahead_with_its_share_and_no_more(helping: Ledger, clock: SteppedClock) -> None:
    submitted(helping, "calm", [MODEL] * 400, "acme", window_seconds=86_400)
    serve(helping, 20)
    # A customer with a great weight, and turns of its own, would not need the help: so bolt has had its service.
    with helping._database.write() as tx:
        customers = {"customer": "bolt", "weight": 0.001, "created_at": tx.now}
        tx.connection.execute(schema.customers.insert().values(**customers))
    # 100 chunks are 1,000 seconds of work: 200 of slack.
    submitted(helping, "urgent", [MODEL] * 100, "bolt", window_seconds=1200)
    assert serve(helping, 1)["bolt"] == 1  # in turn: it has come just now
    got: Counter[str] = Counter()
    for _ in range(40):
        helping.workers.heartbeat("w", tokens_per_second=CHUNK_TOKENS / 10.0)
        got += serve(helping, 1)
        clock.advance(10.0)
    assert 10 <= got["bolt"] <= 10 + 4 + 1
    assert got["acme"] == 40 - got["bolt"]


def test_a_hopeless_batch_is_known_by_the_speed_of_earlier_workers(ledger_url: str, clock: SteppedClock) -> None:
    policy = Policy(margin_seconds=600.0, share=0.25, most_tokens=4.0 * CHUNK_TOKENS)
    ledger = Ledger.open(ledger_url, clock=clock, policy=policy)
    for worker, speed in (("yesterday", CHUNK_TOKENS / 10.0), ("new", None)):
        ledger.workers.register(worker, MODEL, None, "here")
        ledger.workers.set_state(worker, WorkerState.READY)
        ledger.workers.heartbeat(worker, tokens_per_second=speed)
        if speed:
            ledger.workers.set_state(worker, WorkerState.STOPPED)
            clock.advance(10_000.0)
    # By that speed 100 chunks take 1,000 seconds and more than the window.
    hopeless = submitted(ledger, "hopeless", [MODEL] * 100, window_seconds=100)
    small = submitted(ledger, "small", [MODEL], window_seconds=86_400)
    leases = [ledger.chunks.lease("new", MODEL, 1)[0] for _ in range(2)]
    assert [lease.ref.batch_id for lease in leases] == [small.batch_id, hopeless.batch_id]
    ledger.close()


@pytest.mark.parametrize(("declared", "first"), [(CHUNK_TOKENS / 10.0, "small"), (None, "hopeless")])
def test_before_anything_was_measured_the_catalogue_says_how_fast_a_worker_is(
    ledger_url: str, clock: SteppedClock, declared: float | None, first: str
) -> None:
    policy = Policy(margin_seconds=600.0, declared={} if declared is None else {MODEL: declared})
    ledger = Ledger.open(ledger_url, clock=clock, policy=policy)
    ledger.workers.register("new", MODEL, None, "here")
    ledger.workers.set_state("new", WorkerState.READY)
    batches = {
        "hopeless": submitted(ledger, "hopeless", [MODEL] * 100, window_seconds=100),
        "small": submitted(ledger, "small", [MODEL], window_seconds=86_400),
    }
    (lease,) = ledger.chunks.lease("new", MODEL, 1)
    assert lease.ref.batch_id == batches[first].batch_id
    ledger.close()


def test_what_a_customer_really_uses_is_remembered_at_the_end_of_its_batches(ledger: Ledger) -> None:
    batch = submitted(ledger, "a", [MODEL] * 3, "acme")
    serve(ledger, 3)
    chunks = ledger.chunks.of(batch.batch_id)
    ledger.batches.finish(batch.batch_id, counted(ledger.batches.get(batch.batch_id), chunks))
    with ledger._database.read() as tx:
        row = tx.connection.execute(schema.service.select().where(schema.service.c.customer == "acme")).one()
    assert (row.estimated_tokens, row.real_tokens) == (3 * CHUNK_TOKENS, 3 * 270.0)


# Charges are corrected.


def counter(ledger: Ledger, customer: str) -> float:
    """The virtual tokens of a customer."""
    with ledger._database.read() as tx:
        query = schema.service.select().where(schema.service.c.customer == customer)
        return float(tx.connection.execute(query).one().tokens)


def sparing(lease: Lease, share: int = 9) -> ChunkResult:
    """A result that has used a ninth of what `result_of` uses."""
    result = result_of(lease)
    return msgspec.structs.replace(
        result, input_tokens=result.input_tokens // share, output_tokens=result.output_tokens // share
    )


@pytest.mark.parametrize("is_known", [True, False])
def test_estimates_that_are_too_high_do_not_cost_a_customer_its_turns(ledger: Ledger, is_known: bool) -> None:
    """Bolt uses a ninth of the tokens that it asks for, whether its history has told that or not."""
    submitted(ledger, "a", [MODEL] * 200, "acme")
    submitted(ledger, "b", [MODEL] * 200, "bolt")
    if is_known:
        with ledger._database.write() as tx:
            of_bolt = schema.service.update().where(schema.service.c.customer == "bolt")
            tx.connection.execute(of_bolt.values(estimated_tokens=9e6, real_tokens=1e6))
    got: Counter[str] = Counter()
    for _ in range(100):
        (lease,) = ledger.chunks.lease("w", MODEL, 1)
        ledger.chunks.commit(lease.ref, sparing(lease) if lease.customer == "bolt" else result_of(lease))
        got[lease.customer] += 1
    assert 86 <= got["bolt"] <= 92


def test_a_lease_is_charged_as_expected_and_its_end_as_used_once(ledger: Ledger) -> None:
    submitted(ledger, "a", [MODEL] * 3, "acme")
    (lease,) = ledger.chunks.lease("w", MODEL, 1)
    assert counter(ledger, "acme") == CHUNK_TOKENS
    ledger.chunks.commit(lease.ref, result_of(lease))
    assert counter(ledger, "acme") == 270.0
    ledger.chunks.commit(lease.ref, result_of(lease))
    assert counter(ledger, "acme") == 270.0, "the acknowledgement was lost, and it was committed again"


def test_what_is_handed_back_is_charged_what_its_checkpoints_have_used(ledger: Ledger) -> None:
    submitted(ledger, "a", [MODEL] * 2, "acme")
    (lease,) = ledger.chunks.lease("w", MODEL, 1)
    ledger.chunks.checkpoint(lease.ref, part_of(lease, 1, completed=2))
    ledger.chunks.release(lease.ref, "gives way")
    assert counter(ledger, "acme") == 2 * 27.0
    (again,) = ledger.chunks.lease("w", MODEL, 1)
    assert counter(ledger, "acme") == 2 * 27.0 + 270.0, "as the checkpoints have shown what is used"
    ledger.chunks.commit(again.ref, result_of(again))
    assert counter(ledger, "acme") == 270.0


def refused(lease: Lease) -> ChunkResult:
    """No request has an answer, and the engine has told no tokens of any."""
    result = result_of(lease, failed=lease.requests)
    return msgspec.structs.replace(result, input_tokens=0, cached_tokens=0, output_tokens=0)


def test_a_customer_whose_requests_all_fail_starves_nobody(ledger: Ledger) -> None:
    """Neither where they are committed, nor where they are handed back again and again."""
    submitted(ledger, "bad", [MODEL] * 40, "acme")
    submitted(ledger, "good", [MODEL] * 40, "bolt")
    got: Counter[str] = Counter()
    for turn in range(30):
        (lease,) = ledger.chunks.lease("w", MODEL, 1)
        got[lease.customer] += 1
        if lease.customer == "bolt":
            ledger.chunks.commit(lease.ref, result_of(lease))
        elif turn % 2:
            ledger.chunks.commit(lease.ref, refused(lease))
        else:
            part = msgspec.structs.replace(
                part_of(lease, 1, completed=0, failed=lease.requests), input_tokens=0, cached_tokens=0, output_tokens=0
            )
            ledger.chunks.checkpoint(lease.ref, part)
            ledger.chunks.release(lease.ref, "drained")
    assert min(got.values()) >= 10, got


def test_a_failed_attempt_stays_charged_until_the_chunk_is_committed(ledger: Ledger) -> None:
    """Otherwise a customer whose chunks kill their workers would be the least served for ever."""
    submitted(ledger, "a", [MODEL] * 2, "acme")
    (lease,) = ledger.chunks.lease("w", MODEL, 1)
    ledger.chunks.release(lease.ref, "the engine died", failed=True)
    (again,) = ledger.chunks.lease("w", MODEL, 1)
    assert counter(ledger, "acme") == 2 * CHUNK_TOKENS
    ledger.chunks.commit(again.ref, result_of(again))
    assert counter(ledger, "acme") == 270.0


def test_a_chunk_that_an_older_release_has_leased_is_not_corrected(ledger: Ledger) -> None:
    submitted(ledger, "a", [MODEL], "acme")
    (lease,) = ledger.chunks.lease("w", MODEL, 1)
    with ledger._database.write() as tx:
        tx.connection.execute(schema.chunks.update().values(charged=None))
    ledger.chunks.commit(lease.ref, result_of(lease))
    assert counter(ledger, "acme") == CHUNK_TOKENS


def test_a_correction_gives_no_credit_from_before_a_customer_came(ledger: Ledger) -> None:
    submitted(ledger, "b1", [MODEL], "bolt")
    (running,) = ledger.chunks.lease("slow", MODEL, 1)
    submitted(ledger, "a", [MODEL] * 100, "acme")
    serve(ledger, 10)
    submitted(ledger, "b2", [MODEL] * 30, "bolt")
    assert counter(ledger, "bolt") == counter(ledger, "acme")
    ledger.chunks.commit(running.ref, sparing(running))
    assert counter(ledger, "bolt") == counter(ledger, "acme")


def test_counters_are_over_the_weight_of_their_customer(ledger: Ledger) -> None:
    submitted(ledger, "a", [MODEL], "acme")
    with ledger._database.write() as tx:
        tx.connection.execute(schema.customers.update().values(weight=2.0))
    (lease,) = ledger.chunks.lease("w", MODEL, 1)
    ledger.chunks.commit(lease.ref, result_of(lease))
    assert counter(ledger, "acme") == 135.0


def test_of_two_weights_that_are_set_at_once_each_counts_from_the_other(postgres_url: str) -> None:
    ledger = Ledger.open(postgres_url)
    submitted(ledger, "a", [MODEL] * 2, "acme")
    (kept,) = ledger.chunks.lease("w", MODEL, 1)
    with ThreadPoolExecutor(2) as pool:
        for weights in ((2.0, 10.0), (3.0, 0.5), (7.0, 1.0)):
            list(pool.map(lambda weight: ledger.customers.set("acme", weight=weight, limits={}), weights))
    weight = ledger.customers.get("acme").weight
    with ledger._database.read() as tx:
        charged = tx.connection.execute(sa.select(schema.chunks.c.charged).where(schema.chunks.c.chunk == 0))
        assert charged.scalar_one() / weight == pytest.approx(CHUNK_TOKENS)
    ledger.chunks.commit(kept.ref, result_of(kept))
    ledger.close()


@pytest.mark.parametrize("weight", [0.001, 1000.0])
def test_a_weight_that_changes_while_chunks_are_on_lease_gives_no_credit_and_takes_none(
    ledger: Ledger, weight: float
) -> None:
    submitted(ledger, "before", [MODEL], "acme")
    submitted(ledger, "other", [MODEL], "bolt")
    (done,) = ledger.chunks.lease("w", MODEL, 1, [ids.batch_id_from("before")])
    ledger.chunks.commit(done.ref, result_of(done))
    submitted(ledger, "a", [MODEL, MODEL], "acme")
    before = counter(ledger, "acme")
    (kept, _) = ledger.chunks.lease("w", MODEL, 2, [ids.batch_id_from("a")])
    (others,) = ledger.chunks.lease("w", MODEL, 1, [ids.batch_id_from("other")])
    of_other = counter(ledger, "bolt")
    charged = counter(ledger, "acme") - before
    ledger.customers.set("acme", weight=weight, limits={})
    assert counter(ledger, "acme") == before + charged
    ledger.chunks.commit(kept.ref, result_of(kept))
    used = result_of(kept).input_tokens + result_of(kept).output_tokens
    assert counter(ledger, "acme") == pytest.approx(before + charged / 2 + used / weight)
    assert counter(ledger, "bolt") == of_other
    ledger.chunks.commit(others.ref, result_of(others))
