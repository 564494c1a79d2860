"""What is fed to the engine next: chunk by chunk in the order of the leases, and within each in the order of its rows.

A request that is to be tried again waits aside until its pause is over, and never holds up fresh work.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable

from batch_pipeline.worker.chunk import Flight, HeldChunk, Phase


class Feeder:
    """Pure: the caller tells the time. `now` is monotonic seconds, `utc` seconds since the epoch."""

    def __init__(self) -> None:
        self._chunks: list[HeldChunk] = []
        self._again: deque[Flight] = deque()
        self._pausing: list[tuple[float, int, Flight]] = []
        """A heap by the end of the pause."""
        self._order = itertools.count()
        self._probed: HeldChunk | None = None
        """Where the last probe came from."""

    @property
    def unfed(self) -> int:
        """Requests of held chunks that were not fed yet; those of chunks that are being loaded count."""
        return sum(chunk.unfed for chunk in self._chunks)

    def add(self, chunk: HeldChunk) -> None:
        """Take a chunk, behind those that are there."""
        self._chunks.append(chunk)

    def remove(self, chunk: HeldChunk) -> None:
        """Feed nothing of this chunk any more; nothing where it is not here."""
        self._chunks = [kept for kept in self._chunks if kept is not chunk]
        self._probed = None if self._probed is chunk else self._probed
        self._again = deque(flight for flight in self._again if flight.chunk is not chunk)
        self._pausing = [entry for entry in self._pausing if entry[2].chunk is not chunk]
        heapq.heapify(self._pausing)

    def again(self, flight: Flight) -> None:
        """Feed this request before all others."""
        self._again.append(flight)

    def pause(self, flight: Flight, until: float) -> None:
        """Feed this request again once its pause is over."""
        heapq.heappush(self._pausing, (until, next(self._order), flight))

    def next_pause_ends(self) -> float | None:
        """Return when the next pause is over, None where no request pauses."""
        return self._pausing[0][0] if self._pausing else None

    def next(self, now: float, utc: float, late: Callable[[HeldChunk], None]) -> Flight | None:
        """Return the request to feed now, or None where there is none.

        Nothing of a batch past its deadline is fed; `late` is told of its chunks.
        """
        while self._again:
            flight = self._again.popleft()
            if utc < flight.chunk.lease.deadline_at:
                return flight
            late(flight.chunk)
        while self._pausing and self._pausing[0][0] <= now:
            flight = heapq.heappop(self._pausing)[2]
            if utc < flight.chunk.lease.deadline_at:
                return flight
            late(flight.chunk)
        return self._fresh(self._chunks, utc, late)

    def next_probe(self, now: float, utc: float, late: Callable[[HeldChunk], None]) -> Flight | None:
        """Return the request that tells most about an engine which refused: one that has not failed yet.

        Each comes from another chunk than the one before where there is a choice, so that a run of bad requests in one
        file does not keep the others waiting.
        """
        flight = self._fresh(sorted(self._chunks, key=lambda chunk: chunk is self._probed), utc, late)
        if flight is None:
            return self.next(now, utc, late)
        self._probed = flight.chunk
        return flight

    def _fresh(self, chunks: Iterable[HeldChunk], utc: float, late: Callable[[HeldChunk], None]) -> Flight | None:
        for chunk in chunks:
            if chunk.phase is not Phase.RUNNING or not chunk.waiting:
                continue
            if utc < chunk.lease.deadline_at:
                return Flight(chunk, chunk.waiting.popleft())
            late(chunk)
        return None
