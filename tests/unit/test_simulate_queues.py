"""The simulator's queue keeps the order of `choose`, whatever happens; and the orders that ours is compared with."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_pipeline.scheduling.order import Conditions, CustomerShare, WaitingBatch, choose, chunk_tokens
from batch_pipeline.simulate.queues import Charge, FairQueue, RoundRobinQueue, Rules, SortedQueue

CUSTOMERS = ["acme", "bolt", "core", "dune"]
WEIGHTS = {"acme": 1.0, "bolt": 3.0, "core": 0.5}
RULES = Rules(margin_seconds=300.0, share=0.25, most_tokens=5000.0)


def batch(batch_id: str, customer: str, **values: float) -> WaitingBatch:
    """A waiting batch."""
    return WaitingBatch(
        batch_id=batch_id,
        customer=customer,
        pending_chunks=int(values.get("pending_chunks", 10)),
        pending_tokens=values.get("pending_tokens", 1000.0),
        priority=int(values.get("priority", 0)),
        deadline_at=values.get("deadline_at", 1000.0),
        created_at=values.get("created_at", 0.0),
    )


class Twin:
    """A FairQueue, and beside it what `choose` would be given."""

    def __init__(self) -> None:
        self.queue = FairQueue(WEIGHTS, RULES)
        self.waiting: dict[str, WaitingBatch] = {}
        self.now = 0.0
        self.speed = 0.0

    def come(self, made: WaitingBatch) -> None:
        """A batch comes, or is known better."""
        if made.batch_id in self.waiting and self.waiting[made.batch_id].customer != made.customer:
            return
        self.queue.look(self.now)
        self.queue.join(made.customer)
        self.queue.put(made)
        self.waiting[made.batch_id] = made

    def check(self, limit: int) -> None:
        """Pick by both, and take the first pick."""
        self.queue.look(self.now)
        shares = {
            name: CustomerShare(weight=WEIGHTS.get(name, 1.0), served=served)
            for name, served in self.queue.served.items()
        }
        conditions = Conditions(
            now=self.now,
            tokens_per_second=self.speed,
            margin_seconds=RULES.margin_seconds,
            credit=self.queue.credit,
        )
        picks = self.queue.pick(limit)
        assert picks == choose(list(self.waiting.values()), shares, limit, conditions)
        if picks:
            first = picks[0]
            taken = self.waiting[first.batch_id]
            tokens = chunk_tokens(taken) * first.chunks
            ahead = chunk_tokens(taken) * first.out_of_turn
            self.queue.charge(Charge(taken.customer, tokens, ahead))
            left = taken.pending_chunks - first.chunks
            if left:
                self.come(
                    batch(
                        taken.batch_id,
                        taken.customer,
                        pending_chunks=left,
                        pending_tokens=taken.pending_tokens / taken.pending_chunks * left,
                        priority=taken.priority,
                        deadline_at=taken.deadline_at,
                        created_at=taken.created_at,
                    )
                )
            else:
                self.queue.remove(taken.batch_id)
                del self.waiting[taken.batch_id]


@settings(max_examples=50, deadline=None)
@given(randomness=st.randoms(use_true_random=False), steps=st.integers(5, 60))
def test_the_kept_order_gives_the_picks_of_the_policy(randomness: random.Random, steps: int) -> None:
    twin = Twin()
    for _ in range(steps):
        what = randomness.random()
        if what < 0.4:
            twin.come(
                batch(
                    f"b{randomness.randrange(12)}",
                    randomness.choice(CUSTOMERS),
                    pending_chunks=randomness.randint(1, 6),
                    pending_tokens=randomness.choice([0.0, 500.0, 2000.0, 40_000.0]),
                    priority=randomness.choice([0, 0, 0, 1]),
                    deadline_at=twin.now + randomness.choice([100.0, 400.0, 1500.0, 9000.0]),
                    created_at=twin.now,
                )
            )
        elif what < 0.5:
            twin.speed = randomness.choice([0.0, 10.0, 37.5])
            twin.queue.set_speed(twin.speed)
        elif what < 0.6 and twin.waiting:
            gone = randomness.choice(sorted(twin.waiting))
            twin.queue.remove(gone)
            del twin.waiting[gone]
        elif what < 0.8:
            twin.now += randomness.choice([1.0, 60.0, 500.0])
        twin.check(randomness.choice([1, 1, 2, 5, 30]))


def test_a_customer_that_comes_is_lifted_to_the_least_served_that_waits() -> None:
    queue = FairQueue({}, RULES)
    for customer in ("acme", "bolt"):
        queue.join(customer)
        queue.put(batch(customer, customer))
    queue.charge(Charge("acme", 900.0))
    queue.charge(Charge("bolt", 700.0))
    queue.join("core")
    assert queue.served["core"] == 700.0
    without = FairQueue({}, RULES._replace(has_floor=False))
    without.join("acme")
    without.put(batch("a", "acme"))
    without.charge(Charge("acme", 900.0))
    without.join("core")
    assert without.served["core"] == 0.0


@pytest.mark.parametrize(("by_deadline", "first"), [(False, "early"), (True, "soon")])
def test_the_plain_orders_know_no_customers(by_deadline: bool, first: str) -> None:
    queue = SortedQueue(by_deadline=by_deadline)
    queue.put(batch("soon", "acme", created_at=2.0, deadline_at=100.0))
    queue.put(batch("early", "bolt", created_at=1.0, deadline_at=900.0))
    assert [pick.batch_id for pick in queue.pick(1)] == [first]
    assert [pick.chunks for pick in queue.pick(15)] == [10, 5]


def test_round_robin_gives_each_customer_a_chunk() -> None:
    queue = RoundRobinQueue()
    for name in ("acme", "bolt"):
        queue.put(batch(f"{name}/1", name))
        queue.put(batch(f"{name}/2", name))
    given_to = []
    for _ in range(4):
        (pick,) = queue.pick(3)
        customer = pick.batch_id.partition("/")[0]
        queue.charge(Charge(customer, 1.0))
        given_to.append(customer)
    assert given_to == ["acme", "bolt", "acme", "bolt"]
