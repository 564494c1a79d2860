"""How many requests an engine is to have at once: the fewest with which it does as much as it can.

    climbing ──two doublings without gain──> confirming ──best measured twice──> narrowing ──> found
       └──the most were tried───────────────────┘ └──────────another is better───────┘

Throughput rises with the requests in flight until the engine's batch is full, and may fall beyond that (a KV cache that
is too small makes it preempt). More than are needed gain nothing, and are lost when the engine dies.
"""

from __future__ import annotations

import math

import msgspec

LEAST, MOST = 4, 1024
"""Requests in flight that are tried."""
TOLERANCE = 0.05
"""Share of the throughput that counts as noise: a level that is better by less is not better."""
_WITHOUT_GAIN = 2
_PEAKED, _CLOSE = 1.5, 1.25
"""Levels whose quotient is below this are not told apart: above the best, and below what is enough."""
_SETTLED = 0.1


class Step(msgspec.Struct, frozen=True):
    """What was measured with so many requests in flight; the mean where that was done more than once."""

    in_flight: int
    per_second: float
    """Tokens, prompt and answer; requests where the engine tells no tokens."""


class Search:
    """Pure: tells what to measure `next`, hears what was `measured`, and in the end what was `found`."""

    def __init__(self, least: int = LEAST, most: int = MOST, tolerance: float = TOLERANCE) -> None:
        self._least = least
        self._most = most
        self._tolerance = tolerance
        self._measures: dict[int, list[float]] = {}

    def next(self) -> int | None:
        """Return the number in flight to measure now; None once it is known. At most about 20 are asked for."""
        if not self._measures:
            return self._least
        highest = max(self._measures)
        if highest < self._most and self._still_gains():
            return min(2 * highest, self._most)
        best = max(self.steps(), key=lambda step: step.per_second).in_flight
        if len(self._measures[best]) == 1:
            # The largest of several measures is likely to be a lucky one.
            return best
        # The peak may lie between two doublings, on either side of the best.
        above = min((level for level in self._measures if level > best), default=best)
        below = max((level for level in self._measures if level < best), default=best)
        for low, high in ((best, above), (below, best)):
            if high > _PEAKED * low and high - low > 1:
                return _between(low, high)
        knee = self.found().in_flight
        below = max((level for level in self._measures if level < knee), default=knee)
        if knee > _CLOSE * below and knee - below > 1:
            return _between(below, knee)
        return None

    def measured(self, in_flight: int, per_second: float) -> None:
        """Take the throughput that was measured with so many in flight."""
        self._measures.setdefault(in_flight, []).append(per_second)

    def steps(self) -> list[Step]:
        """Return what was measured so far, by the number in flight."""
        return [Step(level, math.fsum(rates) / len(rates)) for level, rates in sorted(self._measures.items())]

    def found(self) -> Step:
        """Return the fewest in flight that do as much as the best, but for noise. ValueError before any measure."""
        enough = (1 - self._tolerance) * max(step.per_second for step in self.steps())
        return next(step for step in self.steps() if step.per_second >= enough)

    def _still_gains(self) -> bool:
        """Whether one of the last levels was better than all below it."""
        rates = [step.per_second for step in self.steps()]
        newest = range(max(1, len(rates) - _WITHOUT_GAIN), len(rates))
        gains = [rates[place] > (1 + self._tolerance) * max(rates[:place]) for place in newest]
        return len(gains) < _WITHOUT_GAIN or any(gains)


def _between(low: int, high: int) -> int:
    return min(max(round(math.sqrt(low * high)), low + 1), high - 1)


class Window:
    """Measures the throughput of one level. Pure: the caller tells time and counters, several times a second.

    It begins once each place has had a new request at that level, and lasts until each has had another one. Where the
    level is not held meanwhile (too little work, an engine that was started again) it begins anew.
    """

    def __init__(self, level: int, least_seconds: float) -> None:
        self._level = level
        self._least_seconds = least_seconds
        self._ramp_from: int | None = None
        self._began: tuple[float, int, int] | None = None

    def look(self, now: float, answers: int, tokens: int, in_flight: int) -> float | None:
        """Return the tokens a second (answers, where there are no tokens) once the window is over, None before.

        `now` is monotonic seconds; `answers` and `tokens` count from whenever and only grow.
        """
        if abs(in_flight - self._level) > _SETTLED * self._level:
            self._ramp_from = self._began = None
            return None
        if self._ramp_from is None:
            self._ramp_from = answers
        if self._began is None:
            if answers - self._ramp_from >= self._level:
                self._began = (now, answers, tokens)
            return None
        then, answers_before, tokens_before = self._began
        if now - then < self._least_seconds or answers - answers_before < self._level:
            return None
        return ((tokens - tokens_before) or (answers - answers_before)) / (now - then)
