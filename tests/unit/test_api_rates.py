"""A key may use a minute's worth at once, and never more than its rate over a longer time."""

from __future__ import annotations

from batch_pipeline.api.rates import Rates


def test_a_burst_of_a_minute_passes_and_then_the_rate_holds() -> None:
    now = [0.0]
    rates = Rates(lambda: now[0])
    assert [rates.take("key", 60) for _ in range(60)] == [0] * 60
    assert rates.take("key", 60) == 1
    assert rates.take("other", 60) == 0
    now[0] += 1.0
    assert [rates.take("key", 60), rates.take("key", 60)] == [0, 1]


def test_the_wait_is_as_long_as_it_has_to_be() -> None:
    now = [0.0]
    rates = Rates(lambda: now[0])
    assert rates.take("key", 1) == 0
    assert rates.take("key", 1) == 60
    now[0] += 59.5
    assert rates.take("key", 1) == 1
    now[0] += 1.0
    assert rates.take("key", 1) == 0


def test_a_changed_limit_counts_at_once() -> None:
    rates = Rates(lambda: 0.0)
    assert [rates.take("key", 1), rates.take("key", 1)] == [0, 60]
    assert [rates.take("key", 2) for _ in range(3)] == [0, 0, 30]
