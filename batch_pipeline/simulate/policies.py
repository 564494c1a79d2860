"""The policies that are compared: ours, ours without each of its parts, and three that are common."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from batch_pipeline.settings import Intake, Scheduling
from batch_pipeline.simulate.queues import FairQueue, Queue, RoundRobinQueue, Rules, SortedQueue


class Order(StrEnum):
    """What decides which chunk is next."""

    FAIR = "fair"
    FIRST_COME = "first-come"
    DEADLINE = "deadline"
    ROUND_ROBIN = "round-robin"


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Ours, where nothing else is said."""

    name: str
    meaning: str
    order: Order = Order.FAIR
    helps_at_risk: bool = True
    has_slack: bool = True
    """Whether slack orders the batches of a customer, and late batches get GPUs of other models; else they go first
    come, first served, and get none.
    """
    has_habits: bool = True
    """Whether estimates learn what answers really take; else they stay at max_tokens."""
    has_weights: bool = True
    has_floor: bool = True
    has_corrections: bool = True
    has_hysteresis: bool = True
    dedicates: bool = True
    """Whether batches at risk may have workers of their own, where the workload allows any."""

    def queue(self, weights: Mapping[str, float], scheduling: Scheduling, intake: Intake) -> Queue:
        """Return an empty queue for one model."""
        if self.order is Order.ROUND_ROBIN:
            return RoundRobinQueue()
        if self.order is not Order.FAIR:
            return SortedQueue(by_deadline=self.order is Order.DEADLINE)
        share = scheduling.at_risk_share if self.helps_at_risk else 0.0
        rules = Rules(
            margin_seconds=scheduling.at_risk_minutes * 60,
            share=share,
            # As `Ledger.from_settings` has it.
            most_tokens=2.0 * intake.chunk_tokens if self.helps_at_risk else 0.0,
            has_slack=self.has_slack,
            has_floor=self.has_floor,
            has_corrections=self.has_corrections,
        )
        return FairQueue(weights if self.has_weights else {}, rules)


OURS = "ours"
POLICIES = {
    policy.name: policy
    for policy in (
        Policy(name=OURS, meaning="what the service does"),
        Policy(name="fcfs", meaning="first come, first served", order=Order.FIRST_COME),
        Policy(name="edf", meaning="earliest deadline first", order=Order.DEADLINE),
        Policy(name="round-robin", meaning="a chunk of each customer in turn", order=Order.ROUND_ROBIN),
        Policy(name="no-at-risk", meaning="ours, batches at risk get no help", helps_at_risk=False),
        Policy(
            name="no-slack",
            meaning="ours, first come first served inside a customer; late batches move no GPUs",
            has_slack=False,
        ),
        Policy(name="no-habits", meaning="ours, estimates do not learn what answers take", has_habits=False),
        Policy(name="no-weights", meaning="ours, all customers weigh the same", has_weights=False),
        Policy(name="no-floor", meaning="ours, whoever stays away saves up credit", has_floor=False),
        Policy(name="no-corrections", meaning="ours, charges stay as they were expected", has_corrections=False),
        Policy(name="no-dedicated", meaning="ours, no workers for single batches", dedicates=False),
        Policy(name="no-hysteresis", meaning="ours, GPUs change models without a turn", has_hysteresis=False),
    )
}
