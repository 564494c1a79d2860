"""Which batches will miss their deadline, and which cannot but miss it (pure).

Both by the one estimate that there is: the finish of `scheduling.finish`, which knows the queue, the help for batches
at risk and the workers that are to come. That a batch cannot be in time is said by less: its own work, on all the
workers that there can be.
"""

from __future__ import annotations

import msgspec

from batch_pipeline.scheduling.accuracy import Kept, Milestone
from batch_pipeline.scheduling.order import SLIP

JUDGED_FROM = 0.05
"""Share of the time to the deadline that has to have passed: before that, workers are still being launched."""
HOPELESS_WITHOUT_RESULT = 0.5
"""Share of that time after which a batch of which nothing has finished, and nothing is known, is at risk."""
RELIEF = 0.1
"""Share of the time that must be left over at the estimated end for a batch at risk to be so no longer: otherwise one
that stands on the edge would change its mind with every look."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """A batch in progress at one moment. Times are UTC seconds, `done` and `total` requests."""

    batch_id: str
    customer: str
    name: str
    models: list[str]
    started_at: float
    """When it was in progress: its chunks could be run from then on."""
    deadline_at: float
    done: int
    total: int
    at_risk_at: float | None
    """Since when it is said to be at risk."""
    kept: dict[Milestone, Kept] = {}
    """Estimates of its finish that were kept."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch asks of one model at one moment, and what there can be at most."""

    model: str
    tokens: float
    """That are left, as they are expected to be used."""
    deadline_at: float
    now: float
    most_workers: int
    """That the catalogue and the GPUs allow, and not less than there are; 0 where no worker can be."""
    most_tokens_per_second: float | None
    """Of so many workers; None where no speed is known."""
    no_worker_because: str | None = None
    """Why the catalogue and the GPUs allow none, as a phrase; None where they allow one, or nobody knows why."""
    loading_seconds: float
    """Until the first of them can begin; 0 where one is ready."""


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What is expected of a batch."""

    finish_at: float | None = None
    """UTC seconds; None where it is not known."""
    shortfall: str | None = None
    """Why it cannot be in time at all, as a phrase; None where it can be, or where nothing is known."""


def shortfall(demand: Demand) -> str | None:
    """Return why a batch cannot be done by its deadline, with the arithmetic, as a phrase; None where it can be.

    With all workers of the model for itself. It may take a tenth longer before this is said (`order.SLIP`). Where no
    worker can be, no speed has to be known for it.
    """
    speed, there_are = demand.most_tokens_per_second, demand.deadline_at - demand.now
    if demand.most_workers == 0:
        because = "" if demand.no_worker_because is None else f": {demand.no_worker_because}"
        return f"it cannot be done by its deadline, since no worker of {demand.model} can run{because}"
    if not speed:
        # Nobody knows it, or the workers that there are leave, or serve given batches: until then they may do it.
        return None
    takes = demand.tokens / speed
    if demand.loading_seconds + takes * (1 - SLIP) <= there_are:
        return None
    workers = "its one worker does" if demand.most_workers == 1 else f"{demand.most_workers} workers do"
    loading = f" and {duration(demand.loading_seconds)} for loading" if demand.loading_seconds else ""
    return (
        f"it cannot be done by its deadline, even with all that {demand.model} can have: {demand.tokens:,.0f} tokens "
        f"are left, {workers} {speed:,.0f} a second, which takes {duration(takes)}{loading}; "
        f"there are {duration(max(there_are, 0.0))}"
    )


def risk_of(pace: Pace, outlook: Outlook, now: float) -> str | None:
    """Return why a batch is likely to miss its deadline, as a phrase; None where it is not, or not to be judged yet.

    Where its finish is not known, because nobody knows how fast its workers are, its own rate so far has to do.
    """
    whole = max(pace.deadline_at - pace.started_at, 1.0)
    gone = now - pace.started_at
    if pace.done >= pace.total:
        return None
    if outlook.shortfall is not None:
        return outlook.shortfall
    if gone < JUDGED_FROM * whole:
        return None
    finish, as_judged = outlook.finish_at, "in this queue"
    if finish is None and not pace.done:
        hopeless = gone >= HOPELESS_WITHOUT_RESULT * whole
        return (
            f"no request has finished, and {gone / whole:.0%} of the time to the deadline is over" if hopeless else None
        )
    if finish is None:
        finish, as_judged = now + gone / pace.done * (pace.total - pace.done), "at this rate"
    if finish <= pace.deadline_at - (RELIEF * whole if pace.at_risk_at is not None else 0.0):
        return None
    late = finish - pace.deadline_at
    where = f"{duration(late)} after its deadline" if late > 0 else f"only {duration(-late)} before its deadline"
    return f"{pace.done} of {pace.total} requests have finished; {as_judged} it ends {where}"


def duration(seconds: float) -> str:
    """Return a time as people say it: 40 s, 12 min, 3.5 h, 2.1 days."""
    for unit, size, digits in (("days", 172_800.0, 1), ("h", 7200.0, 1), ("min", 120.0, 0)):
        if seconds >= size:
            return f"{seconds / {'days': 86_400.0, 'h': 3600.0, 'min': 60.0}[unit]:.{digits}f} {unit}"
    return f"{seconds:.0f} s"
