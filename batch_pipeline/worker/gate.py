"""When the engine as a whole refuses (429, 503, ...): one gate for all requests, so that no storm of tries goes out.

    open ──several refusals, no answers between──> closed ──pause over, one probe sent──> probing
     ^                                               ^ └── any answer ──────────────────────┐ │
     │                                               └──────── probe refused ───────────────┼─┤
     └──────────────────────────────────── any answer ──────────────────────────────────────┘─┘

A few refusals among answers do not close it: each of those requests pauses on its own, and the others go on at full
concurrency (one error must not slow down its neighbours).
"""

from __future__ import annotations

import random
from collections import deque
from enum import Enum

from batch_pipeline.worker.pauses import pause_seconds

_STREAK = 4
"""So many refusals in a row mean the engine and not the request,"""
_WINDOW = 16
"""and so does half of so many answers."""


class GateState(Enum):
    """Whether requests may go out."""

    OPEN = "open"
    CLOSED = "closed"
    PROBING = "probing"


class Gate:
    """Pure: the caller tells the time, in seconds of a monotonic clock."""

    def __init__(self, source: random.Random) -> None:
        self._random = source
        self._recent: deque[bool] = deque(maxlen=_WINDOW)
        """True for a refusal; the newest last."""
        self._refused_probes = 0
        self.state = GateState.OPEN
        self.epoch = 0
        """Grows with each closing: a refusal of a request that was fed in an earlier one says nothing new."""
        self.opens_at = 0.0
        """When a probe may go out; meaningful while closed."""

    def may_feed(self, now: float) -> bool:
        """Return whether a request may go out now. Where it does, tell `fed`."""
        return self.state is GateState.OPEN or (self.state is GateState.CLOSED and now >= self.opens_at)

    def fed(self) -> int:
        """A request goes out; return the epoch, to be given back with its end."""
        if self.state is GateState.CLOSED:
            self.state = GateState.PROBING
        return self.epoch

    def answered(self) -> None:
        """The engine has answered some request properly."""
        if self.state is GateState.OPEN:
            self._recent.append(False)
            return
        self.state = GateState.OPEN
        self._refused_probes = 0
        self._recent.clear()

    def refused(
        self, epoch: int, now: float, asked_seconds: float | None = None, *, has_failed_before: bool = False
    ) -> bool:
        """The engine has refused a request that was fed in `epoch`; return whether the gate closed by it.

        Of a request that has failed before, a further failure says nothing new about the engine, unless it was the
        probe.
        """
        if epoch != self.epoch or (has_failed_before and self.state is not GateState.PROBING):
            return False
        if self.state is GateState.OPEN:
            self._recent.append(True)
            if not self._means_the_engine():
                return False
        self._refused_probes += 1
        self.state = GateState.CLOSED
        self.epoch += 1
        self.opens_at = now + pause_seconds(self._refused_probes, self._random, asked_seconds=asked_seconds)
        self._recent.clear()
        return True

    def abandoned(self, epoch: int) -> None:
        """A request that was fed in `epoch` ended without telling anything: where it was the probe, send another."""
        if self.state is GateState.PROBING and epoch == self.epoch:
            self.state = GateState.CLOSED

    def _means_the_engine(self) -> bool:
        newest = list(self._recent)[-_STREAK:]
        if len(newest) == _STREAK and all(newest):
            return True
        return len(self._recent) == _WINDOW and 2 * sum(self._recent) >= _WINDOW
