"""When batches will be done: answers by hand, and what holds of every queue."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_pipeline.scheduling.finish import QueuedBatch, Supply, estimated_finishes
from batch_pipeline.scheduling.order import Conditions, CustomerShare, WaitingBatch


def queued(batch_id: str, customer: str, tokens: float, chunks: int = 10, **values: float) -> QueuedBatch:
    """A batch that waits."""
    return QueuedBatch(
        waiting=WaitingBatch(
            batch_id=batch_id,
            customer=customer,
            pending_chunks=chunks,
            pending_tokens=tokens,
            priority=int(values.get("priority", 0)),
            deadline_at=values.get("deadline_at", 1e6),
            created_at=0.0,
        ),
        leased_chunks=int(values.get("leased_chunks", 0)),
        leased_tokens=values.get("leased_tokens", 0.0),
    )


def one_worker(speed: float = 10.0, *, since: float = 0.0) -> Supply:
    """A worker; chunks end as the fluid does."""
    steps = [(0.0, speed)] if since == 0 else [(0.0, 0.0), (since, speed)]
    return Supply(steps=steps, worker_tokens_per_second=speed)


def finishes(
    batches: list[QueuedBatch],
    supply: Supply,
    shares: dict[str, CustomerShare] | None = None,
    conditions: Conditions | None = None,
    help_share: float = 0.0,
) -> dict[str, float]:
    """Estimates, by their batch, to a thousandth of a second."""
    found = estimated_finishes(batches, shares or {}, supply, conditions or Conditions(), help_share)
    return {batch_id: round(finish, 3) for batch_id, finish in found.items()}


def test_two_customers_share_and_what_one_leaves_the_other_has() -> None:
    assert finishes([queued("a", "acme", 100), queued("b", "bolt", 300)], one_worker()) == {"a": 19.0, "b": 40.0}
    # The last tenth of a is run at once: 90 tokens of it have flowed at 18 s, and its last chunk takes a second.


def test_a_customers_batches_go_one_after_the_other() -> None:
    batches = [queued("late", "acme", 100, deadline_at=900.0), queued("soon", "acme", 100, deadline_at=500.0)]
    assert finishes(batches, one_worker()) == {"soon": 10.0, "late": 20.0}


def test_what_a_worker_has_in_hands_comes_first_whoever_is_served_least() -> None:
    long = queued("long", "acme", 0, 0, leased_chunks=1, leased_tokens=5400.0)
    shares = {"acme": CustomerShare(served=9000.0), "bolt": CustomerShare(served=100.0)}
    assert finishes([long, queued("short", "bolt", 20, 1)], one_worker(), shares) == {"long": 540.0, "short": 542.0}


def test_weights_and_what_was_served_before_count_as_in_the_queue() -> None:
    batches = [queued("a", "acme", 1000, 1000), queued("b", "bolt", 300, 300)]
    heavy = finishes(batches, one_worker(), {"bolt": CustomerShare(weight=3.0)})
    assert heavy == {"a": 130.0, "b": pytest.approx(40.0, abs=0.2)}
    # Bolt is 500 tokens ahead: acme catches up first.
    assert finishes(batches, one_worker(), {"bolt": CustomerShare(served=500.0)}) == {
        "a": 130.0,
        "b": pytest.approx(110.0, abs=0.2),
    }


def test_a_single_chunk_takes_as_long_as_its_worker_however_many_there_are() -> None:
    supply = Supply(steps=[(0.0, 1000.0)], worker_tokens_per_second=10.0)
    assert finishes([queued("a", "acme", 100, 1)], supply) == {"a": 10.0}


def test_before_there_is_a_worker_nothing_is_begun_and_without_one_nothing_is_said() -> None:
    assert finishes([queued("a", "acme", 100)], one_worker(since=60.0)) == {"a": 70.0}
    assert finishes([queued("a", "acme", 100, 1)], one_worker(since=60.0)) == {"a": 70.0}
    none = Supply(steps=[(0.0, 0.0)], worker_tokens_per_second=10.0)
    assert finishes([queued("a", "acme", 100)], none) == {}


def test_more_workers_that_come_later_bend_the_time() -> None:
    supply = Supply(steps=[(0.0, 10.0), (10.0, 30.0)], worker_tokens_per_second=10.0)
    assert finishes([queued("a", "acme", 400, 400)], supply) == {"a": pytest.approx(20.0, abs=0.1)}


def test_what_workers_have_is_not_charged_twice() -> None:
    """Acme's counter has the 100 tokens that its leased chunk was charged."""
    batches = [queued("a", "acme", 100, leased_chunks=1, leased_tokens=100.0), queued("b", "bolt", 200)]
    shares = {"acme": CustomerShare(served=100.0)}
    assert finishes(batches, one_worker(), shares) == {"a": 39.0, "b": 38.0}


def test_of_chunks_that_all_run_the_last_is_done_later_than_the_mean() -> None:
    batch = queued("a", "acme", 0.0, 0, leased_chunks=1, leased_tokens=100.0)
    assert finishes([batch], one_worker()) == {"a": 10.0}
    three = queued("a", "acme", 0.0, 0, leased_chunks=3, leased_tokens=300.0)
    assert finishes([three], Supply(steps=[(0.0, 30.0)], worker_tokens_per_second=10.0)) == {"a": 15.0}


def test_help_for_a_batch_at_risk_is_in_the_estimate() -> None:
    """Nine others share with it: its turns give it a tenth, the help a quarter."""
    others = [queued(f"b{number}", f"bolt{number}", 1000, 1000) for number in range(9)]
    urgent = queued("a", "acme", 100, 100, deadline_at=60.0)
    conditions = Conditions(tokens_per_second=10.0, margin_seconds=100.0)
    assert finishes([urgent, *others], one_worker())["a"] == pytest.approx(100.0, abs=1.0)
    helped = finishes([urgent, *others], one_worker(), conditions=conditions, help_share=0.25)
    assert helped["a"] == pytest.approx(40.0, abs=0.5)
    assert max(helped.values()) == pytest.approx(910.0, abs=1.0)
    # Not at risk before its slack is less than the margin: 50 s less 42 are 8 s of a tenth, and then the help.
    later = finishes(
        [urgent, *others],
        one_worker(),
        conditions=msgspec.structs.replace(conditions, margin_seconds=42.0),
        help_share=0.25,
    )
    assert helped["a"] < later["a"] < 60.0


sizes = st.tuples(st.integers(0, 5000), st.integers(1, 20), st.integers(0, 300), st.integers(1, 2000))


@st.composite
def queues(draw: st.DrawFn) -> list[QueuedBatch]:
    """Batches of three customers."""
    return [
        queued(
            f"b{number}",
            draw(st.sampled_from(["acme", "bolt", "core"])),
            float(tokens),
            chunks,
            leased_chunks=1,
            leased_tokens=float(leased),
            deadline_at=float(deadline),
        )
        for number, (tokens, chunks, leased, deadline) in enumerate(draw(st.lists(sizes, min_size=1, max_size=12)))
    ]


served = st.dictionaries(
    st.sampled_from(["acme", "bolt", "core"]),
    st.builds(CustomerShare, weight=st.sampled_from([0.5, 1.0, 3.0]), served=st.floats(0, 5000)),
)


@settings(max_examples=50, deadline=None)
@given(
    batches=queues(),
    shares=served,
    help_share=st.sampled_from([0.0, 0.25, 0.9]),
    margin=st.sampled_from([0.0, 100.0, 1e4]),
    since=st.sampled_from([0.0, 50.0]),
)
def test_all_work_is_done_at_the_speed_that_there_is_whoever_is_helped(
    batches: list[QueuedBatch], shares: dict[str, CustomerShare], help_share: float, margin: float, since: float
) -> None:
    conditions = Conditions(tokens_per_second=10.0, margin_seconds=margin)
    found = finishes(batches, one_worker(since=since), shares, conditions, help_share)
    work = sum(batch.waiting.pending_tokens + batch.leased_tokens for batch in batches)
    assert set(found) == {batch.waiting.batch_id for batch in batches}
    # Last chunks do not share: the last of them is begun when the rest of them is all that is left.
    chunk = max(batch.waiting.pending_tokens / batch.waiting.pending_chunks for batch in batches)
    assert since + (work - 3 * chunk) / 10.0 - 0.01 <= max(found.values()) <= since + (work + chunk) / 10.0 + 0.01
    for batch in batches:
        own = batch.waiting.pending_tokens / 10.0
        assert found[batch.waiting.batch_id] >= since + own - 0.01


@settings(max_examples=50, deadline=None)
@given(batches=queues(), shares=served, which=st.integers(0, 11))
def test_more_work_of_one_batch_makes_none_end_earlier(
    batches: list[QueuedBatch], shares: dict[str, CustomerShare], which: int
) -> None:
    """Where nobody is helped and slack is the deadline alone: else more work means more urgency."""
    grown = batches[which % len(batches)]
    # As many chunks in proportion: the last one is as large as before.
    waiting = msgspec.structs.replace(
        grown.waiting,
        pending_tokens=grown.waiting.pending_tokens * 2,
        pending_chunks=grown.waiting.pending_chunks * 2,
    )
    others = [batch for batch in batches if batch is not grown]
    before = finishes(batches, one_worker(), shares)
    after = finishes([*others, msgspec.structs.replace(grown, waiting=waiting)], one_worker(), shares)
    assert all(after[batch_id] >= finish - 0.01 for batch_id, finish in before.items())


@settings(max_examples=50, deadline=None)
@given(batches=queues(), shares=served)
def test_of_one_customer_the_one_with_less_slack_ends_first(
    batches: list[QueuedBatch], shares: dict[str, CustomerShare]
) -> None:
    alone = [msgspec.structs.replace(batch, leased_tokens=0.0, leased_chunks=0) for batch in batches]
    found = finishes(alone, one_worker(), shares)
    for one in alone:
        for other in alone:
            if one.waiting.customer == other.waiting.customer and one.waiting.deadline_at < other.waiting.deadline_at:
                chunk = other.waiting.pending_tokens / other.waiting.pending_chunks / 10.0
                assert found[one.waiting.batch_id] <= found[other.waiting.batch_id] + chunk + 0.01
