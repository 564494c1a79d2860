"""GPUs and the workers that hold them."""

from __future__ import annotations

import math
from collections import Counter, deque
from enum import StrEnum

from batch_pipeline.scheduling.placement import Capacity
from batch_pipeline.scheduling.supply import SPEEDS_COUNT_SECONDS, speeds_of
from batch_pipeline.scheduling.supply import Fleet as ModelFleet
from batch_pipeline.scheduling.switching import Holder
from batch_pipeline.simulate.arrivals import SimulatedBatch
from batch_pipeline.simulate.paper import PaperLease
from batch_pipeline.simulate.workload import SimulatedModel, Workload


class State(StrEnum):
    """starting -> ready -> leaving -> gone; from each of them to gone by a failure."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"
    GONE = "gone"


class SimulatedWorker:
    """A worker, from its launch on."""

    __slots__ = (
        "dedicated_to",
        "done_at_ask",
        "epoch",
        "is_node_going",
        "lease",
        "model",
        "ready_at",
        "seconds",
        "speed",
        "started_at",
        "state",
        "worker_id",
    )

    def __init__(self, worker_id: str, model: str, dedicated_to: SimulatedBatch | None) -> None:
        self.worker_id = worker_id
        self.model = model
        self.dedicated_to = dedicated_to
        """The only batch that it serves; None for any."""
        self.state = State.STARTING
        self.ready_at: float | None = None
        self.lease: PaperLease | None = None
        self.started_at = 0.0
        """When what it does with its lease was begun, or gone on with after the engine's death."""
        self.seconds = 0.0
        """Which takes so long for all that was left then."""
        self.speed = 0.0
        """Tokens a second of the last chunk, 0 before the first."""
        self.epoch = 0
        """Of what was planned for it, only what bears this number still counts."""
        self.done_at_ask = 0
        """Requests of its lease that were finished when it was asked to leave."""
        self.is_node_going = False
        """Its GPUs are away for a while when it is gone."""


class Gone:
    """The speeds of workers that are gone, until they are forgotten."""

    def __init__(self) -> None:
        self.total = 0.0
        self._speeds: deque[tuple[float, float]] = deque()
        """When each was last heard of, and its speed."""

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._speeds)

    def add(self, now: float, speed: float) -> None:
        """One goes now."""
        self._speeds.append((now, speed))
        self.total += speed

    def forget(self, before: float) -> None:
        """Forget those that were last heard of before then."""
        while self._speeds and self._speeds[0][0] < before:
            self.total -= self._speeds.popleft()[1]


class Fleet:
    """Who holds which GPUs. A GPU is known by the model that it had last: another one is a switch."""

    def __init__(self, workload: Workload, gpus: int) -> None:
        self.total = gpus
        self.workers: dict[str, SimulatedWorker] = {}
        """Those that hold GPUs."""
        self.away = 0
        """GPUs that are broken."""
        self.held = 0
        self.launches = 0
        self.switches = 0
        self._workload = workload
        self._last = Counter({"": gpus})
        """The free GPUs by the last model, "" for none yet."""
        self._of_model: Counter[str] = Counter()
        self._before = {model: Gone() for model in workload.models}
        """Workers that are gone, by model."""
        self._served_at: dict[str, float] = {}
        """When the last ready worker of each model that all batches share has gone."""

    def available(self, at: float) -> int:
        """Return the GPUs that batches may hold: what live traffic and failures leave."""
        return max(0, self.total - self.away - self._workload.live_gpus(at))

    def launch(self, model: str, dedicated_to: SimulatedBatch | None = None) -> SimulatedWorker:
        """Give free GPUs to a new worker."""
        gpus = self._model(model).gpus_per_worker
        self.launches += 1
        worker = SimulatedWorker(f"{model}/{self.launches:07d}", model, dedicated_to)
        # Its own last ones first, then those of the model that has most of them.
        for last, count in sorted(self._last.items(), key=lambda item: (item[0] != model, item[0] != "", -item[1])):
            taken = min(count, gpus)
            self._last[last] -= taken
            self.switches += taken if last not in (model, "") else 0
            gpus -= taken
        self.workers[worker.worker_id] = worker
        self._of_model[model] += 1
        self.held += self._model(model).gpus_per_worker
        return worker

    def free(self, worker: SimulatedWorker, now: float, *, are_broken: bool = False) -> int:
        """Take the GPUs of a worker that is gone back; returns how many. Broken ones are away until `repaired`."""
        worker.state = State.GONE
        worker.epoch += 1
        del self.workers[worker.worker_id]
        if worker.speed:
            self._before[worker.model].add(now, worker.speed)
        if worker.ready_at is not None and worker.dedicated_to is None:
            self._served_at[worker.model] = now
        gpus = self._model(worker.model).gpus_per_worker
        self._of_model[worker.model] -= 1
        self.held -= gpus
        self._last[worker.model] += gpus
        if are_broken:
            self.away += gpus
        return gpus

    def repaired(self, gpus: int) -> None:
        """So many that were broken are back."""
        self.away -= gpus

    def ready_speed(self, model: str, now: float) -> float:
        """Return the tokens a second of a model's ready workers together, as `ledger.leasing.speed_of` has it."""
        ready = [
            worker.speed for worker in self.workers.values() if worker.model == model and worker.state is State.READY
        ]
        return speeds_of(ready).together(self._known_speed(model, now))

    def _known_speed(self, model: str, now: float) -> float | None:
        """Return the tokens a second of one worker: the mean of all that were there within a day and have measured."""
        before = self._before[model]
        before.forget(now - SPEEDS_COUNT_SECONDS)
        there = [worker.speed for worker in self.workers.values() if worker.model == model and worker.speed]
        count = len(there) + len(before)
        return (sum(there) + before.total) / count if count else None

    def workers_of(self, model: str, now: float, to_launch: int) -> ModelFleet:
        """Return what an estimate wants to know of a model's workers that all batches share; speeds are those of their
        last chunks.
        """
        own = [worker for worker in self.workers.values() if worker.model == model and worker.dedicated_to is None]
        known = self._model(model)
        return ModelFleet(
            now=now,
            speeds=[worker.speed or None for worker in own if worker.state is State.READY],
            loading_since=[worker.started_at for worker in own if worker.state is State.STARTING],
            to_launch=to_launch,
            most_workers=min(known.pool_limit, self.total // known.gpus_per_worker),
            known_speed=self._known_speed(model, now),
            loading_seconds=known.loading_seconds,
        )

    def capacities(self) -> list[Capacity]:
        """Return what `plan_workers` wants to know."""
        dedicated = Counter(worker.model for worker in self.workers.values() if worker.dedicated_to is not None)
        return [
            Capacity(
                model=name,
                workers=self._of_model[name],
                dedicated=dedicated[name],
                pool_limit=model.pool_limit,
                gpus_per_worker=model.gpus_per_worker,
                served_at=self._served_at.get(name, -math.inf),
            )
            for name, model in self._workload.models.items()
        ]

    def leaving_gpus(self) -> int:
        """Return the GPUs of workers that were asked to leave."""
        leaving = [worker for worker in self.workers.values() if worker.state is State.LEAVING]
        return sum(self._model(worker.model).gpus_per_worker for worker in leaving)

    def given(self) -> Counter[str]:
        """Return how many workers each batch has for itself."""
        return Counter(w.dedicated_to.batch_id for w in self.workers.values() if w.dedicated_to is not None)

    def holders(self) -> list[Holder]:
        """Return what `departures` wants to know."""
        return [
            Holder(
                worker_id=worker.worker_id,
                model=worker.model,
                ready_at=worker.ready_at,
                is_leaving=worker.state is State.LEAVING,
                is_dedicated=worker.dedicated_to is not None,
            )
            for worker in self.workers.values()
        ]

    def _model(self, name: str) -> SimulatedModel:
        return self._workload.models[name]
