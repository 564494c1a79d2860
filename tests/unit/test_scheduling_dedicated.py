"""Workers for single batches: as many as their deadline needs, within the bounds, and none where they would not do."""

from __future__ import annotations

import msgspec

from batch_pipeline.scheduling.dedicated import Bounds, LateBatch, dedications, late_workers, needed_workers
from batch_pipeline.scheduling.placement import Capacity

LATE = LateBatch(
    batch_id="late",
    model="m",
    tokens=10_000.0,
    finish_at=2000.0,
    deadline_at=1000.0,
    worker_tokens_per_second=10.0,
    loading_seconds=100.0,
)
"""Half of it would be left at the deadline: 5,000 tokens, of which a worker does 9,000 once it has loaded."""
POOL = Capacity(model="m", workers=1, pool_limit=4, gpus_per_worker=2)
BOUNDS = Bounds(most=3, free_gpus=8)


def workers(*late: LateBatch, given: dict[str, int] | None = None, bounds: Bounds = BOUNDS) -> dict[str, int]:
    """What is launched, by batch."""
    made = dedications(late, given or {}, [POOL], bounds, 0.0)
    return {one.batch_id: one.workers for one in made}


def large(name: str, deadline_at: float = 1000.0) -> LateBatch:
    """One that needs two."""
    return msgspec.structs.replace(LATE, batch_id=name, tokens=30_000.0, deadline_at=deadline_at)


def test_a_late_batch_gets_the_workers_that_do_what_would_be_left() -> None:
    assert needed_workers(LATE, 0.0) == 1
    assert workers(LATE) == {"late": 1}
    assert workers(large("large")) == {"large": 2}


def test_what_it_has_already_counts() -> None:
    assert workers(LATE, given={"late": 1}) == {}
    assert workers(large("large"), given={"large": 1}) == {"large": 1}


def test_the_nearest_deadline_comes_first_and_nobody_gets_workers_that_do_not_save_it() -> None:
    assert workers(large("far", 1010.0), large("near", 990.0)) == {"near": 2}
    # The second one needs two and there is one: a third, which needs one, has it.
    later = msgspec.structs.replace(LATE, deadline_at=1020.0)
    assert workers(large("near", 990.0), large("far", 1010.0), later) == {"near": 2, "late": 1}


def test_pool_gpus_and_the_operators_number_are_kept() -> None:
    one = large("large")
    assert workers(one, bounds=Bounds(most=1, free_gpus=8)) == {}
    assert workers(one, bounds=Bounds(most=3, free_gpus=3)) == {}
    assert workers(one, given={"other": 2}) == {}
    assert dedications([one], {}, [msgspec.structs.replace(POOL, workers=3)], BOUNDS, 0.0) == []
    assert dedications([one], {}, [], BOUNDS, 0.0) == []


def test_where_there_is_no_time_to_load_there_is_none() -> None:
    assert needed_workers(LATE, 900.0) is None
    assert dedications([LATE], {}, [POOL], BOUNDS, 900.0) == []
    assert needed_workers(msgspec.structs.replace(LATE, finish_at=999.0), 0.0) == 0


def test_a_model_needs_what_the_neediest_of_its_late_batches_does_that_can_be_saved() -> None:
    one_left, full = (msgspec.structs.replace(POOL, pool_limit=limit) for limit in (2, 1))
    assert late_workers([LATE, large("large")], [POOL], 0.0) == {"m": 2}
    assert late_workers([LATE, large("large")], [one_left], 0.0) == {"m": 1}
    assert late_workers([LATE], [full], 0.0) == {}
    in_time = msgspec.structs.replace(LATE, finish_at=900.0)
    too_late = msgspec.structs.replace(LATE, deadline_at=50.0)
    assert late_workers([in_time, too_late], [POOL], 0.0) == {}
