"""What is left to do, by what was really used before; and how fast a worker is."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_pipeline.scheduling.estimates import HISTORY_TOKENS, PRIOR_TOKENS, Used, refilled, remembered, usage_ratio
from batch_pipeline.scheduling.supply import speeds_of
from batch_pipeline.worker.speed import HALF_LIFE_SECONDS, Pace, Speedometer

amounts = st.floats(0, 1e10)
used = st.builds(lambda estimated, share: Used(estimated=estimated, real=estimated * share), amounts, st.floats(0, 2))


def test_where_nothing_is_known_the_estimate_stands() -> None:
    assert usage_ratio(Used(), Used()) == 1.0


def test_a_customers_habit_counts_until_the_batch_has_shown_its_own() -> None:
    habit = Used(estimated=1e7, real=2e6)
    assert usage_ratio(Used(), habit) == pytest.approx(0.2)
    assert usage_ratio(Used(estimated=PRIOR_TOKENS, real=PRIOR_TOKENS * 0.6), habit) == pytest.approx(0.4)
    assert usage_ratio(Used(estimated=1e9, real=6e8), habit) == pytest.approx(0.6, rel=1e-3)


@given(batch=used, history=used)
def test_the_ratio_is_between_what_was_seen(batch: Used, history: Used) -> None:
    seen = [ratio for ratio in (batch.ratio, history.ratio) if ratio is not None] or [1.0]
    assert min(seen) - 1e-9 <= usage_ratio(batch, history) <= max(seen) + 1e-9


@given(history=used, batch=used)
def test_history_fades_and_never_outgrows_its_bound(history: Used, batch: Used) -> None:
    known = remembered(history, batch)
    assert known.estimated <= max(history.estimated, HISTORY_TOKENS) * (1 + 1e-9) + batch.estimated
    assert known.estimated >= batch.estimated
    if history.estimated > HISTORY_TOKENS:
        assert known.estimated == pytest.approx(HISTORY_TOKENS + batch.estimated)


def test_the_credit_grows_by_its_share_of_the_speed_up_to_its_bound() -> None:
    grown = refilled(-500.0, 10.0, tokens_per_second=1000.0, share=0.25, most=8000.0)
    assert grown == 2000.0
    assert refilled(grown, 1e6, tokens_per_second=1000.0, share=0.25, most=8000.0) == 8000.0
    assert refilled(-500.0, 10.0, tokens_per_second=0.0, share=0.25, most=8000.0) == -500.0


def test_a_speed_is_of_busy_time_alone() -> None:
    meter = Speedometer()
    assert meter.look(0.0, 0, True) is None
    assert meter.look(10.0, 1000, True) == pytest.approx(100.0)
    # Idle for long: as fast as before.
    assert meter.look(20.0, 2000, False) == pytest.approx(100.0)
    assert meter.look(2000.0, 2000, False) == pytest.approx(100.0)
    # Slower now: that counts more and more.
    assert meter.look(2010.0, 2500, True) == pytest.approx(50.0, rel=0.01)


def test_what_was_measured_long_ago_counts_less() -> None:
    meter, half_life = Speedometer(), int(HALF_LIFE_SECONDS)
    meter.look(0.0, 0, True)
    meter.look(HALF_LIFE_SECONDS, 100 * half_life, True)
    now = meter.look(2 * HALF_LIFE_SECONDS, 100 * half_life + 10 * half_life, True)
    assert now == pytest.approx((100 / 2 + 10) / 1.5, rel=0.01)


@pytest.mark.parametrize("apart_seconds", [0.0, 37.5])
def test_requests_that_take_longer_than_the_half_life_make_no_other_speed(apart_seconds: float) -> None:
    """Answers of twenty minutes, 32 at a time: all at once, or one after the other."""
    takes, meter = 1200.0, Speedometer()
    ends = [takes + number * apart_seconds for number in range(32)]
    speeds = []
    for moment in range(0, 7200, 5):
        rounds = [int((moment - end) // takes) + 1 for end in ends if moment >= end]
        speed = meter.look(float(moment), 1000 * sum(rounds), True)
        speeds += [speed / (32 * 1000 / takes)] if speed is not None and moment > 2 * takes else []
    assert 0.45 < min(speeds) <= max(speeds) < 1.2


def test_long_answers_in_flight_count_before_they_end() -> None:
    """63 answers of 20,000 tokens and short ones beside, each at 50 tokens a second."""
    pace, meter = Pace(), Speedometer()
    meter.look(0.0, 0, True)
    short, speeds = 100, []
    for moment in range(1, 390):
        finished = moment // 2
        if moment % 2 == 0:
            pace.answered(2.0, short)
        underway = [pace.done(float(moment), 20_000)] * 63 + [pace.done(float(moment % 2), short)]
        speed = meter.look(float(moment), finished * short + sum(underway), True)
        speeds += [] if speed is None else [speed / (64 * 50)]
    assert len(speeds) > 380
    assert 0.9 < min(speeds) <= max(speeds) < 1.1


def test_what_is_in_flight_is_not_reckoned_beyond_what_it_may_be() -> None:
    pace = Pace()
    assert pace.done(100.0, 100) == 0.0  # nobody has answered yet
    pace.answered(10.0, 100)
    assert pace.done(5.0, 100) == pytest.approx(50)
    assert pace.done(1e6, 100) == pytest.approx(100)
    for _ in range(256):
        pace.answered(1.0, 100)
    assert pace.done(0.5, 100) == pytest.approx(50)  # the first one counts no more


@pytest.mark.parametrize("chats_before", [0, 2000])
def test_long_prompts_that_wait_in_the_engine_are_not_done(chats_before: int) -> None:
    """An engine that does 10,000 tokens a second, one prompt of 8,000 and its answer of 50 after the other, 256 at
    once; perhaps short chats before.
    """
    pace, meter = Pace(), Speedometer()
    meter.look(0.0, 0, True)
    now, tokens, speeds, next_look = 0.0, 0, [], 5.0
    fed = deque((0.0, 100 if number < chats_before else 8000) for number in range(256))
    for number in range(256, chats_before + 600):
        since, prompt = fed.popleft()
        now += (prompt + 50) / 10_000
        tokens += prompt + 50
        pace.answered(now - since, 50)
        fed.append((now, 100 if number < chats_before else 8000))
        if now >= next_look:
            next_look += 5.0
            speed = meter.look(now, tokens + sum(pace.done(now - at, 50) for at, _ in fed), True)
            speeds += [speed] if speed is not None else []
    assert len(speeds) > 50
    assert max(speeds) < 1.5 * 10_000
    assert 0.7 * 10_000 < speeds[-1] < 1.1 * 10_000


def test_work_that_is_lost_and_done_again_is_no_speed() -> None:
    meter = Speedometer()
    meter.look(0.0, 0, True)
    assert meter.look(10.0, 1000, True) == pytest.approx(100.0)
    assert meter.look(20.0, 400, True) == pytest.approx(50.0)
    assert meter.look(30.0, 1000, True) == pytest.approx(1000 / 30)


def test_ready_workers_that_have_not_measured_count_like_the_others() -> None:
    assert speeds_of([100.0, None, 0.0, 300.0]).together(7.0) == 800.0
    assert speeds_of([None, None]).together(7.0) == 14.0
    assert speeds_of([None]).together(None) == 0.0
    assert speeds_of([]).together(7.0) == 0.0
