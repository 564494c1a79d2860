"""Finding out how many requests an engine is to have at once, with requests that nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from batch_pipeline.engine.calibration import Search, Step, Window
from batch_pipeline.engine.client import EngineClient
from batch_pipeline.errors import EngineError

_ANSWER_SECONDS = 600.0
_LOOK_SECONDS = 0.1


class Load:
    """Keeps so many requests in an engine, always: each that is answered is followed by the next."""

    def __init__(
        self,
        client: EngineClient,
        endpoint: str,
        bodies: Iterator[bytes],
        *,
        least_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """`bodies` must not end; `least_seconds` is how long each measure takes at least."""
        self._client = client
        self._endpoint = endpoint
        self._bodies = bodies
        self._least_seconds = least_seconds
        self._clock = clock
        self._answers = self._tokens = 0

    async def find(self, search: Search, told: Callable[[Step], None] = lambda _step: None) -> None:
        """Measure one level after the other, until the search is over. `told` hears each measure.

        Raises EngineError where the engine refuses a request, NoAnswer where it gives no answer.
        """
        while (level := search.next()) is not None:
            per_second = await self._measure(level)
            search.measured(level, per_second)
            told(Step(level, per_second))

    async def _measure(self, level: int) -> float:
        window = Window(level, self._least_seconds)
        places = [asyncio.create_task(self._keep_one_in_flight()) for _ in range(level)]
        try:
            while (rate := window.look(self._clock(), self._answers, self._tokens, level)) is None:
                ended, _ = await asyncio.wait(places, timeout=_LOOK_SECONDS, return_when="FIRST_COMPLETED")
                for place in ended:
                    place.result()
            return rate
        finally:
            for place in places:
                place.cancel()
            await asyncio.gather(*places, return_exceptions=True)

    async def _keep_one_in_flight(self) -> None:
        while True:
            answer = await self._client.complete(self._endpoint, next(self._bodies), _ANSWER_SECONDS)
            if answer.status >= 300:
                raise EngineError(f"the engine refuses a request of the calibration: {answer.status} {answer.message}")
            self._answers += 1
            self._tokens += answer.input_tokens + answer.output_tokens
