"""What the sensor of GPU workers makes of late batches: workers that are on their way are not asked for twice."""

from __future__ import annotations

from batch_pipeline.scheduling.dedicated import LateBatch
from batch_pipeline.scheduling.placement import Backlog, Capacity
from batch_pipeline.scheduling.switching import Holder
from sensors.gpu_workers import _with_late

WAITING = [
    Backlog(model=model, pending=9, pending_tokens=900, leased=0, first_deadline_at=1000.0) for model in ("m", "n")
]
LATE = LateBatch(
    batch_id="late",
    model="m",
    tokens=30_000.0,
    finish_at=2000.0,
    deadline_at=1000.0,
    worker_tokens_per_second=10.0,
    loading_seconds=100.0,
)
"""It needs two more workers."""


def late_workers(runs: int, registered: int) -> dict[str, int]:
    """How many more workers each model is said to need; of m there are so many runs, and so many workers are known."""
    capacities = [
        Capacity(model="m", workers=runs, pool_limit=8, gpus_per_worker=1),
        Capacity(model="n", workers=1, pool_limit=8, gpus_per_worker=1),
    ]
    holders = [
        Holder(worker_id=f"w{number}", model="m", ready_at=0.0, is_leaving=False, is_dedicated=False)
        for number in range(registered)
    ]
    return {made.model: made.late_workers for made in _with_late(WAITING, capacities, [LATE], holders, 0.0)}


def test_a_model_with_a_late_batch_needs_more_workers_beside_those_that_are_on_their_way() -> None:
    assert late_workers(runs=1, registered=1) == {"m": 2, "n": 0}
    assert late_workers(runs=2, registered=1) == {"m": 1, "n": 0}
    assert late_workers(runs=4, registered=1) == {"m": 0, "n": 0}
