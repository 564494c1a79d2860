"""Which request kills the engine? Those that were in flight at a death are suspects, and run alone afterwards.

    in flight at a death ──> suspect ──runs alone, finishes──> cleared
                                ^  └──runs alone, dies────────┐
                                └──fewer than `max_deaths`────┴──`max_deaths`──> culprit

While there is a suspect, nothing else is in flight: a death then has exactly one cause. Lives as long as the worker;
the suspects of a worker that is killed run among the others at the next one, and become suspects there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Suspect = TypeVar("Suspect")


class Quarantine(Generic[Suspect]):
    """Suspects are told apart by identity. Pure: no clock, no engine."""

    def __init__(self, max_deaths: int) -> None:
        self._max_deaths = max_deaths
        self._waiting: deque[Suspect] = deque()
        self._running: Suspect | None = None
        self._deaths_alone: dict[int, int] = {}
        """By identity of the suspect; kept only while it is one."""

    def __len__(self) -> int:
        """Return how many suspects there are, the one that runs included."""
        return len(self._waiting) + (self._running is not None)

    def next(self) -> Suspect | None:
        """Return the suspect that is to run now; the caller sees to it that nothing else is in flight.

        None while one runs, and where there is none.
        """
        if self._running is None and self._waiting:
            self._running = self._waiting.popleft()
            return self._running
        return None

    def engine_died(self, in_flight: Sequence[Suspect]) -> list[Suspect]:
        """Take in what was in flight when the engine died; return those that are culprits: not to be run again."""
        self._running = None
        if len(in_flight) != 1:
            known = {id(suspect) for suspect in self._waiting}
            self._waiting.extend(suspect for suspect in in_flight if id(suspect) not in known)
            return []
        (alone,) = in_flight
        deaths = self._deaths_alone.get(id(alone), 0) + 1
        if deaths >= self._max_deaths:
            self._deaths_alone.pop(id(alone), None)
            return [alone]
        self._deaths_alone[id(alone)] = deaths
        # To the front: its tries follow each other, and its neighbours wait for the verdict once.
        self._waiting.appendleft(alone)
        return []

    def put_back(self, suspect: Suspect) -> bool:
        """It was to run alone but never reached the engine; return whether it is a suspect at all."""
        if self._running is not suspect:
            return False
        self._running = None
        self._waiting.appendleft(suspect)
        return True

    def cleared(self, suspect: Suspect) -> None:
        """It ran alone, and the engine lives; nothing where it was no suspect."""
        if self._running is suspect:
            self._running = None
            self._deaths_alone.pop(id(suspect), None)

    def drop(self, unwanted: Callable[[Suspect], bool]) -> None:
        """Forget suspects that are not wanted any more (their chunk was lost or stopped)."""
        everyone = [*self._waiting, *([self._running] if self._running is not None else [])]
        for suspect in filter(unwanted, everyone):
            self._deaths_alone.pop(id(suspect), None)
        self._waiting = deque(suspect for suspect in self._waiting if not unwanted(suspect))
        if self._running is not None and unwanted(self._running):
            self._running = None
