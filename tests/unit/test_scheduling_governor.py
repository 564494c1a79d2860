"""Batch work on a shared engine: what live traffic leaves, more by steps, less by parts, nothing at once."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_pipeline.scheduling.governor import NEAR, Load, Mode, Rules, Share, Snapshot, first_share, govern

RULES = Rules(budget_seconds=1.0, kv_cache_mark=0.8, least=1, most=64)
IDLE = Load(running=0, waiting=0, kv_cache_usage=0.0, preemptions=0)


def seen(
    measures: int,
    ttft: float | None = 0.1,
    *,
    own: int = 0,
    load: Load | None = IDLE,
    trouble: str = "",
) -> Snapshot:
    return Snapshot(load=load, own_in_flight=own, live_ttft_seconds=ttft, measures=measures, trouble=trouble)


def grown(rules: Rules = RULES, looks: int = 100, load: Load = IDLE) -> Share:
    """Return the share after so many good looks with as much work as it takes."""
    share = first_share(rules)
    for measures in range(1, looks + 1):
        share = govern(share, seen(measures, own=share.in_flight, load=load), rules)
    return share


loads = st.builds(
    Load,
    running=st.integers(0, 300),
    waiting=st.integers(0, 300),
    kv_cache_usage=st.floats(0, 1),
    preemptions=st.integers(0, 10),
)
latencies = st.none() | st.floats(0, 10) | st.just(math.inf)
looks = st.lists(st.tuples(st.none() | loads, latencies, st.integers(0, 64), st.integers(0, 2)), max_size=60)
rule_sets = st.integers(1, 8).flatmap(
    lambda least: st.builds(
        Rules,
        budget_seconds=st.floats(0.01, 5),
        kv_cache_mark=st.floats(0.1, 1),
        least=st.just(least),
        most=st.integers(least, 256),
    )
)


@given(rule_sets, looks)
def test_whatever_is_seen_the_share_stays_in_its_bounds_and_live_traffic_stops_it_at_once(
    rules: Rules, series: list[tuple[Load | None, float | None, int, int]]
) -> None:
    share = first_share(rules)
    measures = 0
    for load, ttft, own, new in series:
        measures += new
        before, share = share, govern(share, seen(measures, ttft, own=own, load=load), rules)
        assert share.in_flight == 0 or rules.least <= share.in_flight <= rules.most
        assert share.reason
        late = ttft is not None and ttft > rules.budget_seconds
        live = load is not None and min(load.waiting, max(0, load.running + load.waiting - own))
        full = load is not None and load.kv_cache_usage >= rules.kv_cache_mark and bool(live)
        if late or full:
            assert share.in_flight == 0
            assert share.mode is Mode.STOPPED
        elif load is None or ttft is None:
            assert share.in_flight == rules.least
            assert share.mode is Mode.BLIND
        elif before.mode is not Mode.STOPPED and ttft > NEAR * rules.budget_seconds:
            assert share.in_flight <= before.in_flight
        assert share.keep is None or (share.mode is Mode.STOPPED and rules.least <= share.keep < own)


@given(rule_sets, looks)
def test_it_grows_to_the_most_again_after_whatever_has_been_once_all_is_well(
    rules: Rules, series: list[tuple[Load | None, float | None, int, int]]
) -> None:
    share = first_share(rules)
    measures = 0
    for load, ttft, own, new in series:
        measures += new
        share = govern(share, seen(measures, ttft, own=own, load=load), rules)
    for _ in range(70):
        measures += 1
        share = govern(share, seen(measures, 0.0, own=share.in_flight), rules)
    assert (share.in_flight, share.mode) == (rules.most, Mode.OPEN)


def test_nothing_known_means_one_at_a_time_and_says_why() -> None:
    share = govern(first_share(RULES), seen(0, None, load=None, trouble="the metrics cannot be read"), RULES)
    assert (share.in_flight, share.mode) == (1, Mode.BLIND)
    assert share.reason == "the metrics cannot be read: one request at a time"
    share = govern(grown(), seen(101, 0.1, own=64, load=None, trouble="the metrics cannot be read"), RULES)
    assert (share.in_flight, share.mode) == (1, Mode.BLIND)
    assert govern(first_share(RULES), seen(1, None), RULES).in_flight == 1


def test_it_does_not_grow_on_an_old_measure_nor_without_work_nor_while_requests_wait_nor_near_the_mark() -> None:
    start = govern(first_share(RULES), seen(1, own=1), RULES)
    assert start.in_flight == 3  # one, and two steps of 64 in 32
    assert govern(start, seen(1, own=3), RULES).in_flight == 3
    assert govern(start, seen(2, own=1), RULES).in_flight == 3
    assert (
        govern(
            start, seen(2, own=3, load=Load(running=9, waiting=1, kv_cache_usage=0.1, preemptions=0)), RULES
        ).in_flight
        == 3
    )
    assert (
        govern(
            start, seen(2, own=3, load=Load(running=9, waiting=0, kv_cache_usage=0.73, preemptions=0)), RULES
        ).in_flight
        == 3
    )
    assert govern(start, seen(2, own=3), RULES).in_flight == 6


@pytest.mark.parametrize(
    ("ttft", "load", "word"),
    [
        (0.9, IDLE, "near the 1 s"),
        (0.1, Load(running=70, waiting=0, kv_cache_usage=0.85, preemptions=0), "85% of its KV cache"),
        (0.1, Load(running=70, waiting=0, kv_cache_usage=0.5, preemptions=1), "out of its KV cache"),
    ],
)
def test_near_a_limit_it_takes_a_part_away_once_for_each_new_measure_and_drained_share(
    ttft: float, load: Load, word: str
) -> None:
    less = govern(grown(), seen(101, ttft, own=64, load=load), RULES)
    assert (less.in_flight, less.mode) == (44, Mode.CAREFUL)
    assert word in less.reason
    assert govern(less, seen(101, 0.9, own=44, load=load), RULES).in_flight == 44
    assert govern(less, seen(102, 0.9, own=60, load=load), RULES).in_flight == 44
    assert govern(less, seen(102, 0.9, own=44, load=load), RULES).in_flight == 30


def test_live_traffic_that_waits_while_the_cache_is_full_stops_everything_and_our_own_waiting_does_not() -> None:
    full = Load(running=60, waiting=4, kv_cache_usage=0.95, preemptions=0)
    stopped = govern(grown(), seen(101, own=60, load=full), RULES)
    assert (stopped.in_flight, stopped.mode, stopped.keep) == (0, Mode.STOPPED, None)
    assert stopped.reason == "live traffic first: live requests wait while 95% of its KV cache is in use"
    assert govern(grown(), seen(101, own=64, load=full), RULES).mode is Mode.CAREFUL


def test_a_stop_leaves_what_is_in_flight_at_first_then_takes_half_back_with_each_measure() -> None:
    stopped = govern(grown(), seen(101, 1.5, own=64), RULES)
    assert (stopped.in_flight, stopped.keep) == (0, None)
    assert "1.50 s for their first token, above the 1 s" in stopped.reason
    again = govern(stopped, seen(101, 1.5, own=60), RULES)
    assert again.keep is None
    assert govern(again, seen(102, 1.5, own=60), RULES).keep == 30
    assert govern(again, seen(102, 1.5, own=1), RULES).keep is None


@pytest.mark.parametrize("ttft", [2.1, math.inf])
def test_a_budget_that_is_missed_badly_takes_all_back_but_the_least(ttft: float) -> None:
    assert govern(grown(), seen(101, ttft, own=64), RULES).keep == 1


def test_live_traffic_that_is_slow_by_itself_is_said_to_be() -> None:
    assert "without any batch request in flight here" in govern(grown(), seen(101, 1.5, own=0), RULES).reason


def test_after_a_stop_it_begins_with_the_least_doubles_to_half_of_what_was_too_much_and_then_goes_in_steps() -> None:
    share = govern(grown(), seen(101, 1.5, own=64), RULES)
    assert govern(share, seen(102, 0.9), RULES).in_flight == 0
    assert govern(share, seen(101, 0.1), RULES).in_flight == 0
    course = []
    for measures in range(102, 112):
        share = govern(share, seen(measures, 0.1, own=share.in_flight), RULES)
        course.append(share.in_flight)
    assert course == [1, 3, 6, 12, 24, 32, 34, 36, 38, 40]
    assert share.mode is Mode.CAREFUL


def test_what_was_too_much_right_after_an_increase_is_not_tried_again_for_a_while() -> None:
    share = grown(looks=4)
    too_much = share.in_flight
    share = govern(share, seen(5, 1.5, own=too_much), RULES)
    course = []
    for measures in range(6, 60):
        share = govern(share, seen(measures, 0.1, own=share.in_flight), RULES)
        course.append(share.in_flight)
    assert sum(too_much / 2 <= number < too_much for number in course) >= 12
    assert course[-1] == RULES.most


def latency_of_steps(own: float, live: float) -> float:
    """Each request makes the engine's step longer: a smooth engine, good up to 20 requests."""
    return 0.05 * (own + live)


def latency_of_slots(own: float, live: float) -> float:
    """Up to 24 requests run at once, and whoever comes after them waits long: an engine with a cliff."""
    return 0.1 if own + live < 24 else 5.0


@pytest.mark.parametrize(
    ("latency", "best", "missed"), [(latency_of_steps, 14, 0.02), (latency_of_slots, 18, 0.06)], ids=["smooth", "cliff"]
)
@pytest.mark.parametrize("live", [0, 5])
def test_on_a_steady_engine_it_settles_near_what_is_good_and_seldom_goes_beyond(
    latency: Callable[[float, float], float], best: int, missed: float, live: int
) -> None:
    share = first_share(RULES)
    own = 0.0
    shares = []
    late = 0
    for second in range(1000):
        # A fluid: a quarter of what is above the share ends each second.
        own = float(share.in_flight) if own < share.in_flight else max(float(share.in_flight), 0.75 * own)
        if share.keep is not None:
            own = min(own, float(share.keep))
        ttft = latency(own, live)
        load = Load(running=math.ceil(own) + live, waiting=0, kv_cache_usage=0.0, preemptions=0)
        share = govern(share, seen(second // 2 + 1, ttft, own=math.ceil(own), load=load), RULES)
        if second >= 100:
            shares.append(own)
            late += ttft > RULES.budget_seconds
    assert late / len(shares) <= missed
    assert (best - live) / 2 <= sum(shares) / len(shares) <= best - live + 6
    assert max(shares) <= 26 - live
