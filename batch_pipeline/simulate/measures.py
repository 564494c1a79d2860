"""Measures that grow while a simulation runs: fairness, GPU hours, live traffic's share, the course of it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from batch_pipeline.simulate.paper import PaperQueue
from batch_pipeline.simulate.report import Fairness, Series
from batch_pipeline.simulate.workload import HOUR

_Figures = npt.NDArray[np.float64]
_MOST_POINTS = 400


class ServiceMeasure:
    """What the customers of one model got, in tokens over weight.

    Of two that both wait all the time, D(t) is what one has got more than the other. In any stretch of it one gets at
    most max D - min D more: that is the gap. Cost of a look: the square of the waiting customers.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._names = sorted(weights)
        self._index = {name: number for number, name in enumerate(self._names)}
        self._weights = [weights[name] for name in self._names]
        count = len(self._names)
        self._got = np.zeros(count)
        self._low, self._high = np.zeros((count, count)), np.zeros((count, count))
        self._is_fresh = np.ones(count, dtype=bool)
        """Those that did not wait all the time since the last look: their gaps begin anew."""
        self._hour: tuple[float, _Figures, npt.NDArray[np.bool_]] | None = None
        self.largest_gap = 0.0
        self.largest_chunk = 0.0
        self.between: tuple[str, str] | None = None
        self.jains: list[float] = []

    def count(self, customer: str, tokens: float) -> None:
        """A chunk of so many tokens was started; or ended without so many of them, where they are negative."""
        number = self._index[customer]
        virtual = tokens / self._weights[number]
        self._got[number] += virtual
        self.largest_chunk = max(self.largest_chunk, virtual)

    def look(self, queue: PaperQueue, now: float) -> None:
        """Compare those that wait."""
        for customer in queue.emptied:
            self._is_fresh[self._index[customer]] = True
        queue.emptied.clear()
        waiting = np.array(sorted(self._index[name] for name in queue.waiting_of), dtype=np.intp)
        is_waiting = np.zeros(len(self._names), dtype=bool)
        is_waiting[waiting] = True
        self._look_at_hour(is_waiting, now)
        if len(waiting) > 1:
            self._look_at_gaps(waiting)
        self._is_fresh = ~is_waiting

    def _look_at_gaps(self, waiting: npt.NDArray[np.intp]) -> None:
        pairs = np.ix_(waiting, waiting)
        got = self._got[waiting]
        difference = got[:, None] - got[None, :]
        fresh = self._is_fresh[waiting]
        begins = fresh[:, None] | fresh[None, :]
        low = np.where(begins, difference, np.minimum(self._low[pairs], difference))
        high = np.where(begins, difference, np.maximum(self._high[pairs], difference))
        self._low[pairs], self._high[pairs] = low, high
        gaps = high - low
        largest = float(gaps.max())
        if largest > self.largest_gap:
            self.largest_gap = largest
            one, other = np.unravel_index(int(gaps.argmax()), gaps.shape)
            is_more = difference[one, other] - low[one, other] >= high[one, other] - difference[one, other]
            more, less = (one, other) if is_more else (other, one)
            self.between = self._names[waiting[more]], self._names[waiting[less]]

    def _look_at_hour(self, is_waiting: npt.NDArray[np.bool_], now: float) -> None:
        """Once an hour: Jain's index over those that waited through all of it."""
        if self._hour is None:
            self._hour = now, self._got.copy(), is_waiting
            return
        since, before, through = self._hour
        through = through & is_waiting & ~self._is_fresh
        if now - since < HOUR:
            self._hour = since, before, through
            return
        got = (self._got - before)[through]
        if len(got) > 1 and got.sum() > 0:
            self.jains.append(float(got.sum() ** 2 / (len(got) * (got**2).sum())))
        self._hour = now, self._got.copy(), is_waiting


def fairness(measures: Mapping[str, ServiceMeasure]) -> Fairness:
    """Return the worst of all models, and Jain's index over all."""
    worst = max(measures, key=lambda model: measures[model].largest_gap)
    between = measures[worst].between
    jains = [jain for measure in measures.values() for jain in measure.jains]
    return Fairness(
        largest_gap_tokens=measures[worst].largest_gap,
        gap_between=[] if between is None else [worst, *between],
        largest_chunk_tokens=measures[worst].largest_chunk,
        jain_mean=sum(jains) / len(jains) if jains else None,
        jain_least=min(jains, default=None),
    )


class GpuMeasure:
    """Hours of GPUs, exact: told of every change."""

    def __init__(self) -> None:
        self.held_seconds = 0.0
        self.available_seconds = 0.0
        self.overshoot_seconds = 0.0
        self.longest_overshoot = 0.0
        self._at = 0.0
        self._over_since: float | None = None

    def move(self, now: float, held: int, available: int) -> None:
        """From the last change until now there were so many."""
        seconds = now - self._at
        self._at = now
        self.held_seconds += held * seconds
        self.available_seconds += available * seconds
        if held <= available or not seconds:
            self._over_since = self._over_since if held > available else None
            return
        self.overshoot_seconds += (held - available) * seconds
        if self._over_since is None:
            self._over_since = now - seconds
        self.longest_overshoot = max(self.longest_overshoot, now - self._over_since)


class Course:
    """Points of a course, thinned out by half whenever they become too many."""

    def __init__(self, models: list[str]) -> None:
        self._points: list[tuple[float, ...]] = []
        self._models = models
        self._every = 1
        self._seen = 0

    def add(self, now: float, available: int, held: int, live: int, waiting: Mapping[str, int]) -> None:
        """Add a point."""
        self._seen += 1
        if self._seen % self._every:
            return
        self._points.append((now / HOUR, available, held, live, *(waiting[model] for model in self._models)))
        if len(self._points) > _MOST_POINTS:
            del self._points[::2]
            self._every *= 2

    def series(self) -> Series:
        """Return what is kept."""
        columns = [list(column) for column in zip(*self._points, strict=True)] or [[]] * (4 + len(self._models))
        return Series(
            hours=[round(hour, 4) for hour in columns[0]],
            available=columns[1],
            held=columns[2],
            live=columns[3],
            waiting_chunks=dict(zip(self._models, columns[4:], strict=True)),
        )
