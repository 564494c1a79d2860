"""How good estimates of finish are: made on the way, as the service makes them, and judged at the end of each batch.

A batch is estimated when it is first seen, and when a quarter, half and three quarters of its requests are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from batch_pipeline.scheduling.accuracy import Kept, relative_error
from batch_pipeline.simulate.arrivals import SimulatedBatch
from batch_pipeline.simulate.report import EstimateErrors

MILESTONES = {"first": 0.0, "25 %": 0.25, "50 %": 0.5, "75 %": 0.75}


class Accuracy:
    """Estimates that were made, and their errors once a batch has ended."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Kept]] = {}
        self._batches: dict[str, SimulatedBatch] = {}

    def look(self, batches: Iterable[SimulatedBatch], finishes: Mapping[str, float], now: float) -> None:
        """Keep the estimates of those of the batches that have come to a milestone since the last look."""
        for batch in batches:
            if batch.batch_id in finishes:
                for milestone in self._due(batch):
                    self._batches[batch.batch_id] = batch
                    kept = Kept(made_at=now, finish_at=finishes[batch.batch_id])
                    self._kept.setdefault(batch.batch_id, {})[milestone] = kept

    def _due(self, batch: SimulatedBatch) -> list[str]:
        """Return the milestones that a batch has come to; of several at once the last alone tells of it."""
        kept = self._kept.get(batch.batch_id, {})
        reached = [name for name, share in MILESTONES.items() if batch.done >= share * batch.requests]
        return [name for name in reached[-1:] if name not in kept]

    def errors(self) -> list[EstimateErrors]:
        """Return the errors by milestone, of batches that were done in time: when others would have been is unknown."""
        found: dict[str, list[float]] = {name: [] for name in MILESTONES}
        for batch_id, kept in self._kept.items():
            batch = self._batches[batch_id]
            if batch.ended_at is None or batch.done < batch.requests:
                continue
            for milestone, one in kept.items():
                error = relative_error(one, batch.ended_at)
                if error is not None:
                    found[milestone].append(error)
        return [_errors(name, errors) for name, errors in found.items() if errors]


def _errors(name: str, errors: list[float]) -> EstimateErrors:
    p50, p95 = (round(float(value), 4) for value in np.quantile(errors, [0.5, 0.95]))
    return EstimateErrors(made=name, batches=len(errors), p50=p50, p95=p95)
