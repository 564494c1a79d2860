"""How fast a worker is: tokens, prompt and answer, of the requests that it finishes each second."""

from __future__ import annotations

HALF_LIFE_SECONDS = 120.0
"""Age at which what was measured counts half."""


class Speedometer:
    """Pure: the caller tells the time and reads the counters, every few seconds.

    Time in which the engine has nothing to do does not count: it says nothing of how fast the worker would be. What was
    measured fades when something newer is, and not before: where requests take longer than the half-life, the speed
    would else be nearly nothing until they finish, and many times too much when they do.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._age_seconds = 0.0
        """Since anything has finished; and what of that the worker was busy."""
        self._busy_seconds = 0.0
        self._before: tuple[float, int, bool] | None = None

    def look(self, now: float, tokens: int, is_busy: bool) -> float | None:
        """Return the tokens a second so far, None before anything has finished.

        `now` is monotonic seconds, `tokens` counts from the worker's start, `is_busy` says whether anything is in
        flight.
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
        self._before = (now, tokens, is_busy)
        seconds = self._seconds + self._busy_seconds
        return self._tokens / seconds if self._tokens > 0 and seconds > 0 else None
