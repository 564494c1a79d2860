"""An engine that somebody else runs: a sidecar in the worker's pod, or a live server that is shared."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from batch_pipeline.engine import probe
from batch_pipeline.engine.probe import Health
from batch_pipeline.errors import EngineError

_POLL_SECONDS = 0.25


class AttachedEngine:
    """The server at a URL. Its starts and its end are not ours; a restart means waiting until it is back."""

    def __init__(self, name: str, url: str, start_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._url = url.rstrip("/")
        self._start_seconds = start_seconds
        self._clock = clock

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._url

    async def start(self) -> None:
        """Nothing: it is started by others."""

    async def wait_ready(self) -> None:
        """Wait until it is healthy and serves the model. Raises EngineError after `engine_start_seconds`."""
        give_up_at = self._clock() + self._start_seconds
        while (found := await probe.health(self._url)) is not Health.READY:
            if self._clock() > give_up_at:
                raise EngineError(
                    f"the engine at {self._url} is {found.value} after {self._start_seconds:.0f} s of waiting: "
                    "start it, or mend the model's engine_url"
                )
            await asyncio.sleep(_POLL_SECONDS)
        await probe.check_serves(self._url, self._name)

    async def version(self) -> str:
        """Return the version that it reports."""
        return await probe.version(self._url)

    async def alive(self) -> bool:
        """Return whether it can still answer."""
        return await probe.health(self._url) is not Health.DOWN

    async def died(self) -> None:
        """Never return: its process is not ours to see; a request that finds nobody tells."""
        await asyncio.Event().wait()

    async def restart(self) -> None:
        """Wait until it is back."""
        await self.wait_ready()

    async def stop(self) -> None:
        """Nothing: others may be using it."""
