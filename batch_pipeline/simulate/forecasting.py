"""What the service would estimate at a moment of a simulation, and which batches it would give workers of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from batch_pipeline.scheduling.dedicated import Bounds, Dedication, LateBatch, dedications, late_workers
from batch_pipeline.scheduling.finish import estimated_finishes
from batch_pipeline.scheduling.order import Conditions
from batch_pipeline.scheduling.placement import Backlog
from batch_pipeline.scheduling.supply import Fleet as ModelFleet
from batch_pipeline.scheduling.supply import supply_of, to_launch
from batch_pipeline.simulate.fleet import Fleet
from batch_pipeline.simulate.paper import PaperQueue
from batch_pipeline.simulate.policies import Policy
from batch_pipeline.simulate.queues import FairQueue
from batch_pipeline.simulate.workload import Workload


class Forecasting:
    """The estimates of `results.forecast`, from what is simulated. Only our order is estimated."""

    def __init__(self, workload: Workload, policy: Policy, fleet: Fleet, queues: Mapping[str, PaperQueue]) -> None:
        self._workload = workload
        self._scheduling = workload.scheduling
        self._help_share = workload.scheduling.at_risk_share if policy.helps_at_risk else 0.0
        self._most = workload.scheduling.dedicated_workers_at_most if policy.dedicates else 0
        self._fleet = fleet
        self._queues = queues

    def finishes(self, backlog: Backlog, left: Mapping[str, int], available: int, now: float) -> dict[str, float]:
        """Return when the batches of a model will be done by the workers that all share; `left` are the requests of
        each that workers have and have not finished.
        """
        queue = self._queues[backlog.model]
        fleet = self._workers_of(backlog, available, now)
        supply = supply_of(fleet)
        if supply is None or not isinstance(queue.queue, FairQueue):
            return {}
        conditions = Conditions(
            now=now,
            tokens_per_second=sum(speed or 0.0 for speed in fleet.speeds),
            margin_seconds=self._scheduling.at_risk_minutes * 60,
        )
        return estimated_finishes(queue.queued(left), queue.queue.shares(), supply, conditions, self._help_share)

    def workers_in_time(
        self, backlogs: Sequence[Backlog], left: Mapping[str, int], available: int, now: float
    ) -> dict[str, int]:
        """Return how many shared workers the models with late batches need, with those that they have."""
        late = [one for backlog in backlogs for one in self._late(backlog, left, available, now)]
        capacities = self._fleet.capacities()
        needed = late_workers(late, capacities, now)
        return {made.model: made.shared + needed[made.model] for made in capacities if made.model in needed}

    def dedications(
        self, backlogs: Sequence[Backlog], left: Mapping[str, int], available: int, now: float
    ) -> list[Dedication]:
        """Return which batches get workers of their own now."""
        if not self._most:
            return []
        late = [one for backlog in backlogs for one in self._late(backlog, left, available, now)]
        bounds = Bounds(most=self._most, free_gpus=max(available - self._fleet.held, 0))
        return dedications(late, self._fleet.given(), self._fleet.capacities(), bounds, now)

    def _late(self, backlog: Backlog, left: Mapping[str, int], available: int, now: float) -> list[LateBatch]:
        queue, fleet = self._queues[backlog.model], self._workers_of(backlog, available, now)
        speed = fleet.worker_speed
        finishes = self.finishes(backlog, left, available, now)
        if not speed:
            return []
        return [
            LateBatch(
                batch_id=batch.waiting.batch_id,
                model=backlog.model,
                tokens=batch.waiting.pending_tokens + batch.leased_tokens,
                finish_at=finishes[batch.waiting.batch_id],
                deadline_at=batch.waiting.deadline_at,
                worker_tokens_per_second=speed,
                loading_seconds=fleet.loading_seconds,
            )
            for batch in queue.queued(left)
            if batch.waiting.pending_chunks and finishes.get(batch.waiting.batch_id, 0.0) > batch.waiting.deadline_at
        ]

    def _workers_of(self, backlog: Backlog, available: int, now: float) -> ModelFleet:
        capacity = next(made for made in self._fleet.capacities() if made.model == backlog.model)
        free = max(available - self._fleet.held, 0)
        launches = to_launch(backlog, capacity, free, self._scheduling.chunks_per_worker)
        return self._fleet.workers_of(backlog.model, now, launches)

    def left_in_hands(self, done: Mapping[str, int]) -> Counter[str]:
        """Return the requests of each batch that workers have, less those that they have finished, by worker."""
        left: Counter[str] = Counter()
        for worker in self._fleet.workers.values():
            if worker.lease is not None:
                left[worker.lease.batch.batch_id] += worker.lease.left - done[worker.worker_id]
        return left
