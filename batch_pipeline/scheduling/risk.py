"""Which batches will miss their deadline at the rate so far (pure)."""

from __future__ import annotations

import msgspec

from batch_pipeline.scheduling.explain import estimate_finish

JUDGED_FROM = 0.05
"""Share of the time to the deadline that has to have passed: before that, a slow start says nothing."""
HOPELESS_WITHOUT_RESULT = 0.5
"""Share of that time after which a batch of which nothing has finished is at risk."""
RELIEF = 0.1
"""Share of the time that must be left over at the estimated end for a batch at risk to be so no longer: otherwise one
that stands on the edge would change its mind with every look."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """A batch in progress at one moment. Times are UTC seconds, `done` and `total` requests."""

    batch_id: str
    customer: str
    name: str
    started_at: float
    """When it was in progress: its chunks could be run from then on."""
    deadline_at: float
    done: int
    total: int
    at_risk_at: float | None
    """Since when it is said to be at risk."""


def risk_of(pace: Pace, now: float) -> str | None:
    """Return why a batch is likely to miss its deadline, as a phrase; None where it is not, or not to be judged yet.

    Linear, as `explain.estimate_finish`: what is left at the rate since it was in progress, the wait for a worker
    included.
    """
    whole = max(pace.deadline_at - pace.started_at, 1.0)
    gone = (now - pace.started_at) / whole
    if pace.done >= pace.total or gone < JUDGED_FROM:
        return None
    finish = estimate_finish(now=now, started_at=pace.started_at, done=pace.done, total=pace.total)
    if finish is None:
        if gone < HOPELESS_WITHOUT_RESULT:
            return None
        return f"no request has finished, and {gone:.0%} of the time to the deadline is over"
    margin = RELIEF * whole if pace.at_risk_at is not None else 0.0
    if finish <= pace.deadline_at - margin:
        return None
    late = finish - pace.deadline_at
    where = f"{duration(late)} after its deadline" if late > 0 else f"only {duration(-late)} before its deadline"
    return f"{pace.done} of {pace.total} requests have finished; at this rate it ends {where}"


def duration(seconds: float) -> str:
    """Return a time as people say it: 40 s, 12 min, 3.5 h, 2.1 days."""
    for unit, size, digits in (("days", 172_800.0, 1), ("h", 7200.0, 1), ("min", 120.0, 0)):
        if seconds >= size:
            return f"{seconds / {'days': 86_400.0, 'h': 3600.0, 'min': 60.0}[unit]:.{digits}f} {unit}"
    return f"{seconds:.0f} s"
