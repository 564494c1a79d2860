"""How many workers for which model: from the backlog, the pools' limits, and the GPUs that there are."""

from __future__ import annotations

import msgspec


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """What waits and what runs on one model, over all batches that may still be leased."""

    model: str
    pending: int
    """Chunks, as is `leased`."""
    pending_tokens: int
    leased: int
    first_deadline_at: float


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What one model has and may have."""

    model: str
    workers: int
    """Workers that run, start or are queued as runs."""
    dedicated: int = 0
    """Of those, the ones that serve given batches alone: for the others they do nothing."""
    pool_limit: int
    gpus_per_worker: int

    @property
    def shared(self) -> int:
        """Workers that any batch may have."""
        return max(self.workers - self.dedicated, 0)


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """So many more workers of a model."""

    model: str
    workers: int


def plan_workers(
    backlogs: list[Backlog], capacities: list[Capacity], total_gpus: int, chunks_per_worker: int
) -> list[Launch]:
    """Return which workers to launch now.

    A model gets a worker, beside dedicated ones, for every `chunks_per_worker` pending chunks, up to its pool's limit,
    and one at least where anything is pending. GPUs that are left go one by one: first to models without a worker, so
    that none waits while another gets several, then to the model with the most pending tokens per worker (ties: the
    nearest deadline). A GPU that a model cannot use is not held.
    """
    by_model = {capacity.model: capacity for capacity in capacities}
    workers = {capacity.model: capacity.shared for capacity in capacities}
    free = total_gpus - sum(capacity.workers * capacity.gpus_per_worker for capacity in capacities)
    launched: dict[str, int] = {}
    while True:
        candidates = [
            backlog
            for backlog in backlogs
            if backlog.model in by_model
            and workers[backlog.model] < wanted_workers(backlog, by_model[backlog.model], chunks_per_worker)
            and by_model[backlog.model].gpus_per_worker <= free
        ]
        if not candidates:
            return [Launch(model=model, workers=count) for model, count in launched.items()]
        neediest = max(
            candidates,
            key=lambda backlog: (
                workers[backlog.model] == 0,
                backlog.pending_tokens / (workers[backlog.model] + 1),
                -backlog.first_deadline_at,
                backlog.model,
            ),
        )
        workers[neediest.model] += 1
        launched[neediest.model] = launched.get(neediest.model, 0) + 1
        free -= by_model[neediest.model].gpus_per_worker


def wanted_workers(backlog: Backlog, capacity: Capacity, chunks_per_worker: int) -> int:
    """Return how many workers a model should have for its backlog, with those that it has and beside dedicated ones; 0
    where nothing waits.
    """
    if backlog.pending == 0:
        return 0
    return min(
        max(capacity.pool_limit - capacity.dedicated, 0), -(-(backlog.pending + backlog.leased) // chunks_per_worker)
    )
