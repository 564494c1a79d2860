"""What a model's workers will do: those that are there, those that load, and those that will be launched (pure)."""

from __future__ import annotations

import msgspec

from batch_pipeline.scheduling.finish import Supply
from batch_pipeline.scheduling.placement import Backlog, Capacity, wanted_workers


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
        measured = [speed for speed in self.speeds if speed]
        return sum(measured) / len(measured) if measured else self.known_speed

    @property
    def most_speed(self) -> float | None:
        """Tokens a second with all the workers that there can be; None where no speed is known."""
        each = self.worker_speed
        if not each:
            return None
        ready = sum(speed or each for speed in self.speeds)
        return ready + each * max(self.most_workers - len(self.speeds), 0)


def to_launch(backlog: Backlog, capacity: Capacity, free_gpus: int, chunks_per_worker: int) -> int:
    """Return how many more workers a model gets for its backlog, if no other model takes the free GPUs."""
    wanted = wanted_workers(backlog, capacity, chunks_per_worker) - capacity.shared
    return max(min(wanted, free_gpus // capacity.gpus_per_worker if capacity.gpus_per_worker else wanted), 0)


def supply_of(fleet: Fleet) -> Supply | None:
    """Return what the workers will do from now on; None where no speed is known, or no worker is there or to come."""
    each = fleet.worker_speed
    if not each or not (fleet.speeds or fleet.loading_since or fleet.to_launch):
        return None
    speed = sum(measured or each for measured in fleet.speeds)
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
