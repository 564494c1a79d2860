"""Which workers give their GPUs up: to live traffic at once, to another model when that is worth its loading (pure).

A worker asked to leave hands its unfinished work back, so nothing is lost but the time: the other model's loading, and
this one's when it comes back. So a model without a worker gets a GPU of another's when that has had its turn: for a
multiple of the longer of the two loading times. Two models that always have work then take turns, and loading costs a
bounded share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from batch_pipeline.scheduling.placement import Backlog, Capacity, is_late, turn_of, wanted_workers

WORTH = 2.0
"""A model that has workers already gets one of another's only where its work for each worker is so many times as much,
after the change, as the other's: otherwise two would pass one to and fro. For late batches it gets one without that."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that has GPUs."""

    worker_id: str
    model: str
    ready_at: float | None
    """When its engine had loaded; None while it loads."""
    is_leaving: bool
    """It was asked already."""
    is_dedicated: bool
    """It serves given batches alone, by an operator's word: only live traffic takes its GPUs."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of switching."""

    loading_seconds: dict[str, float]
    """What a start of a model's worker takes, as measured."""
    default_loading_seconds: float
    chunks_per_worker: int
    """Of backlog, for which one more worker is wanted."""
    turn: float
    """A worker keeps its GPU for so many times the loading time of its own model or of the other, the longer one."""

    def loading_of(self, model: str) -> float:
        """Return what a start of a worker of the model takes, in seconds."""
        return self.loading_seconds.get(model, self.default_loading_seconds)


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """A worker to ask, and why."""

    worker_id: str
    reason: str


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """All that holds GPUs, and what waits for them, at one moment."""

    backlogs: list[Backlog]
    capacities: list[Capacity]
    holders: list[Holder]
    gpus: int
    """What live traffic leaves."""
    now: float
    """In the time of `ready_at`."""


def departures(cluster: Cluster, rules: Rules) -> list[Departure]:
    """Return which workers to ask to leave now. What those that leave already will free is counted as free.

    Cost: workers times models, and workers times departures.
    """
    plan = _Plan(cluster, rules)
    plan.give_to_live_traffic()
    known = [backlog for backlog in cluster.backlogs if backlog.model in plan.capacities]
    # In the order in which `plan_workers` will launch them.
    for backlog in sorted(
        known, key=lambda made: turn_of(made, plan.capacities[made.model], max(plan.workers[made.model], 0))
    ):
        if plan.workers[backlog.model] < plan.wanted(backlog):
            plan.give_to(backlog)
    return plan.asked


class _Plan:
    """What the departures so far leave."""

    def __init__(self, cluster: Cluster, rules: Rules) -> None:
        self.capacities = {capacity.model: capacity for capacity in cluster.capacities}
        self.workers = {capacity.model: capacity.shared for capacity in cluster.capacities}
        """Beside dedicated ones."""
        self.asked: list[Departure] = []
        self._now = cluster.now
        self._rules = rules
        self._backlogs = {backlog.model: backlog for backlog in cluster.backlogs}
        known = [holder for holder in cluster.holders if holder.model in self.capacities]
        self._staying = [holder for holder in known if not holder.is_leaving]
        self._colleagues = Counter(holder.model for holder in self._staying)
        self._free = cluster.gpus - sum(made.workers * made.gpus_per_worker for made in cluster.capacities)
        for holder in known:
            if holder.is_leaving:
                self._free += self._gpus(holder.model)
                self.workers[holder.model] -= not holder.is_dedicated

    def wanted(self, backlog: Backlog) -> int:
        """Return how many workers the model should have."""
        return wanted_workers(backlog, self.capacities[backlog.model], self._rules.chunks_per_worker)

    def give_to_live_traffic(self) -> None:
        """Ask until no more GPUs are held than there are."""
        while self._free < 0 and self._staying:
            self._ask(min(self._staying, key=self._cost), "live traffic needs its GPUs")

    def give_to(self, backlog: Backlog) -> None:
        """Ask as many as one more worker of a model needs, or none where they are not enough."""
        needed = self._gpus(backlog.model)
        chosen: list[Holder] = []
        for holder in self._givers(backlog):
            if self._free + sum(self._gpus(other.model) for other in chosen) >= needed:
                break
            chosen.append(holder)
        if self._free + sum(self._gpus(holder.model) for holder in chosen) < needed:
            return
        for holder in chosen:
            self._ask(holder, f"{backlog.model} waits for its GPUs")
        self._free -= needed
        self.workers[backlog.model] += 1

    def _ask(self, holder: Holder, reason: str) -> None:
        self._staying.remove(holder)
        self._colleagues[holder.model] -= 1
        self._free += self._gpus(holder.model)
        # One whose run has just ended is not counted any more, and may still be heard of.
        self.workers[holder.model] = max(self.workers[holder.model] - (not holder.is_dedicated), 0)
        self.asked.append(Departure(worker_id=holder.worker_id, reason=reason))

    def _givers(self, backlog: Backlog) -> Iterator[Holder]:
        """Yield the workers that may give their GPUs to a model, those that lose least by it first."""
        loading = self._rules.loading_of(backlog.model)
        # A model whose worker is just leaving for another is not to get one of a third at once.
        is_served = self.capacities[backlog.model].shared > 0
        late = self._is_late(backlog)
        after = backlog.pending_tokens / (self.workers[backlog.model] + 1)
        left = dict(self.workers)
        for holder in sorted(self._staying, key=self._cost):
            if holder.model == backlog.model or holder.is_dedicated or holder.ready_at is None:
                continue
            own = self._backlogs.get(holder.model)
            has_work = own is not None and own.pending > 0
            turn = self._rules.turn * max(loading, self._rules.loading_of(holder.model))
            if has_work and self._now - holder.ready_at < turn:
                continue
            left[holder.model] -= 1
            if is_served and own is not None and has_work:
                # Only from one that keeps some, and will still have much less to do for each; or is in no hurry.
                can_spare = left[holder.model] > 0 and not own.late_workers
                much_less = can_spare and after >= WORTH * own.pending_tokens / left[holder.model]
                if not (much_less or (can_spare and late)):
                    left[holder.model] += 1
                    continue
            yield holder

    def _is_late(self, backlog: Backlog) -> bool:
        return is_late(backlog, self.capacities[backlog.model], self.workers[backlog.model])

    def _cost(self, holder: Holder) -> tuple[bool, bool, float, float, str]:
        """Order workers by what their leaving costs: dedicated ones last, before them those of models with late
        batches, then least work for each of the model's, then those that have been there for longest.
        """
        own = self._backlogs.get(holder.model)
        work = 0.0 if own is None else own.pending_tokens / max(self._colleagues[holder.model], 1)
        since = self._now if holder.ready_at is None else holder.ready_at
        late = own is not None and own.late_workers > 0
        return (holder.is_dedicated, late, work, since, holder.worker_id)

    def _gpus(self, model: str) -> int:
        return self.capacities[model].gpus_per_worker
