"""Pauses between tries: exponential with jitter, so that many who wait do not come back at one moment."""

from __future__ import annotations

import random

FIRST_SECONDS = 2.0
LONGEST_SECONDS = 60.0
"""A condition that lasts is asked about once a minute."""
MOST_ASKED_SECONDS = 600.0
"""A Retry-After longer than this is not honoured in full: the condition may well end before."""
_JITTER = 0.25


def pause_seconds(
    tries: int, source: random.Random, *, first_seconds: float = FIRST_SECONDS, asked_seconds: float | None = None
) -> float:
    """Return how long to pause after try number `tries` (1-based): twice as long after each, a quarter more or less.

    `asked_seconds` is what the other side asked for (Retry-After); the pause is never shorter.
    """
    seconds = min(LONGEST_SECONDS, first_seconds * 2.0 ** min(tries - 1, 30))
    seconds *= source.uniform(1.0 - _JITTER, 1.0 + _JITTER)
    return max(seconds, min(asked_seconds or 0.0, MOST_ASKED_SECONDS))
