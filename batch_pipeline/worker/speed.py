"""How fast a worker is: tokens, prompt and answer, of the requests that it finishes each second."""

from __future__ import annotations

HALF_LIFE_SECONDS = 120.0
"""Age at which what was measured counts half."""


class Speedometer:
    """Pure: the caller tells the time and reads the counters, every few seconds.

    Time in which the engine has nothing to do does not count: it says nothing of how fast the worker would be.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._before: tuple[float, int, bool] | None = None

    def look(self, now: float, tokens: int, is_busy: bool) -> float | None:
        """Return the tokens a second so far, None before anything has finished.

        `now` is monotonic seconds, `tokens` counts from the worker's start, `is_busy` says whether anything is in
        flight.
        """
        if self._before is not None:
            then, had, was_busy = self._before
            fading = 0.5 ** ((now - then) / HALF_LIFE_SECONDS)
            self._tokens = self._tokens * fading + (tokens - had)
            self._seconds *= fading
            if was_busy or is_busy or tokens > had:
                self._seconds += now - then
        self._before = (now, tokens, is_busy)
        return self._tokens / self._seconds if self._tokens > 0 and self._seconds > 0 else None
