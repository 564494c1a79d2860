"""How often a key may ask: a bucket of tokens for each, in this process's memory.

A bucket holds a minute's worth of requests and fills evenly, so a burst of that many passes and the rate holds over
any longer time. Several processes that serve the API count each for itself. Nothing is kept over a restart.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_MOST_BUCKETS = 10_000
"""From so many on the full ones are forgotten, which changes nothing for their keys."""


@dataclass
class _Bucket:
    tokens: float
    filled_at: float
    per_minute: int

    def fill(self, now: float) -> None:
        more = (now - self.filled_at) * self.per_minute / 60.0
        self.tokens = min(float(self.per_minute), self.tokens + more)
        self.filled_at = now


class Rates:
    """Safe to use from several threads. `clock` gives seconds and never goes backwards."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        self._lock = threading.Lock()

    def take(self, key: str, per_minute: int) -> int:
        """Count a request of a key; return 0 where it may pass, else the whole seconds after which one may."""
        now = self._clock()
        with self._lock:
            bucket = self._buckets.get(key)
            if bucket is None or bucket.per_minute != per_minute:
                if len(self._buckets) >= _MOST_BUCKETS:
                    self._forget_full(now)
                bucket = self._buckets[key] = _Bucket(float(per_minute), now, per_minute)
            bucket.fill(now)
            if bucket.tokens >= 1.0:
                bucket.tokens -= 1.0
                return 0
            return max(1, math.ceil((1.0 - bucket.tokens) * 60.0 / per_minute))

    def _forget_full(self, now: float) -> None:
        for bucket in self._buckets.values():
            bucket.fill(now)
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if bucket.tokens < bucket.per_minute}
