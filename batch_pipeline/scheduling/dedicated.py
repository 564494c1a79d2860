"""Workers for late batches: how many more their models need; and how many get some of their own, where an operator
allows any (pure).

A dedicated worker leases chunks of its batch whatever its customer's turns are. That breaks the bound on help, which is
why there are none by default; what they take is charged like any other service.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from batch_pipeline.scheduling.placement import Capacity


class LateBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that would end after its deadline without workers of its own. Times are UTC seconds."""

    batch_id: str
    model: str
    tokens: float
    """That are left, as they are expected to be used."""
    finish_at: float
    """By the workers that all batches share."""
    deadline_at: float
    worker_tokens_per_second: float
    """Of one worker of its model; above 0."""
    loading_seconds: float


class Dedication(msgspec.Struct, frozen=True, kw_only=True):
    """So many more workers for one batch alone."""

    batch_id: str
    model: str
    workers: int


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """How many there may be."""

    most: int
    """Dedicated workers of all models together, with those that there are."""
    free_gpus: int


def dedications(
    late: Sequence[LateBatch],
    given: Mapping[str, int],
    capacities: Sequence[Capacity],
    bounds: Bounds,
    now: float,
) -> list[Dedication]:
    """Return which dedicated workers to launch now, beside those that batches are `given` already.

    The nearest deadline first. A batch gets none where it would need more than there can be: workers that do not save
    its deadline had better serve somebody else's.
    """
    workers = {capacity.model: capacity for capacity in capacities}
    launched: dict[str, int] = {}
    left, free_gpus = bounds.most - sum(given.values()), bounds.free_gpus
    made = []
    for batch in sorted(late, key=lambda batch: (batch.deadline_at, batch.batch_id)):
        needed, capacity = needed_workers(batch, now), workers.get(batch.model)
        if needed is None or capacity is None or needed <= given.get(batch.batch_id, 0):
            continue
        missing = needed - given.get(batch.batch_id, 0)
        in_pool = capacity.pool_limit - capacity.workers - launched.get(batch.model, 0)
        if missing > left or missing > in_pool or missing * capacity.gpus_per_worker > free_gpus:
            continue
        left -= missing
        free_gpus -= missing * capacity.gpus_per_worker
        launched[batch.model] = launched.get(batch.model, 0) + missing
        made.append(Dedication(batch_id=batch.batch_id, model=batch.model, workers=missing))
    return made


def late_workers(late: Sequence[LateBatch], capacities: Sequence[Capacity], now: float) -> dict[str, int]:
    """Return, for models with late batches, how many more workers bring them in time: what the neediest of each needs.

    A batch that would need more than its model's pool has left is not counted: workers that do not save its deadline
    had better serve others.
    """
    room = {capacity.model: capacity.pool_limit - capacity.workers for capacity in capacities}
    found: dict[str, int] = {}
    for batch in late:
        needed = needed_workers(batch, now)
        if needed and needed <= room.get(batch.model, 0):
            found[batch.model] = max(found.get(batch.model, 0), needed)
    return found


def needed_workers(batch: LateBatch, now: float) -> int | None:
    """Return how many workers do by the deadline what would be left then; None where there is no time to load any."""
    if batch.finish_at <= batch.deadline_at:
        return 0
    seconds = batch.deadline_at - now - batch.loading_seconds
    if seconds <= 0:
        return None
    late_tokens = batch.tokens * (batch.finish_at - batch.deadline_at) / (batch.finish_at - now)
    return math.ceil(late_tokens / (batch.worker_tokens_per_second * seconds))
