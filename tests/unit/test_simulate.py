"""The simulator: answers that a hand can calculate, nothing lost, and the scenarios that the policy is there for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_pipeline.settings import Intake, Scheduling
from batch_pipeline.simulate import OURS, POLICIES, Report, Workload, simulate
from batch_pipeline.simulate.capacity import calculate, plan
from batch_pipeline.simulate.paper import PaperLease
from batch_pipeline.simulate.workload import (
    Customers,
    Failures,
    ListedBatch,
    Live,
    Outage,
    SimulatedModel,
    Spread,
    Window,
)

MODEL = SimulatedModel(prompt_tokens_per_second=10_000.0, output_tokens_per_second=10_000.0, loading_seconds=10.0)
"""A request of 100 tokens, and as many answered, takes 0.02 s: a chunk of 1,000 takes 20 s."""
CHUNK_SECONDS = 20.0
CHUNK_TOKENS = 200_000.0


def customer(name: str, *batches: tuple[float, int, float], **values: Any) -> Customers:
    """A customer with batches of (at hours, requests, window hours)."""
    return Customers(
        name=name,
        models={"m": 1.0},
        prompt_tokens=Spread(median=100.0),
        max_tokens=100,
        output_share=Spread(median=1.0, most=1.0),
        batches=[ListedBatch(at_hours=at, requests=count, window_hours=window) for at, count, window in batches],
        **values,
    )


def workload(*customers: Customers, gpus: int = 1, **values: Any) -> Workload:
    """One model on some GPUs."""
    return Workload(name="test", gpus=gpus, models={"m": MODEL}, customers=list(customers), **values)


def run(made: Workload, policy: str = OURS) -> Report:
    """Simulate it."""
    return simulate(made, POLICIES[policy])


def leases(made: Workload, policy: str = OURS) -> list[tuple[float, str, int, int]]:
    """Simulate it, and return (time, batch, chunk, requests to run) of each lease."""
    seen: list[tuple[float, str, int, int]] = []

    def observe(now: float, lease: PaperLease) -> None:
        seen.append((now, lease.batch.batch_id, lease.chunk, lease.left))

    simulate(made, POLICIES[policy], observe=observe)
    return seen


# Answers by hand.


def test_two_chunks_on_one_gpu_take_the_loading_and_twice_a_chunk() -> None:
    report = run(workload(customer("acme", (0.0, 2000, 1.0))))
    (group,) = report.by_customer
    assert (group.wait_seconds.p50, group.turnaround_seconds.p50) == (10.0, 50.0)
    assert report.gpu.held_hours == pytest.approx(50 / 3600)
    assert report.gpu.used_share == pytest.approx(0.8)
    assert report.tokens == pytest.approx(2 * CHUNK_TOKENS)
    assert (report.met, report.expired, report.gpu.launches) == (1, 0, 1)


def test_two_gpus_take_half_as_long_and_the_last_chunk_is_what_is_left() -> None:
    made = workload(customer("acme", (0.0, 7500, 1.0)), gpus=2)
    assert leases(made) == [
        (10.0, "acme/00000", 0, 1000),
        (10.0, "acme/00000", 1, 1000),
        (30.0, "acme/00000", 2, 1000),
        (30.0, "acme/00000", 3, 1000),
        (50.0, "acme/00000", 4, 1000),
        (50.0, "acme/00000", 5, 1000),
        (70.0, "acme/00000", 6, 1000),
        (70.0, "acme/00000", 7, 500),
    ]


def test_at_the_deadline_what_is_done_is_kept_and_the_rest_expires() -> None:
    # 0.02 hours are 72 s: 62 s of work, of which three chunks are 60 s and 2 s are 100 requests.
    report = run(workload(customer("acme", (0.0, 8000, 0.02))))
    assert (report.met, report.served, report.expired) == (0, 3100, 4900)


def test_a_preempted_chunk_goes_on_where_it_was() -> None:
    # Live traffic takes the GPU at the full hour, amid the chunk that was begun at 3590 s, and gives it back later.
    live = Live(gpus_by_hour=[0, 1, 0])
    seen = leases(workload(customer("acme", (0.0, 180_000, 9.0)), live=live))
    ((before, _, chunk, _), (after, _, again, left)) = seen[179], seen[180]
    assert (before, chunk) == (3590.0, 179)
    assert (after, again, left) == (7210.0, 179, 500)


# Properties.


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Small ones in which much goes wrong."""
    customers = [
        Customers(
            name=name,
            models={"m": 1.0} if number else {"m": 0.5, "n": 0.5},
            weight=draw(st.sampled_from([1.0, 3.0])),
            batches_per_day=draw(st.sampled_from([5.0, 40.0])),
            requests=Spread(median=draw(st.sampled_from([500.0, 20_000.0])), sigma=1.0, most=100_000.0),
            windows=[Window(hours=draw(st.sampled_from([0.5, 2.0, 24.0])))],
            output_share=Spread(median=0.5, sigma=0.5, most=1.0),
        )
        for number, name in enumerate(["acme", "bolt", "core"])
    ]
    return Workload(
        name="drawn",
        gpus=draw(st.integers(2, 5)),
        seed=draw(st.integers(0, 1000)),
        hours=6.0,
        models={"m": MODEL, "n": msgspec.structs.replace(MODEL, gpus_per_worker=2)},
        customers=customers,
        live=Live(gpus_by_hour=draw(st.sampled_from([[0], [0, 1, 3], [2, 9, 0]]))),
        failures=Failures(
            workers_per_hour=draw(st.sampled_from([0.0, 2.0])),
            engines_per_hour=draw(st.sampled_from([0.0, 3.0])),
            preemptions_per_hour=draw(st.sampled_from([0.0, 2.0])),
            outages=draw(st.sampled_from([[], [Outage(at_hours=1.0, hours=1.0, gpus=9)]])),
        ),
    )


@settings(max_examples=12, deadline=None)
@given(made=workloads(), policy=st.sampled_from(sorted(POLICIES)))
def test_each_request_is_served_or_expired_once_whatever_goes_wrong(made: Workload, policy: str) -> None:
    left: dict[tuple[str, int], int] = {}

    def observe(_: float, lease: PaperLease) -> None:
        chunk = (lease.batch.batch_id, lease.chunk)
        assert 0 <= lease.left <= left.get(chunk, lease.requests)
        left[chunk] = lease.left

    report = simulate(made, POLICIES[policy], observe=observe)
    assert report.served + report.expired == report.requests
    for groups in (report.by_customer, report.by_size):
        assert sum(group.requests for group in groups) == report.requests
        assert sum(group.served for group in groups) == report.served
        assert all(0 <= group.served <= group.requests and group.met <= group.batches for group in groups)
    assert report.met == report.batches or report.expired > 0
    assert 0 <= report.gpu.used_share <= 1
    assert report.gpu.held_hours <= report.gpu.available_hours + report.live.overshoot_gpu_hours + 1e-9


@pytest.mark.parametrize("policy", [OURS, "round-robin"])
def test_the_same_seed_gives_the_same_report_and_another_one_does_not(policy: str) -> None:
    kind = Customers(name="acme", models={"m": 1.0}, batches_per_day=30.0, requests=Spread(median=3000.0, sigma=1.0))
    made = workload(kind, gpus=3, failures=Failures(workers_per_hour=1.0, preemptions_per_hour=1.0))
    assert run(made, policy) == run(made, policy)
    other = msgspec.structs.replace(made, seed=2)
    assert run(other, policy) != run(made, policy)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_worker_is_idle_while_work_waits(policy: str) -> None:
    made = workload(customer("acme", (0.0, 50_000, 9.0)), customer("bolt", (0.1, 50_000, 9.0)))
    report = run(made, policy)
    work = 100 * CHUNK_SECONDS
    assert report.gpu.held_hours * 3600 == pytest.approx(work + MODEL.loading_seconds)
    assert report.gpu.used_share * report.gpu.held_hours * 3600 == pytest.approx(work)


# Scenarios.


def test_a_thousand_requests_after_a_million_wait_for_a_chunk_and_not_for_the_million() -> None:
    made = workload(customer("huge", (0.0, 1_000_000, 24.0)), customer("small", (1.0, 1000, 1.0)), gpus=2)
    small = {name: run(made, name).by_size[0] for name in (OURS, "fcfs")}
    ours = small[OURS].wait_seconds.p50
    assert ours is not None
    assert ours <= CHUNK_SECONDS
    assert (small[OURS].met, small["fcfs"].met) == (1, 0)


def test_the_gap_between_customers_is_bounded_by_two_chunks_and_grows_without_bound_first_come_first_served() -> None:
    gaps = {}
    for size in (100_000, 400_000):
        made = workload(customer("acme", (0.0, size, 99.0)), customer("bolt", (0.01, size, 99.0)))
        for policy in (OURS, "fcfs"):
            gaps[policy, size] = run(made, policy).fairness.largest_gap_tokens / CHUNK_TOKENS
    assert max(gaps[OURS, 100_000], gaps[OURS, 400_000]) <= 2
    assert gaps["fcfs", 100_000] >= 90
    assert gaps["fcfs", 400_000] >= 390


def test_a_batch_that_cannot_be_in_time_costs_others_none_of_their_deadlines() -> None:
    made = workload(
        customer("rash", (0.0, 2_000_000, 1.0)),
        customer("calm", *((0.1 * number, 2000, 0.5) for number in range(10))),
        gpus=2,
    )
    met = {name: {group.name: group.met for group in run(made, name).by_customer} for name in (OURS, "fcfs")}
    assert met[OURS] == {"rash": 0, "calm": 10}
    assert met["fcfs"]["calm"] < 10


def test_a_customer_that_comes_back_has_saved_up_nothing() -> None:
    made = workload(
        customer("away", (0.0, 1000, 24.0), (2.0, 200_000, 48.0)), customer("there", (0.0, 800_000, 48.0)), gpus=1
    )
    assert run(made).fairness.largest_gap_tokens <= 2 * CHUNK_TOKENS
    assert run(made, "no-floor").fairness.largest_gap_tokens >= 100 * CHUNK_TOKENS


@pytest.mark.parametrize(("policy", "share"), [(OURS, 0.75), ("no-weights", 0.5)])
def test_weights_of_one_and_three_give_a_quarter_and_three_quarters(policy: str, share: float) -> None:
    made = workload(customer("light", (0.0, 100_000, 99.0)), customer("heavy", (0.0, 100_000, 99.0), weight=3.0))
    got = Counter(batch_id.partition("/")[0] for _, batch_id, _, _ in leases(made, policy)[:100])
    assert abs(got["heavy"] - 100 * share) <= 1


def test_a_batch_at_risk_gets_the_help_that_saves_its_deadline_and_the_others_keep_theirs() -> None:
    # Three customers share a GPU; a third of it is too little for 50 chunks in 35 minutes, with the help it is enough.
    made = workload(
        customer("acme", (0.0, 300_000, 48.0)),
        customer("bolt", (0.0, 300_000, 48.0)),
        customer("core", (0.0, 50_000, 35 / 60)),
    )
    scheduling = msgspec.structs.replace(made.scheduling, at_risk_minutes=25.0, at_risk_share=0.25)
    made = msgspec.structs.replace(made, scheduling=scheduling)
    late = {
        name: {group.name: group.requests - group.served for group in run(made, name).by_customer}
        for name in (OURS, "no-at-risk")
    }
    assert late[OURS]["core"] < late["no-at-risk"]["core"]
    assert late[OURS]["acme"] == late[OURS]["bolt"] == 0


def test_a_short_window_goes_before_a_long_one_of_the_same_customer_that_came_first() -> None:
    made = workload(customer("acme", (0.0, 100_000, 24.0), (0.1, 20_000, 0.3)))
    assert (run(made).met, run(made, "no-slack").met) == (2, 1)
    in_order = [batch_id for _, batch_id, _, _ in leases(made, "no-slack")]
    assert in_order == sorted(in_order)


def test_without_slack_customers_still_share_by_what_they_have_had() -> None:
    made = workload(customer("acme", (0.0, 100_000, 99.0)), customer("bolt", (0.01, 100_000, 99.0)))
    assert run(made, "no-slack").fairness.largest_gap_tokens <= 2 * CHUNK_TOKENS


def test_a_batch_is_not_given_up_where_its_customers_answers_are_known_to_be_short() -> None:
    """Answers take a tenth of max_tokens: by max_tokens the batch with the short window would take three times that."""
    batches = customer("acme", (0.0, 1000, 24.0), (0.1, 100_000, 24.0), (0.2, 20_000, 0.2))
    short = msgspec.structs.replace(batches, max_tokens=1000, output_share=Spread(median=0.1, least=0.01, most=1.0))
    made = workload(short)
    assert (run(made).met, run(made, "no-habits").met) == (3, 2)
    found = {name: run(made, name).estimates[0].p50 for name in (OURS, "no-habits")}
    assert found[OURS] < found["no-habits"]


def test_workers_of_its_own_save_the_deadline_of_a_batch_where_they_are_allowed() -> None:
    """For so little backlog two workers are enough, but not for one batch of it."""
    made = workload(
        customer("acme", (0.0, 100_000, 48.0)),
        customer("bolt", (0.0, 100_000, 48.0)),
        customer("core", (0.1, 100_000, 0.3)),
        gpus=8,
        scheduling=Scheduling(chunks_per_worker=128, dedicated_workers_at_most=4),
    )
    met = {name: {group.name: group.met for group in run(made, name).by_customer} for name in (OURS, "no-dedicated")}
    assert met["no-dedicated"] == {"acme": 1, "bolt": 1, "core": 0}
    assert met[OURS] == {"acme": 1, "bolt": 1, "core": 1}
    by_default = msgspec.structs.replace(made, scheduling=Scheduling(chunks_per_worker=128))
    assert run(by_default) == msgspec.structs.replace(run(made, "no-dedicated"), policy=OURS)


def test_a_model_with_little_work_gets_its_turn_beside_one_that_always_has_more() -> None:
    """The GPU of the worker that leaves goes to the model that waits, though the other has more to do."""
    whale = customer("whale", (0.0, 300_000, 24.0))
    small = msgspec.structs.replace(
        customer("small", *((hour / 4, 5, 24.0) for hour in range(8))), models={"n": 1.0}, name="small"
    )
    made = msgspec.structs.replace(workload(whale, small), models={"m": MODEL, "n": MODEL})
    report = run(made)
    waits = {group.name: group.wait_seconds.p95 for group in report.by_customer}
    turn = 10.0 * MODEL.loading_seconds
    assert (waits["small"] or 0.0) <= turn + MODEL.loading_seconds + CHUNK_SECONDS + 30
    assert report.met == report.batches == 9
    # It comes and goes for each of the small batches, and no more.
    assert report.gpu.launches <= 2 * 8 + 1


def test_a_model_whose_batch_would_be_late_gets_gpus_of_one_that_has_days() -> None:
    whale = customer("whale", (0.0, 1_000_000, 168.0))
    urgent = msgspec.structs.replace(customer("urgent", (0.5, 300_000, 1.0)), models={"n": 1.0})
    made = msgspec.structs.replace(workload(whale, urgent, gpus=4), models={"m": MODEL, "n": MODEL})
    expired = {name: run(made, name).expired for name in (OURS, "no-slack")}
    assert expired[OURS] < expired["no-slack"] / 4
    assert run(made).met >= 1, "the whale has its days"


def test_all_gpus_lost_for_an_hour_cost_that_hour_and_no_request() -> None:
    batches = customer("acme", (0.0, 400_000, 24.0))
    outage = Failures(outages=[Outage(at_hours=0.5, hours=1.0, gpus=4)])
    before, after = run(workload(batches, gpus=4)), run(workload(batches, gpus=4, failures=outage))
    assert (before.met, after.met, after.expired) == (1, 1, 0)
    lost = (after.simulated_hours - before.simulated_hours) * 3600
    # The hour, a look of the sensor, the loading, and what was in flight without a checkpoint.
    assert 3600 <= lost <= 3600 + 30 + MODEL.loading_seconds + 2 * CHUNK_SECONDS
    assert after.events.leases_expired == 4


def test_batches_run_in_the_trough_and_live_traffic_has_its_gpus_within_the_grace() -> None:
    made = workload(
        customer("acme", (0.0, 1_600_000, 24.0)), gpus=4, live=Live(gpus_by_hour=[4, 4, 0, 0, 4, 4, 1, 1, 4, 0, 0, 0])
    )
    report = run(made)
    assert (report.met, report.expired) == (1, 0)
    assert report.live.is_budget_kept
    assert 0 < report.live.longest_overshoot_seconds <= made.worker.grace_seconds
    held = dict(zip(report.series.hours, report.series.held, strict=True))
    assert all(count == 0 for hour, count in held.items() if hour < 2 or 4.1 < hour < 6)


def test_without_hysteresis_gpus_change_models_all_the_time() -> None:
    both = Customers(
        name="acme",
        models={"m": 0.5, "n": 0.5},
        batches_per_day=400.0,
        requests=Spread(median=5000.0),
        prompt_tokens=Spread(median=100.0),
        max_tokens=100,
        output_share=Spread(median=1.0, most=1.0),
    )
    made = Workload(name="two", gpus=1, hours=3.0, models={"m": MODEL, "n": MODEL}, customers=[both])
    ours, without = run(made), run(made, "no-hysteresis")
    assert ours.gpu.switches > 0
    assert without.gpu.switches > 2 * ours.gpu.switches
    assert without.gpu.used_share < ours.gpu.used_share


# Estimates.


def test_of_two_batches_that_nobody_disturbs_the_estimates_are_right() -> None:
    made = workload(customer("acme", (0.0, 100_000, 9.0)), customer("bolt", (0.0, 60_000, 9.0)), estimate_seconds=30.0)
    found = {errors.made: errors for errors in run(made).estimates}
    # The first is made before the first worker has measured how fast it is, so without one: at the next look.
    assert set(found) == {"first", "25 %", "50 %", "75 %"}
    assert all(errors.batches == 2 and errors.p95 < 0.04 for errors in found.values())
    assert run(made, "edf").estimates == []


def test_what_comes_later_is_not_foreseen() -> None:
    """Bolt takes half of what acme would have had: it takes twice the time that was left."""
    made = workload(customer("acme", (0.0, 100_000, 9.0)), customer("bolt", (0.25, 200_000, 9.0)))
    found = {errors.made: errors for errors in run(made).estimates}
    assert found["first"].p95 > 0.2
    assert found["75 %"].p95 < found["first"].p95


# Capacity.


def test_the_arithmetic_of_a_plan_is_work_over_the_time_that_there_is_for_it() -> None:
    # 360 chunks of 20 s are two hours of work, to be done within one; a GPU of live traffic is on top.
    made = workload(customer("acme", (0.0, 360_000, 1.0)), hours=1.0, live=Live(gpus_by_hour=[1]))
    found = calculate(made)
    assert found.gpu_hours == pytest.approx(2.0)
    assert (found.peak_from_hours, found.peak_to_hours) == (0.0, 1.0)
    assert found.peak_gpus == pytest.approx(3.0)
    assert found.gpus == 3


def test_simulations_confirm_the_plan_or_mend_it() -> None:
    # With three, one of them for live traffic, the loading is what is missing.
    made = workload(customer("acme", (0.0, 360_000, 1.0)), hours=1.0, live=Live(gpus_by_hour=[1]))
    found = plan(made, POLICIES[OURS], target=1.0)
    assert [(trial.gpus, trial.is_enough) for trial in found.trials] == [(3, False), (4, True)]
    assert found.gpus == 4


def test_a_plan_that_no_gpu_can_help_says_so() -> None:
    limited = msgspec.structs.replace(MODEL, pool_limit=1)
    made = msgspec.structs.replace(workload(customer("acme", (0.0, 360_000, 1.0))), models={"m": limited})
    found = plan(made, POLICIES[OURS], target=1.0)
    assert found.gpus is None
    assert found.trials[-1].is_enough is False


def test_a_chunk_is_cut_by_its_tokens_too() -> None:
    made = msgspec.structs.replace(workload(customer("acme", (0.0, 2000, 1.0))), intake=Intake(chunk_tokens=100_000))
    assert [requests for *_, requests in leases(made)] == [500, 500, 500, 500]
