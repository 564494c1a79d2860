"""What a worker has done when it ends."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from batch_pipeline.worker.calibrations import LimitBy


class Ended(StrEnum):
    """Why a worker ended."""

    IDLE = "idle"
    """Nothing was waiting for longer than it keeps its engine warm."""
    ASKED = "asked"
    """The ledger asked it to give way."""
    SIGNAL = "signal"
    """SIGTERM or SIGINT: preempted, or stopped by an operator."""
    LIFETIME = "lifetime"
    """It had run for as long as a worker may."""


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the worker's life; tokens as the engine reported them, of committed chunks."""

    worker_id: str
    ended: Ended
    chunks: int
    """Committed."""
    requests: int
    """In those chunks, what earlier attempts had finished included."""
    input_tokens: int
    output_tokens: int
    seconds: float
    in_flight: int
    """Most requests that it kept in the engine at once, at its end,"""
    in_flight_by: LimitBy
    """and where that number is from."""

    def __str__(self) -> str:
        """Return the report in one sentence."""
        return (
            f"{self.worker_id} left ({self.ended}): {self.chunks} chunks, {self.requests} requests, "
            f"{self.output_tokens} tokens generated in {self.seconds:.0f} s, at most {self.in_flight} in flight "
            f"({self.in_flight_by})"
        )
