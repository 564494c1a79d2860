"""How many requests this worker keeps in its engine: as configured, as calibrated on such a machine, or by default.

Where the model asks for it, a worker that finds no calibration makes one of the very requests that it runs: it has some
number of them in flight for a while, then another, and so on (`engine.calibration`). Nothing is run twice for that, and
every answer is a result like any other. Killed before it is over, what was measured is lost, and the next worker begins
again; after it, the calibration is in the store for all.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from batch_pipeline.engine.calibration import Search, Window
from batch_pipeline.models import Model
from batch_pipeline.store import ObjectStore
from batch_pipeline.worker.calibrations import LimitBy, Subject, concluded, record, recorded, subject_of
from batch_pipeline.worker.outages import Outages
from batch_pipeline.worker.runner import Clocks

log = logging.getLogger(__name__)

_LEAST_SECONDS = 5.0
"""How long a measure takes at least."""
_LOOK_SECONDS = 0.25


class Tuned(Protocol):
    """What the runner tells, and lets be set."""

    answers: int
    tokens: int
    engine_version: str
    most_in_flight: int

    @property
    def in_flight(self) -> int:
        """Requests that the engine has of us now."""

    def make_full_with(self, in_flight: int) -> None:
        """Feed as long as fewer than so many are in flight, from now on."""


class Tuning:
    """Call `recall` once the engine is ready, then run `find` beside the work where `is_wanted`."""

    def __init__(
        self,
        name: str,
        model: Model,
        machine: str,
        *,
        runner: Tuned,
        store: ObjectStore,
        outages: Outages,
        clocks: Clocks,
    ) -> None:
        """`machine` is the kind of it, found out where it is empty."""
        self._name = name
        self._model = model
        self._machine = machine
        self._runner = runner
        self._store = store
        self._outages = outages
        self._clocks = clocks
        self._subject: Subject | None = None
        self.limit_by = LimitBy.DEFAULT if model.max_in_flight is None else LimitBy.CONFIGURED
        """Where the present number in flight is from."""

    @property
    def is_wanted(self) -> bool:
        """Whether there is no calibration, and one is to be made."""
        return self._model.calibrate and self.limit_by is LimitBy.DEFAULT

    async def recall(self) -> None:
        """Take the number that a calibration of such a machine has found, unless one is configured."""
        if self.limit_by is not LimitBy.CONFIGURED and not self._model.shared.live_traffic:
            version = self._runner.engine_version
            self._subject = await asyncio.to_thread(subject_of, self._name, self._model, version, self._machine)
            found = await self._outages.outlast(None, recorded, self._store, self._subject)
            if found is not None:
                self._use(found.in_flight)
        log.info("at most %d requests are in flight (%s)", self._runner.most_in_flight, self.limit_by)

    async def find(self) -> None:
        """Calibrate with the work that is there, use what was found, and keep it for others. Ends then."""
        if self._subject is None:
            return
        search = Search()
        while (level := search.next()) is not None:
            self._runner.make_full_with(level)
            per_second = await self._measure(level)
            log.info("with %d requests in flight the engine does %.0f tokens a second", level, per_second)
            search.measured(level, per_second)
        calibration = concluded(self._subject, search, self._clocks.utc())
        self._use(calibration.in_flight)
        await self._outages.outlast(None, record, self._store, calibration)
        log.info("calibrated: at most %d requests are in flight", calibration.in_flight)

    async def _measure(self, level: int) -> float:
        window = Window(level, _LEAST_SECONDS)
        while True:
            runner = self._runner
            rate = window.look(self._clocks.monotonic(), runner.answers, runner.tokens, runner.in_flight)
            if rate is not None:
                return rate
            await asyncio.sleep(_LOOK_SECONDS)

    def _use(self, in_flight: int) -> None:
        self._runner.make_full_with(in_flight)
        self.limit_by = LimitBy.CALIBRATED
