"""What workers will do, which batches are late, which cannot but be, and how far estimates were off."""

from __future__ import annotations

import msgspec
import pytest

from batch_pipeline.scheduling.accuracy import ERROR_BOUNDS, Kept, Milestone, due, error_class, relative_error
from batch_pipeline.scheduling.placement import Backlog, Capacity
from batch_pipeline.scheduling.risk import Demand, Outlook, Pace, risk_of, shortfall
from batch_pipeline.scheduling.supply import Fleet, supply_of, to_launch

FLEET = Fleet(
    now=1000.0,
    speeds=[20.0, 40.0, None],
    loading_since=[950.0, 700.0],
    to_launch=2,
    most_workers=8,
    known_speed=5.0,
    loading_seconds=120.0,
)
PACE = Pace(
    batch_id="b",
    customer="acme",
    name="notes",
    models=["m"],
    started_at=0.0,
    deadline_at=1000.0,
    done=50,
    total=100,
    at_risk_at=None,
)
DEMAND = Demand(
    model="m",
    tokens=100_000.0,
    deadline_at=5000.0,
    now=0.0,
    most_workers=2,
    most_tokens_per_second=25.0,
    loading_seconds=600.0,
)


def test_workers_that_load_and_are_launched_bring_the_mean_speed_when_they_are_ready() -> None:
    supply = supply_of(FLEET)
    assert supply is not None
    assert supply.worker_tokens_per_second == 30.0
    # One loads for longer than usual and may be there at any moment.
    assert supply.steps == [(1000.0, 120.0), (1070.0, 150.0), (1120.0, 210.0)]
    assert FLEET.most_speed == 20.0 + 40.0 + 30.0 + 5 * 30.0


def test_what_was_measured_before_or_declared_counts_where_no_worker_has_measured() -> None:
    loading = msgspec.structs.replace(FLEET, speeds=[], loading_since=[], to_launch=1)
    supply = supply_of(loading)
    assert supply is not None
    assert supply.steps == [(1000.0, 0.0), (1120.0, 5.0)]
    assert supply_of(msgspec.structs.replace(loading, known_speed=None)) is None
    assert msgspec.structs.replace(loading, known_speed=None).most_speed is None
    assert supply_of(msgspec.structs.replace(loading, to_launch=0)) is None, "no worker is there or to come"


def test_as_many_workers_are_to_come_as_backlog_pool_and_free_gpus_allow() -> None:
    backlog = Backlog(model="m", pending=40, pending_tokens=1, leased=0, first_deadline_at=0.0)
    capacity = Capacity(model="m", workers=1, pool_limit=6, gpus_per_worker=2)
    assert to_launch(backlog, capacity, 100, 4) == 5
    assert to_launch(backlog, capacity, 5, 4) == 2
    assert to_launch(backlog, capacity, 0, 4) == 0
    assert to_launch(msgspec.structs.replace(backlog, pending=4), capacity, 100, 4) == 0


def test_a_batch_that_no_capacity_can_save_says_so_with_the_arithmetic() -> None:
    assert shortfall(DEMAND) is None
    tokens = msgspec.structs.replace(DEMAND, tokens=150_000.0)
    assert shortfall(tokens) == (
        "it cannot be done by its deadline, even with all that m can have: 150,000 tokens are left, 2 workers do 25 a "
        "second, which takes 100 min and 10 min for loading; there are 83 min"
    )
    assert shortfall(msgspec.structs.replace(tokens, most_tokens_per_second=None)) is None, "nobody knows"
    # A tenth more than there is time for is not held against it: speeds are measured.
    assert shortfall(msgspec.structs.replace(DEMAND, tokens=112_500.0, loading_seconds=500.0)) is None


@pytest.mark.parametrize("speed", [0.0, None, 25.0])
def test_a_batch_of_a_model_of_which_no_worker_can_run_says_so_and_why(speed: float | None) -> None:
    """It is known that there is no capacity, whether or not it is known how fast a worker would be."""
    none = msgspec.structs.replace(DEMAND, most_workers=0, most_tokens_per_second=speed)
    assert shortfall(none) == "it cannot be done by its deadline, since no worker of m can run"
    why = msgspec.structs.replace(none, no_worker_because="each needs 8 GPUs, and the service has 1")
    said = f"{shortfall(none)}: each needs 8 GPUs, and the service has 1"
    assert shortfall(why) == said
    assert risk_of(PACE, Outlook(shortfall=shortfall(why)), 0.0) == said


def test_as_long_as_a_worker_is_there_that_is_about_to_leave_nothing_is_said() -> None:
    leaving = msgspec.structs.replace(DEMAND, most_workers=1, most_tokens_per_second=0.0)
    assert shortfall(leaving) is None


def test_a_batch_is_at_risk_when_it_ends_late_in_its_queue_until_there_is_time_left_over() -> None:
    assert risk_of(PACE, Outlook(finish_at=990.0), 500.0) is None
    assert risk_of(PACE, Outlook(finish_at=1240.0), 500.0) == (
        "50 of 100 requests have finished; in this queue it ends 4 min after its deadline"
    )
    risky = msgspec.structs.replace(PACE, at_risk_at=400.0)
    assert "only 10 s before its deadline" in str(risk_of(risky, Outlook(finish_at=990.0), 500.0))
    assert risk_of(risky, Outlook(finish_at=890.0), 500.0) is None
    assert risk_of(PACE, Outlook(finish_at=9999.0), 40.0) is None, "too early to say"
    assert risk_of(PACE, Outlook(finish_at=9999.0, shortfall="it cannot"), 0.0) == "it cannot", "that is not"


def test_where_no_speed_is_known_the_batchs_own_rate_has_to_do() -> None:
    assert risk_of(PACE, Outlook(), 450.0) is None
    assert "at this rate it ends 200 s after" in str(risk_of(PACE, Outlook(), 600.0)).replace("3 min", "200 s")
    nothing = msgspec.structs.replace(PACE, done=0)
    assert risk_of(nothing, Outlook(), 400.0) is None
    assert "no request has finished" in str(risk_of(nothing, Outlook(), 600.0))
    assert risk_of(msgspec.structs.replace(PACE, done=100), Outlook(finish_at=2000.0), 600.0) is None


def test_an_estimate_is_judged_by_the_time_that_was_left_when_it_was_made() -> None:
    assert relative_error(Kept(made_at=0.0, finish_at=150.0), 100.0) == pytest.approx(0.5)
    assert relative_error(Kept(made_at=50.0, finish_at=75.0), 100.0) == pytest.approx(0.5)
    assert relative_error(Kept(made_at=100.0, finish_at=150.0), 100.0) is None
    assert [error_class(error) for error in (0.0, 0.05, 0.06, 99.0)] == [0, 0, 1, len(ERROR_BOUNDS)]


def test_an_estimate_is_kept_at_first_and_at_half_way() -> None:
    first = {Milestone.FIRST: Kept(made_at=0.0, finish_at=1.0)}
    assert due(0, 10, {}) == [Milestone.FIRST]
    assert due(4, 10, first) == []
    assert due(5, 10, first) == [Milestone.HALF]
    assert due(9, 10, {}) == [Milestone.FIRST, Milestone.HALF]
