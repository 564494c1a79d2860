"""From batches that have ended to groups of them: by customer and by size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from batch_pipeline.simulate.arrivals import SimulatedBatch
from batch_pipeline.simulate.report import Group, Quantiles

SIZES = (
    (1_000, "to 1,000 requests"),
    (10_000, "to 10,000"),
    (100_000, "to 100,000"),
    (1_000_000, "to 1,000,000"),
    (None, "above 1,000,000"),
)


def by_customer(batches: Iterable[SimulatedBatch]) -> list[Group]:
    """Return a group for each customer, by name."""
    groups: dict[str, list[SimulatedBatch]] = {}
    for batch in batches:
        groups.setdefault(batch.customer, []).append(batch)
    return [_group(name, groups[name]) for name in sorted(groups)]


def by_size(batches: Iterable[SimulatedBatch]) -> list[Group]:
    """Return a group for each class of sizes that has batches, the smallest first."""
    groups: dict[str, list[SimulatedBatch]] = {name: [] for _, name in SIZES}
    for batch in batches:
        groups[next(name for most, name in SIZES if most is None or batch.requests <= most)].append(batch)
    return [_group(name, found) for name, found in groups.items() if found]


def is_met(batch: SimulatedBatch) -> bool:
    """Whether all requests were done at the deadline."""
    return batch.done == batch.requests and batch.ended_at is not None and batch.ended_at <= batch.deadline_at


def _group(name: str, batches: Sequence[SimulatedBatch]) -> Group:
    met = [batch for batch in batches if is_met(batch)]
    waits = [
        (batch.deadline_at if batch.first_start_at is None else batch.first_start_at) - batch.created_at
        for batch in batches
    ]
    return Group(
        name=name,
        batches=len(batches),
        met=len(met),
        requests=sum(batch.requests for batch in batches),
        served=sum(batch.done for batch in batches),
        wait_seconds=_quantiles(waits),
        turnaround_seconds=_quantiles([batch.ended_at - batch.created_at for batch in met if batch.ended_at]),
    )


def _quantiles(seconds: Sequence[float]) -> Quantiles:
    if not seconds:
        return Quantiles()
    p50, p95, p99 = (round(float(value), 1) for value in np.quantile(seconds, [0.5, 0.95, 0.99]))
    return Quantiles(p50=p50, p95=p95, p99=p99)
