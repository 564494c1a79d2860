"""Calibration finds the fewest requests at once with which an engine does as much as it can."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_pipeline.engine.calibration import LEAST, MOST, Search, Window
from batch_pipeline.models import Model
from batch_pipeline.store import ObjectMissing
from batch_pipeline.worker import tuning
from batch_pipeline.worker.calibrations import LimitBy, subject_of
from batch_pipeline.worker.outages import Outages
from batch_pipeline.worker.runner import Clocks
from batch_pipeline.worker.tuning import Tuning


def throughput(best: int, falls: float = 0.0) -> Callable[[int], float]:
    """Rises until the engine is full, then stays, or falls by a power of how much too full it is."""
    return lambda level: min(level, best) * (best / max(level, best)) ** falls


def searched(measure: Callable[[int], float], most: int = MOST) -> tuple[Search, int]:
    """The search at its end, and how many measures it took."""
    search, count = Search(most=most), 0
    while (level := search.next()) is not None:
        search.measured(level, measure(level))
        count += 1
    return search, count


@pytest.mark.parametrize("falls", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("best", [1, 4, 7, 32, 100, 500])
def test_the_fewest_that_do_nearly_as_much_as_the_best_are_found(best: int, falls: float) -> None:
    search, count = searched(throughput(best, falls))
    found = search.found().in_flight
    assert max(LEAST, 0.7 * best) <= found <= max(LEAST, 1.3 * best)
    assert count <= 15


def test_an_engine_that_gains_to_the_end_gets_the_most() -> None:
    search, _ = searched(float, most=100)
    assert search.found().in_flight == 100


@given(st.integers(4, 900), st.floats(0, 1), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_noise_costs_little_throughput_and_the_search_ends(best: int, falls: float, chance: random.Random) -> None:
    truth = throughput(best, falls)
    search, count = searched(lambda level: truth(level) * chance.uniform(0.98, 1.02))
    assert truth(search.found().in_flight) >= 0.8 * truth(best)
    assert count <= 25


def test_a_window_measures_after_each_place_had_a_new_request() -> None:
    window = Window(10, least_seconds=2.0)
    # Not at its level yet.
    assert window.look(0.0, 0, 0, 3) is None
    # The ramp: ten answers that do not count.
    assert window.look(1.0, 5, 500, 10) is None
    assert window.look(2.0, 15, 1500, 10) is None
    # Counting from here: too soon, too few answers, enough of both.
    assert window.look(3.0, 30, 3000, 10) is None
    assert window.look(4.5, 40, 4000, 10) == 1000
    assert Window(10, 2.0).look(0.0, 0, 0, 10) is None


def test_a_window_begins_anew_where_the_level_is_not_held() -> None:
    window = Window(10, least_seconds=1.0)
    for now, answers in ((0.0, 0), (1.0, 10), (1.5, 15)):
        assert window.look(now, answers, answers, 10) is None
    assert window.look(2.0, 30, 30, 2) is None
    assert window.look(3.0, 40, 40, 10) is None
    assert window.look(4.0, 50, 50, 10) is None
    assert window.look(5.0, 70, 70, 10) == 20


def test_without_tokens_answers_count() -> None:
    window = Window(2, least_seconds=1.0)
    for now, answers in ((0.0, 0), (1.0, 2)):
        assert window.look(now, answers, 0, 2) is None
    assert window.look(3.0, 10, 0, 2) == 4


class PaperRunner:
    """A runner and its engine on paper time: each look at the clock is a quarter of a second."""

    engine_version = "1"

    def __init__(self, best: int) -> None:
        self.most_in_flight = 64
        self.now = 0.0
        self._done = 0.0
        self._best = best

    @property
    def in_flight(self) -> int:
        return self.most_in_flight

    @property
    def answers(self) -> int:
        return int(self._done)

    @property
    def tokens(self) -> int:
        return 100 * self.answers

    def make_full_with(self, in_flight: int) -> None:
        self.most_in_flight = in_flight

    def clock(self) -> float:
        self.now += 0.25
        self._done += 0.25 * throughput(self._best, 1.0)(self.most_in_flight)
        return self.now


class PaperStore:
    """Objects in memory."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def get(self, key: str) -> bytes:
        if key not in self.objects:
            raise ObjectMissing(key)
        return self.objects[key]

    def put(self, key: str, data: bytes, **_options: str) -> None:
        self.objects[key] = data


def tuned(best: int, store: PaperStore, **model: object) -> tuple[PaperRunner, Tuning]:
    """A runner, and what finds its number in flight."""
    runner, chance = PaperRunner(best), random.Random(1)
    catalogued = Model(source="none", context_length=10, **model)  # type: ignore[arg-type]
    parts = Clocks(runner.clock, lambda: 1000.0, chance)
    found = Tuning("m", catalogued, "a machine", runner=runner, store=store, outages=Outages(chance), clocks=parts)  # type: ignore[arg-type]
    return runner, found


def test_a_worker_calibrates_with_its_own_work_and_the_next_one_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_LOOK_SECONDS", 0.0)
    store = PaperStore()
    runner, first = tuned(100, store, calibrate=True)

    async def live() -> None:
        await first.recall()
        assert first.is_wanted
        await first.find()

    asyncio.run(live())
    assert 70 <= runner.most_in_flight <= 130
    assert (first.limit_by, first.is_wanted) == (LimitBy.CALIBRATED, False)
    # Also one that would not calibrate itself.
    second_runner, second = tuned(100, store)
    asyncio.run(second.recall())
    assert (second_runner.most_in_flight, second.limit_by) == (runner.most_in_flight, LimitBy.CALIBRATED)


def test_a_number_that_is_configured_counts_more_than_one_that_was_found() -> None:
    store = PaperStore()
    store.objects[subject_of("m", Model(source="none", context_length=10), "1", "a machine").key] = b"{}"
    runner, found = tuned(100, store, max_in_flight=12)
    runner.most_in_flight = 12
    asyncio.run(found.recall())
    assert (runner.most_in_flight, found.limit_by) == (12, LimitBy.CONFIGURED)
    # What another version has written does not count either.
    runner, found = tuned(100, store)
    asyncio.run(found.recall())
    assert (runner.most_in_flight, found.limit_by) == (64, LimitBy.DEFAULT)


def test_another_machine_engine_or_argument_is_another_subject() -> None:
    model = Model(source="none", context_length=10)
    here = subject_of("m", model, "1", "a machine")
    others = [
        subject_of("m", model, "1", "another"),
        subject_of("m", model, "2", "a machine"),
        subject_of("m", Model(source="none", context_length=10, version="2"), "1", "a machine"),
        subject_of("m", Model(source="none", context_length=10, engine_arguments=["-x"]), "1", "a machine"),
        subject_of("m", Model(source="none", context_length=10, engine_environment={"A": "b"}), "1", "a machine"),
    ]
    assert len({here.key, *(other.key for other in others)}) == 6
