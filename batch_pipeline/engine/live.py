"""A live request of our own: how long live traffic waits on an engine for its first token, measured from outside.

vLLM's histogram of that time holds everybody's requests, batch work included, and does not tell them apart. So we ask
for one token as live traffic would, at its priority: its answer comes when the first token does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from batch_pipeline.engine.client import AnswerTimeout, EngineClient
from batch_pipeline.errors import EngineError
from batch_pipeline.models import MESSAGES, RESPONSES

PROBE_SECONDS = 60.0
"""After so long a probe is given up; it counts as having waited so long."""
_BUSY = frozenset({429, 503})
"""What an engine answers that takes no more requests."""
_CHAT = [{"role": "user", "content": "Hello"}]
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 1},
    "/v1/chat/completions": {"messages": _CHAT, "max_tokens": 1},
    MESSAGES: {"messages": _CHAT, "max_tokens": 1},
    RESPONSES: {"input": "Hello", "max_output_tokens": 1, "store": False},
    "/v1/embeddings": {"input": "Hello"},
}
"""The plainest request of each endpoint, those first that ask least of an engine."""


class LiveProbe:
    """Sends one probe after the other to the engine of a model. Use it in one event loop, and close it."""

    def __init__(self, url: str, model: str, endpoints: Sequence[str], clock: Callable[[], float]) -> None:
        """`endpoints` are the model's, at least one of those of the catalogue; `clock` is in monotonic seconds."""
        self._client = EngineClient(url)
        self._clock = clock
        self._endpoint = next(endpoint for endpoint in _BODIES if endpoint in endpoints)
        self._body = {"model": model, **_BODIES[self._endpoint]}

    async def seconds(self) -> float:
        """Return the time to first token of a live request sent now, infinite where it is refused as one too many.

        Raises EngineError where the engine cannot be asked.
        """
        began = self._clock()
        try:
            answer = await self._client.complete(self._endpoint, msgspec.json.encode(self._body), PROBE_SECONDS)
        except AnswerTimeout:
            return self._clock() - began
        if answer.status in _BUSY:
            return math.inf
        if answer.status >= 300:
            raise EngineError(f"its engine answers a live probe with {answer.status} {answer.message}".strip())
        return self._clock() - began

    async def takes_priority(self, priority: int) -> bool | None:
        """Return whether the engine takes requests with vLLM's `priority`, None where it does not say now.

        An engine without `--scheduling-policy priority` refuses such a request or, the newer versions, takes no notice.
        Raises NoAnswer where there is none.
        """
        body = msgspec.json.encode(self._body)
        answer = await self._client.complete(self._endpoint, body, PROBE_SECONDS, priority)
        if answer.status < 300:
            return True
        return False if answer.status in (400, 422) else None

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()
