"""Which chunk next: fair between customers by weight, most urgent first inside one, and never idle while work waits."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from batch_pipeline.scheduling.order import Conditions, CustomerShare, WaitingBatch, choose, is_at_risk, slack


def batch(
    batch_id: str,
    customer: str,
    *,
    pending_chunks: int = 10,
    pending_tokens: int = 1000,
    priority: int = 0,
    deadline_at: float = 1000.0,
    created_at: float = 0.0,
) -> WaitingBatch:
    return WaitingBatch(
        batch_id=batch_id,
        customer=customer,
        pending_chunks=pending_chunks,
        pending_tokens=pending_tokens,
        priority=priority,
        deadline_at=deadline_at,
        created_at=created_at,
    )


class Service:
    """A model's queue as the ledger keeps it: picks are taken and charged, call by call."""

    def __init__(self, waiting: list[WaitingBatch], weights: dict[str, float]) -> None:
        self.waiting = {batch.batch_id: batch for batch in waiting}
        self.shares = {customer: CustomerShare(weight=weight) for customer, weight in weights.items()}
        self.tokens: Counter[str] = Counter()
        """Tokens leased, by customer."""

    def lease(self, limit: int) -> list[str]:
        """Take what the policy gives; returns the batch of each chunk."""
        given: list[str] = []
        for pick in choose(list(self.waiting.values()), self.shares, limit):
            taken = self.waiting.pop(pick.batch_id)
            tokens = taken.pending_tokens * pick.chunks // taken.pending_chunks
            left = taken.pending_chunks - pick.chunks
            if left:
                self.waiting[pick.batch_id] = msgspec.structs.replace(
                    taken, pending_chunks=left, pending_tokens=taken.pending_tokens - tokens
                )
            share = self.shares[taken.customer]
            self.shares[taken.customer] = msgspec.structs.replace(share, served=share.served + tokens / share.weight)
            self.tokens[taken.customer] += tokens
            given += [pick.batch_id] * pick.chunks
        return given


batches_of = st.lists(
    st.builds(
        lambda number, customer, chunks, size, priority, deadline: batch(
            f"b{number}",
            customer,
            pending_chunks=chunks,
            pending_tokens=chunks * size,
            priority=priority,
            deadline_at=deadline,
        ),
        st.integers(0, 10**6),
        st.sampled_from(["acme", "bolt", "core"]),
        st.integers(1, 40),
        st.integers(0, 5000),
        st.integers(-1, 1),
        st.floats(0, 1e6),
    ),
    max_size=12,
    unique_by=lambda made: made.batch_id,
)
served = st.dictionaries(
    st.sampled_from(["acme", "bolt", "core"]),
    st.builds(CustomerShare, weight=st.sampled_from([0.5, 1.0, 3.0]), served=st.floats(0, 1e6)),
)


@given(waiting=batches_of, shares=served, limit=st.integers(0, 100), speed=st.sampled_from([0.0, 50.0]))
def test_it_never_leaves_a_worker_idle_while_anything_waits_and_never_gives_what_is_not_there(
    waiting: list[WaitingBatch], shares: dict[str, CustomerShare], limit: int, speed: float
) -> None:
    picks = choose(waiting, shares, limit, Conditions(tokens_per_second=speed))
    there = {made.batch_id: made.pending_chunks for made in waiting}
    assert sum(pick.chunks for pick in picks) == min(limit, sum(there.values()))
    assert len({pick.batch_id for pick in picks}) == len(picks)
    assert all(1 <= pick.chunks <= there[pick.batch_id] for pick in picks)


@given(waiting=batches_of, shares=served)
def test_the_next_chunk_is_one_of_the_least_served_customer(
    waiting: list[WaitingBatch], shares: dict[str, CustomerShare]
) -> None:
    picks = choose(waiting, shares, 1)
    had = {made.customer: shares.get(made.customer, CustomerShare()).served for made in waiting}
    if waiting:
        (picked,) = (made for made in waiting if made.batch_id == picks[0].batch_id)
        assert had[picked.customer] == min(had.values())


@given(
    waiting=batches_of,
    shares=served,
    permutation=st.randoms(use_true_random=False),
)
def test_the_order_does_not_depend_on_how_the_database_returns_its_rows(
    waiting: list[WaitingBatch], shares: dict[str, CustomerShare], permutation: random.Random
) -> None:
    shuffled = list(waiting)
    permutation.shuffle(shuffled)
    assert choose(shuffled, shares, 20) == choose(waiting, shares, 20)


@given(
    sizes=st.lists(st.integers(1, 5000), min_size=3, max_size=3),
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=3, max_size=3),
    limits=st.lists(st.integers(1, 9), min_size=1, max_size=60),
)
def test_customers_that_wait_all_the_time_get_service_by_their_weights_within_one_chunk(
    sizes: list[int], weights: list[float], limits: list[int]
) -> None:
    names = ["acme", "bolt", "core"]
    service = Service(
        [
            batch(name, name, pending_chunks=1000, pending_tokens=1000 * size)
            for name, size in zip(names, sizes, strict=True)
        ],
        dict(zip(names, weights, strict=True)),
    )
    one_chunk = max(size / weight for size, weight in zip(sizes, weights, strict=True))
    for limit in limits:
        service.lease(limit)
        had = [share.served for share in service.shares.values()]
        assert max(had) - min(had) <= one_chunk * (1 + 1e-9)


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=2),
    expected=st.lists(st.integers(1, 5000), min_size=2, max_size=2),
    used=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 6000)), min_size=1, max_size=80),
    workers=st.integers(1, 6),
    which=st.randoms(use_true_random=False),
)
def test_wrong_estimates_widen_the_gap_by_what_is_out_and_no_more(
    weights: list[float],
    expected: list[int],
    used: list[tuple[int, int]],
    workers: int,
    which: random.Random,
) -> None:
    """Each step a free worker takes a chunk, or one of those that work commits: charged as used from then on. What
    chunks really use has nothing to do with what was expected.
    """
    names = ["acme", "bolt"]
    weight, each = dict(zip(names, weights, strict=True)), dict(zip(names, expected, strict=True))
    waiting = [batch(name, name, pending_chunks=1000, pending_tokens=1000 * each[name]) for name in names]
    shares = {name: CustomerShare(weight=weight[name]) for name in names}
    service = dict.fromkeys(names, 0.0)
    """In tokens as used over weight, counted when a chunk is begun."""
    out: list[tuple[str, float]] = []
    largest = wrong = 0.0
    lead, most_out = [0.0], 0
    for commits, real in used:
        if out and (commits or len(out) == workers):
            name, correction = out.pop(which.randrange(len(out)))
            shares[name] = msgspec.structs.replace(shares[name], served=shares[name].served + correction)
            continue
        name = choose(waiting, shares, 1)[0].batch_id
        charge = each[name] / weight[name]
        shares[name] = msgspec.structs.replace(shares[name], served=shares[name].served + charge)
        service[name] += real / weight[name]
        out.append((name, real / weight[name] - charge))
        largest, wrong = max(largest, real / weight[name]), max(wrong, abs(real / weight[name] - charge))
        most_out = max(most_out, len(out) - 1)
        lead.append(service["acme"] - service["bolt"])
    assert max(map(abs, lead)) <= (largest + most_out * wrong) * (1 + 1e-9)
    assert max(lead) - min(lead) <= 2 * (largest + most_out * wrong) * (1 + 1e-9)


def test_weights_of_one_and_three_give_service_one_to_three() -> None:
    waiting = [
        batch(name, customer, pending_chunks=1000, pending_tokens=10**6)
        for name, customer in (("a", "acme"), ("b", "bolt"))
    ]
    service = Service(waiting, {"acme": 1.0, "bolt": 3.0})
    for _ in range(100):
        service.lease(4)
    assert service.tokens == {"acme": 100_000, "bolt": 300_000}


def test_a_small_batch_that_comes_after_a_huge_one_of_another_customer_is_next() -> None:
    service = Service(
        [batch("huge", "acme", pending_chunks=20_000, pending_tokens=20_000_000)], {"acme": 1.0, "bolt": 1.0}
    )
    assert service.lease(50) == ["huge"] * 50
    floor = service.shares["acme"].served
    service.shares["bolt"] = CustomerShare(served=floor)  # what the ledger does with a customer that comes
    service.waiting["small"] = batch("small", "bolt", pending_chunks=2, pending_tokens=2000)
    assert sorted(service.lease(4)) == ["huge", "huge", "small", "small"]
    assert "small" not in service.waiting


def test_a_customer_with_many_batches_gets_no_more_than_one_with_a_single_one() -> None:
    many = [batch(f"a{n}", "acme", pending_chunks=100, pending_tokens=10_000) for n in range(10)]
    one = batch("b", "bolt", pending_chunks=100, pending_tokens=10_000)
    service = Service([*many, one], {"acme": 1.0, "bolt": 1.0})
    service.lease(100)
    assert service.tokens["acme"] == service.tokens["bolt"]


def test_chunks_of_no_known_tokens_are_not_free() -> None:
    nothing = {"pending_chunks": 100, "pending_tokens": 0}
    picks = choose([batch("a", "acme", **nothing), batch("b", "bolt", **nothing)], {}, 10)
    assert [pick.chunks for pick in picks] == [5, 5]


def test_inside_a_customer_an_operators_word_comes_before_the_deadline_and_that_before_first_come() -> None:
    late = batch("late", "acme", deadline_at=2000.0, created_at=1.0)
    soon = batch("soon", "acme", deadline_at=1000.0, created_at=2.0)
    as_soon = batch("as-soon", "acme", deadline_at=1000.0, created_at=3.0)
    asked = batch("asked", "acme", deadline_at=9000.0, priority=1)
    put_off = batch("put-off", "acme", deadline_at=10.0, priority=-1)
    picks = choose([put_off, late, as_soon, soon, asked], {}, 50)
    assert [pick.batch_id for pick in picks] == ["asked", "soon", "as-soon", "late", "put-off"]


def test_slack_is_the_time_to_the_deadline_less_the_work_that_is_left() -> None:
    short = batch("short", "acme", deadline_at=1000.0, pending_tokens=1000)
    long = batch("long", "acme", deadline_at=1500.0, pending_tokens=100_000)
    assert choose([short, long], {}, 1)[0].batch_id == "short"
    assert choose([short, long], {}, 1, Conditions(tokens_per_second=100.0))[0].batch_id == "long"


def test_an_operators_word_does_not_reach_into_another_customers_share() -> None:
    asked = batch("asked", "acme", priority=9)
    other = batch("other", "bolt")
    assert choose([asked, other], {"acme": CustomerShare(served=1.0)}, 1)[0].batch_id == "other"


# Batches at risk.


def at_risk_of(credit: float = 1e9) -> Conditions:
    return Conditions(now=0.0, tokens_per_second=100.0, margin_seconds=600.0, credit=credit)


def test_a_batch_at_risk_goes_ahead_of_others_turns_and_pays_for_it() -> None:
    urgent = batch("urgent", "acme", pending_chunks=10, pending_tokens=10_000, deadline_at=200.0)
    calm = batch("calm", "bolt", pending_chunks=10, pending_tokens=10_000, deadline_at=86_400.0)
    shares = {"acme": CustomerShare(served=50_000.0), "bolt": CustomerShare(served=0.0)}
    assert [pick.batch_id for pick in choose([urgent, calm], shares, 4)] == ["calm"]
    (pick,) = choose([urgent, calm], shares, 4, at_risk_of())
    assert (pick.batch_id, pick.chunks, pick.out_of_turn) == ("urgent", 4, 4)


def test_the_credit_bounds_what_goes_out_of_turn_to_it_and_one_chunk() -> None:
    urgent = batch("urgent", "acme", pending_chunks=10, pending_tokens=10_000, deadline_at=200.0)
    calm = batch("calm", "bolt", pending_chunks=10, pending_tokens=10_000, deadline_at=86_400.0)
    shares = {"acme": CustomerShare(served=50_000.0), "bolt": CustomerShare(served=0.0)}
    picks = {pick.batch_id: pick for pick in choose([urgent, calm], shares, 8, at_risk_of(credit=1500.0))}
    assert (picks["urgent"].chunks, picks["urgent"].out_of_turn, picks["calm"].chunks) == (2, 2, 6)
    assert all(pick.out_of_turn == 0 for pick in choose([urgent, calm], shares, 8, at_risk_of(credit=0.0)))


def test_a_batch_that_cannot_be_in_time_any_more_is_not_helped_and_holds_up_none_of_its_customers() -> None:
    lost = batch("lost", "acme", pending_chunks=1000, pending_tokens=1_000_000, deadline_at=500.0)
    other = batch("other", "acme", pending_chunks=2, pending_tokens=2000, deadline_at=3000.0)
    calm = batch("calm", "bolt", pending_chunks=10, pending_tokens=10_000, deadline_at=86_400.0)
    shares = {"acme": CustomerShare(served=50_000.0), "bolt": CustomerShare(served=0.0)}
    assert [pick.batch_id for pick in choose([lost, other, calm], shares, 4, at_risk_of())] == ["calm"]
    assert choose([lost, other], shares, 1, at_risk_of())[0].batch_id == "other"


@given(waiting=batches_of, shares=served, limit=st.integers(0, 60), credit=st.floats(0, 20_000))
def test_out_of_turn_never_exceeds_the_credit_by_more_than_a_chunk_and_everything_is_still_given(
    waiting: list[WaitingBatch], shares: dict[str, CustomerShare], limit: int, credit: float
) -> None:
    conditions = Conditions(now=0.0, tokens_per_second=50.0, margin_seconds=10_000.0, credit=credit)
    picks = choose(waiting, shares, limit, conditions)
    there = {made.batch_id: made for made in waiting}
    assert sum(pick.chunks for pick in picks) == min(limit, sum(made.pending_chunks for made in waiting))
    each = {name: max(made.pending_tokens / made.pending_chunks, 1.0) for name, made in there.items()}
    ahead = sum(pick.out_of_turn * each[pick.batch_id] for pick in picks)
    assert ahead <= credit + max(each.values(), default=0.0)
    for pick in picks:
        if pick.out_of_turn:
            assert is_at_risk(there[pick.batch_id], conditions)


@given(
    deadline=st.floats(1, 1e6),
    later=st.floats(0, 1e6),
    tokens=st.floats(1, 1e7),
    speed=st.sampled_from([0.0, 10.0, 1000.0]),
)
def test_of_two_that_can_be_in_time_the_one_with_less_slack_is_never_behind(
    deadline: float, later: float, tokens: float, speed: float
) -> None:
    near = batch("near", "acme", pending_tokens=int(tokens), deadline_at=deadline)
    far = batch("far", "acme", pending_tokens=int(tokens), deadline_at=deadline + later)
    conditions = Conditions(tokens_per_second=speed)
    assert slack(near, conditions) <= slack(far, conditions)
    if 0 <= slack(near, conditions) < slack(far, conditions):
        assert choose([far, near], {}, 1, conditions)[0].batch_id == "near"
