"""How fast a worker is: tokens, prompt and answer, that its engine does each second."""

from __future__ import annotations

from collections import deque

HALF_LIFE_SECONDS = 120.0
"""Age at which what was measured counts half."""


_ANSWERS = 256
"""How many answers count as the newest ones."""


class Pace:
    """How far requests that are in flight have come, reckoned by the newest answers. Pure: the caller measures.

    Without this, many long answers in flight would count for nothing until the first of them ends: speeds would be ten
    times too low for minutes, and estimates and warnings with them.
    """

    def __init__(self) -> None:
        self._newest: deque[tuple[float, int]] = deque()
        """Seconds that an answer took, and its tokens; the sums of both."""
        self._seconds = 0.0
        self._tokens = 0

    def answered(self, seconds: float, output_tokens: int) -> None:
        """An answer has come so long after it was asked for."""
        self._newest.append((seconds, output_tokens))
        self._seconds += seconds
        self._tokens += output_tokens
        if len(self._newest) > _ANSWERS:
            seconds, output_tokens = self._newest.popleft()
            self._seconds -= seconds
            self._tokens -= output_tokens

    def done(self, seconds: float, max_tokens: int) -> float:
        """Return the tokens that are likely written of the answer to a request in flight for so long; 0 where no answer
        came yet.

        As many as others had by then, at most `max_tokens`. A prompt counts with its answer alone: engines compute
        prompts one after the other, and a hundred long ones that wait in the engine are not done.
        """
        return min(seconds * self._tokens / self._seconds, float(max_tokens)) if self._seconds > 0 else 0.0


class Speedometer:
    """Pure: the caller tells the time and reads the counters, every few seconds.

    Time in which the engine has nothing to do does not count: it says nothing of how fast the worker would be. What was
    measured fades when something newer is, and not before: else a worker without news would have no speed soon.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._age_seconds = 0.0
        """Since anything has finished; and what of that the worker was busy."""
        self._busy_seconds = 0.0
        self._before: tuple[float, float, bool] | None = None

    def look(self, now: float, tokens: float, is_busy: bool) -> float | None:
        """Return the tokens a second so far, None before anything has finished.

        `now` is monotonic seconds, `tokens` counts from the worker's start and may be an estimate: where it falls (what
        was in flight is lost), what is done again does not count. `is_busy` says whether anything is in flight.
        """
        if self._before is not None:
            then, had, was_busy = self._before
            self._age_seconds += now - then
            if was_busy or is_busy or tokens > had:
                self._busy_seconds += now - then
            if tokens > had:
                fading = 0.5 ** (self._age_seconds / HALF_LIFE_SECONDS)
                self._tokens = self._tokens * fading + (tokens - had)
                self._seconds = self._seconds * fading + self._busy_seconds
                self._age_seconds = self._busy_seconds = 0.0
        most = tokens if self._before is None else max(tokens, self._before[1])
        self._before = (now, most, is_busy)
        seconds = self._seconds + self._busy_seconds
        return self._tokens / seconds if self._tokens > 0 and seconds > 0 else None
