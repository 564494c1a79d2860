"""Gives way to live traffic on an engine that both use: reads the engine, asks the governor, holds the runner to it.

Two loops beside those of the worker: one sends live probes, the other reads the metrics every second and acts. A stop
acts at once: nothing more is fed, and what is in flight goes on or is taken back as the governor says. Nothing here is
kept: a worker that is killed begins with the least again, and what it had in flight the engine drops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from batch_pipeline.engine import NoAnswer
from batch_pipeline.engine.live import LiveProbe
from batch_pipeline.engine.metrics import read_load
from batch_pipeline.errors import EngineError
from batch_pipeline.models import Model
from batch_pipeline.scheduling.governor import Load, Mode, Rules, Share, Snapshot, first_share, govern
from batch_pipeline.worker.outages import was_set

log = logging.getLogger(__name__)

BATCH_PRIORITY = 100
"""vLLM's `priority` of batch requests; live ones have 0, and smaller goes first."""
_LOOK_SECONDS = 1.0


class Governed(Protocol):
    """What the runner lets the governor do."""

    @property
    def in_flight(self) -> int:
        """Requests that the engine has of us now."""

    def allow(self, in_flight: int) -> None:
        """Have at most so many in flight from now on."""

    def set_priority(self, priority: int) -> None:
        """Send requests with this priority from now on."""

    async def give_way(self, keep: int) -> None:
        """Take back all but so many of those in flight."""


class Sharing:
    """Run `probe`, `look` and `find_priority` side by side for as long as the worker feeds its engine."""

    def __init__(
        self,
        url: str,
        name: str,
        model: Model,
        *,
        runner: Governed,
        told: Callable[[str | None], None],
        clock: Callable[[], float],
    ) -> None:
        """`told` hears what holds batch work up, in words, and None once nothing does; seldom, and not each figure."""
        shared = model.shared
        self._rules = Rules(
            budget_seconds=shared.live_ttft_budget_seconds,
            kv_cache_mark=shared.kv_cache_mark,
            least=shared.least_in_flight,
            most=model.most_in_flight,
        )
        self._url = url
        self._probe = LiveProbe(url, name, model.endpoints, clock)
        self._probe_seconds = shared.probe_seconds
        self._runner = runner
        self._told = told
        self._clock = clock
        self._probed_at: float | None = None
        """When the probe was sent that is on its way."""
        self._ttft: float | None = None
        self._measures = 0
        self._trouble = ""
        self._measured = asyncio.Event()
        self._told_last = (Mode.BLIND, "")
        self.share: Share = first_share(self._rules)
        """The newest decision."""

    async def probe(self) -> None:
        """Measure the live time to first token, again and again."""
        try:
            while True:
                await self._measure()
                await asyncio.sleep(self._probe_seconds)
        finally:
            await self._probe.close()

    async def look(self) -> None:
        """Read the load, decide and act, every second, and as soon as a probe has come back."""
        while True:
            await was_set(self._measured, _LOOK_SECONDS)
            self._measured.clear()
            await self._decide()

    async def find_priority(self) -> None:
        """Find out, once, whether the engine takes requests with a priority; until then they are sent without."""
        while True:
            try:
                takes = await self._probe.takes_priority(BATCH_PRIORITY)
            except NoAnswer as error:
                log.info("whether the engine takes a priority is not known yet: %s", error)
            else:
                if takes:
                    self._runner.set_priority(BATCH_PRIORITY)
                    return
                if takes is False:
                    log.warning("the engine takes no priority: start it with --scheduling-policy priority")
                    return
            await asyncio.sleep(self._probe_seconds)

    async def _measure(self) -> None:
        self._probed_at = self._clock()
        try:
            self._ttft, self._trouble = await self._probe.seconds(), ""
        except (EngineError, NoAnswer) as error:
            self._ttft, self._trouble = None, f"the live time to first token cannot be measured: {error}"
        finally:
            self._probed_at = None
        self._measures += 1
        self._measured.set()

    async def _decide(self) -> None:
        own_before = self._runner.in_flight
        load: Load | None = None
        trouble = self._trouble
        try:
            load = await read_load(self._url)
        except EngineError as error:
            trouble = str(error)
        snapshot = Snapshot(
            load=load,
            # What has come or gone while the engine was asked is ours all the same.
            own_in_flight=max(own_before, self._runner.in_flight),
            live_ttft_seconds=self._live_ttft_seconds(),
            measures=self._measures,
            trouble=trouble,
        )
        self.share = share = govern(self.share, snapshot, self._rules)
        self._tell(share, trouble if share.mode is Mode.BLIND else "")
        self._runner.allow(share.in_flight)
        if share.keep is not None:
            log.info("all but %d of %d requests are taken back", share.keep, self._runner.in_flight)
            await self._runner.give_way(share.keep)

    def _tell(self, share: Share, trouble: str) -> None:
        """Tell what has changed; figures that change every second are no change."""
        if (share.mode, trouble) == self._told_last:
            return
        self._told_last = (share.mode, trouble)
        log.info("%d batch requests may be in flight (%s): %s", share.in_flight, share.mode.value, share.reason)
        if share.mode is Mode.OPEN:
            self._told(None)
        elif share.mode is Mode.CAREFUL:
            self._told("live traffic has its engine too: fewer requests at once")
        else:
            self._told(share.reason)

    def _live_ttft_seconds(self) -> float | None:
        """Return the newest measure, or how long the probe on its way has waited where that is longer."""
        if self._probed_at is None:
            return self._ttft
        waited = self._clock() - self._probed_at
        # Nothing was measured before: a short wait says nothing yet, a long one does.
        if self._ttft is None:
            return waited if waited > self._rules.budget_seconds else None
        return max(self._ttft, waited)
