"""When a batch's chunks ran, on which worker and how each attempt ended: read from its events. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from batch_pipeline.ledger.records import Event


class AttemptEnd(StrEnum):
    """How an attempt ended, in the words of the ledger's events."""

    COMMITTED = "committed"
    RELEASED = "released"
    """Its worker gave way, or failed and said so."""
    LEASE_EXPIRED = "lease_expired"
    """Its worker was not heard of in time."""
    SUPERSEDED = "superseded"
    """An operator asked for the chunk to be run again while it was running."""
    RUNNING = "running"


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One lease of one chunk. Times are UTC seconds since the epoch."""

    chunk: int
    attempt: int
    """The lease's fencing token: 1 for the first."""
    worker: str
    run_id: str | None
    started_at: float
    ended_at: float | None
    """Null while it runs."""
    ended: AttemptEnd
    detail: str | None = None


_ENDS = {str(end): end for end in (AttemptEnd.COMMITTED, AttemptEnd.RELEASED, AttemptEnd.LEASE_EXPIRED)}


def attempts_in(events: Iterable[Event]) -> list[Attempt]:
    """Return the attempts at a batch's chunks, in the order in which they began; about 300 bytes of memory each."""
    started: dict[tuple[int, int | None], Event] = {}
    ended: dict[tuple[int, int | None], Attempt] = {}
    for event in events:
        if event.chunk is None:
            continue
        at = (event.chunk, event.token)
        if event.event == "leased":
            started[at] = event
        elif at in started and event.event in (*_ENDS, AttemptEnd.SUPERSEDED):
            end = _ENDS.get(event.event, AttemptEnd.SUPERSEDED)
            # What was committed and is superseded later keeps the end that it had.
            ended.setdefault(at, _attempt(started[at], event, end))
    return [ended.get(at) or _attempt(event, None, AttemptEnd.RUNNING) for at, event in started.items()]


def _attempt(start: Event, end: Event | None, how: AttemptEnd) -> Attempt:
    return Attempt(
        chunk=start.chunk or 0,
        attempt=start.token or 0,
        worker=start.actor,
        run_id=start.run_id,
        started_at=start.at,
        ended_at=None if end is None else end.at,
        ended=how,
        detail=None if end is None else end.detail,
    )
