"""How far estimates of finish were off, once it is known (pure)."""

from __future__ import annotations

from enum import StrEnum

import msgspec

ERROR_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
"""Of the classes in which relative errors are counted; the last class is above all of them."""


class Milestone(StrEnum):
    """When an estimate that is kept was made."""

    FIRST = "first"
    """As soon as there was one."""
    HALF = "half"
    """When half of the batch's requests had finished."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate to be judged by. Times are UTC seconds."""

    made_at: float
    finish_at: float


def due(done: int, total: int, kept: dict[Milestone, Kept]) -> list[Milestone]:
    """Return of which milestones an estimate is to be kept now: `done` of `total` requests have finished."""
    reached = [Milestone.FIRST, *([Milestone.HALF] if 2 * done >= total else [])]
    return [milestone for milestone in reached if milestone not in kept]


def relative_error(kept: Kept, ended_at: float) -> float | None:
    """Return by which share of the time that was really left an estimate was off; None where none was left."""
    left = ended_at - kept.made_at
    return abs(kept.finish_at - ended_at) / left if left > 0 else None


def error_class(error: float) -> int:
    """Return the number of the class of a relative error, from 0."""
    return sum(error > bound for bound in ERROR_BOUNDS)
