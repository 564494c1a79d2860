"""What a model's workers will do: those that are there, those that load, and those that will be launched (pure)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from batch_pipeline.scheduling.finish import Supply
from batch_pipeline.scheduling.placement import Backlog, Capacity, wanted_workers

SPEEDS_COUNT_SECONDS = 86_400.0
"""For so long what a worker has measured tells of others of its model."""


class Speeds(msgspec.Struct, frozen=True):
    """What the ready workers of one model have measured."""

    total: float
    """Tokens a second of those that have, together."""
    measured: int
    """How many have."""
    unmeasured: int
    """And how many have not yet."""

    def of_one(self, known: float | None) -> float | None:
        """Return the tokens a second of one worker; `known` is that of workers before these."""
        return self.total / self.measured if self.measured else known

    def together(self, known: float | None) -> float:
        """Return the tokens a second of all: who has not measured is as fast as the others; 0 if nobody knows."""
        return self.total + self.unmeasured * (self.of_one(known) or 0.0)


def speeds_of(ready: Sequence[float | None]) -> Speeds:
    """Return what these ready workers have measured: None or 0 where one has not."""
    measured = [speed for speed in ready if speed]
    return Speeds(total=sum(measured), measured=len(measured), unmeasured=len(ready) - len(measured))


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of one model at one moment, beside those that are dedicated to given batches."""

    now: float
    """UTC seconds, as all times."""
    speeds: list[float | None]
    """Tokens a second of each that is ready; None where it has not measured yet."""
    loading_since: list[float]
    """When each that loads was started."""
    to_launch: int
    """How many more there will be for the backlog, as far as pool and GPUs allow it now."""
    most_workers: int
    """How many the pool and all GPUs allow."""
    known_speed: float | None
    """Of one worker, as measured lately or as the catalogue has it; None where nobody knows."""
    loading_seconds: float

    @property
    def worker_speed(self) -> float | None:
        """Tokens a second of one worker: the mean of those that have measured, else what is known."""
        return self._ready.of_one(self.known_speed)

    @property
    def ready_speed(self) -> float:
        """Tokens a second of the ready workers together, as the order of chunks has it; 0 where none is known."""
        return self._ready.together(self.known_speed)

    @property
    def _ready(self) -> Speeds:
        return speeds_of(self.speeds)

    @property
    def most_speed(self) -> float | None:
        """Tokens a second with all the workers that there can be; None where no speed is known."""
        each = self.worker_speed
        if not each:
            return None
        return self.ready_speed + each * max(self.most_workers - len(self.speeds), 0)


def to_launch(backlog: Backlog, capacity: Capacity, free_gpus: int, chunks_per_worker: int) -> int:
    """Return how many more workers a model gets for its backlog, if no other model takes the free GPUs."""
    wanted = wanted_workers(backlog, capacity, chunks_per_worker) - capacity.shared
    return max(min(wanted, free_gpus // capacity.gpus_per_worker if capacity.gpus_per_worker else wanted), 0)


def supply_of(fleet: Fleet) -> Supply | None:
    """Return what the workers will do from now on; None where no speed is known, or no worker is there or to come."""
    each = fleet.worker_speed
    if not each or not (fleet.speeds or fleet.loading_since or fleet.to_launch):
        return None
    speed = fleet.ready_speed
    steps = [(fleet.now, speed)]
    # One that has loaded for longer than usual may be there at any moment.
    ready_at = [max(since + fleet.loading_seconds, fleet.now) for since in fleet.loading_since]
    ready_at += [fleet.now + fleet.loading_seconds] * fleet.to_launch
    for moment in sorted(ready_at):
        speed += each
        if moment > steps[-1][0]:
            steps.append((moment, speed))
        else:
            steps[-1] = (moment, speed)
    return Supply(steps=steps, worker_tokens_per_second=each)
