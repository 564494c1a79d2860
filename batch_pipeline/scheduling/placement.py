"""How many workers for which model: from the backlog, the pools' limits, and the GPUs that there are."""

from __future__ import annotations

import math

import msgspec


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """What waits and what runs on one model, over all batches that may still be leased."""

    model: str
    pending: int
    """Chunks, as is `leased`."""
    pending_tokens: int
    leased: int
    first_deadline_at: float
    late_workers: int = 0
    """More workers that the model needs for batches that would end late and can still be in time (`late_workers`)."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What one model has and may have."""

    model: str
    workers: int
    """Workers that run, start or are queued as runs."""
    dedicated: int = 0
    """Of those, the ones that serve given batches alone: for the others they do nothing."""
    pool_limit: int
    gpus_per_worker: int
    served_at: float = -math.inf
    """When it last had a ready worker that any batch may have, less than any time where that was long ago; of no
    matter where it has one now.
    """

    @property
    def shared(self) -> int:
        """Workers that any batch may have."""
        return max(self.workers - self.dedicated, 0)


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """So many more workers of a model."""

    model: str
    workers: int


def plan_workers(
    backlogs: list[Backlog],
    capacities: list[Capacity],
    total_gpus: int,
    chunks_per_worker: int,
    leaving_gpus: int = 0,
) -> list[Launch]:
    """Return which workers to launch now.

    A model gets a worker, beside dedicated ones, for every `chunks_per_worker` pending chunks, up to its pool's limit,
    and one at least where anything is pending. GPUs that are left go one by one, as `turn_of` orders models: first to
    those without a worker, the one that has been without for longest before the others, so that the model whose worker
    has left for another does not get its GPU back; then to models with late batches, as many as these need; then to the
    model with the most pending tokens per worker (ties: the nearest deadline). A GPU that a model cannot use is not
    held; but free ones are kept for a model without a worker that needs several, where those that it lacks are among
    `leaving_gpus`: of workers that were asked to leave.
    """
    by_model = {capacity.model: capacity for capacity in capacities}
    workers = {capacity.model: capacity.shared for capacity in capacities}
    free = total_gpus - sum(capacity.workers * capacity.gpus_per_worker for capacity in capacities)
    launched: dict[str, int] = {}
    kept_for: set[str] = set()

    def has_room(backlog: Backlog) -> bool:
        room = free + (leaving_gpus if workers[backlog.model] == 0 else 0)
        return backlog.model not in kept_for and by_model[backlog.model].gpus_per_worker <= room

    known = [backlog for backlog in backlogs if backlog.model in by_model]
    while True:
        candidates = [
            backlog
            for backlog in known
            if workers[backlog.model] < wanted_workers(backlog, by_model[backlog.model], chunks_per_worker)
            and has_room(backlog)
        ]
        if not candidates:
            return [Launch(model=model, workers=count) for model, count in launched.items()]
        first = min(candidates, key=lambda backlog: turn_of(backlog, by_model[backlog.model], workers[backlog.model]))
        needed = by_model[first.model].gpus_per_worker
        if needed > free:
            kept_for.add(first.model)
            leaving_gpus -= needed - max(free, 0)
            free = min(free, 0)
            continue
        workers[first.model] += 1
        launched[first.model] = launched.get(first.model, 0) + 1
        free -= needed


def turn_of(backlog: Backlog, capacity: Capacity, workers: int) -> tuple[bool, float, bool, float, float, str]:
    """Return what orders models for the next free GPU, the first one least; `workers` are those that all batches share.

    A model without any goes before one with some, and of those without the one that has been so for longest; then one
    with late batches; then the most pending tokens for each worker, and the nearest deadline.
    """
    since = capacity.served_at if workers == 0 else 0.0
    in_time = not is_late(backlog, capacity, workers)
    work = backlog.pending_tokens / (workers + 1)
    return (workers > 0, since, in_time, -work, backlog.first_deadline_at, backlog.model)


def is_late(backlog: Backlog, capacity: Capacity, workers: int) -> bool:
    """Whether a model still needs more workers for its late batches, had it so many instead of those that it has."""
    return backlog.late_workers > 0 and workers < capacity.shared + backlog.late_workers


def wanted_workers(backlog: Backlog, capacity: Capacity, chunks_per_worker: int) -> int:
    """Return how many workers a model should have for its backlog, with those that it has and beside dedicated ones; 0
    where nothing waits.
    """
    if backlog.pending == 0:
        return 0
    return min(
        max(capacity.pool_limit - capacity.dedicated, 0), -(-(backlog.pending + backlog.leased) // chunks_per_worker)
    )
