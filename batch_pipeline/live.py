"""How many GPUs live traffic needs at a moment, by the operator's schedule (pure)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

_HOURS = re.compile(r"([01][0-9]|2[0-4]):([0-5][0-9])-([01][0-9]|2[0-4]):([0-5][0-9])")
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_SECONDS = 86_400.0
_THURSDAY = 3
"""The epoch began on one."""


class LiveHours(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the week in which live traffic needs GPUs."""

    hours: str
    """UTC, for instance "08:00-20:00"; "22:00-06:00" goes on into the next day."""
    gpus: int
    days: list[str] = []
    """"mon" to "sun": the days on which it begins. Empty: all."""


def problem_of(entry: LiveHours) -> str | None:
    """Return what is wrong with an entry of the schedule, if anything."""
    if entry.gpus < 0:
        return f"gpus must be 0 or more, not {entry.gpus}"
    if unknown := [day for day in entry.days if day not in _DAYS]:
        return f"days may be {', '.join(_DAYS)}, not {unknown[0]!r}"
    if _HOURS.fullmatch(entry.hours) is None or max(_times(entry.hours)) > _DAY_SECONDS:
        return f'hours must be written as "08:00-20:00", not {entry.hours!r}'
    return None


def live_gpus(schedule: Sequence[LiveHours], now: float) -> int:
    """Return the GPUs that live traffic needs by the schedule, where entries overlap the most of them; `now` is UTC
    seconds since the epoch.
    """
    return max((entry.gpus for entry in schedule if _covers(entry, now)), default=0)


def _covers(entry: LiveHours, now: float) -> bool:
    day, second = divmod(now, _DAY_SECONDS)
    begins, ends = _times(entry.hours)
    if begins < ends:
        return begins <= second < ends and _is_on(entry, int(day))
    return (second >= begins and _is_on(entry, int(day))) or (second < ends and _is_on(entry, int(day) - 1))


def _is_on(entry: LiveHours, day: int) -> bool:
    return not entry.days or _DAYS[(day + _THURSDAY) % 7] in entry.days


def _times(hours: str) -> tuple[float, float]:
    """Return when a part of the day begins and ends, in seconds from midnight; `hours` is well-formed."""
    numbers = [int(part) for part in re.split("[:-]", hours)]
    return numbers[0] * 3600.0 + numbers[1] * 60.0, numbers[2] * 3600.0 + numbers[3] * 60.0
