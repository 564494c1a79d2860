"""What a worker needs of an engine, whether it starts one or attaches to one."""

from __future__ import annotations

from typing import Protocol


class Engine(Protocol):
    """One inference server behind the OpenAI protocol.

    absent ──start──> starting ──wait_ready──> ready ──dies──> absent
                          └──── EngineError ────┘   └─restart──┘
    """

    @property
    def url(self) -> str:
        """Where it listens now, without a slash at the end; may be another one after each start."""

    async def start(self) -> None:
        """Begin to start it; returns at once. Nothing where somebody else starts it."""

    async def wait_ready(self) -> None:
        """Wait until it serves the model. Raises EngineError, with the reason, where it ends or takes too long."""

    async def version(self) -> str:
        """Return the version that it reports, `unknown` where it reports none."""

    async def alive(self) -> bool:
        """Return whether it can still answer; one that is merely slow is alive."""

    async def died(self) -> None:
        """Return when a start has ended by its process's end; never where the process is not ours to see."""

    async def restart(self) -> None:
        """End what is left of it, start it again and wait until it is ready. Raises EngineError."""

    async def stop(self) -> None:
        """End it, where we started it; returns when nothing of it is left."""
