"""How long an answer may take: from the request's `max_tokens`, the speed that was measured, and a ceiling.

A request that hangs, or an engine that does, is then noticed in minutes, and a long answer still has its time.
"""

from __future__ import annotations

from collections import deque

from batch_pipeline.wire.chunk_files import ChunkRequest

_MARGIN = 10.0
"""So many times longer than the slowest of the newest answers may a request take for each of its tokens."""
_ANSWERS = 256
"""How many answers count as the newest ones."""
_ENOUGH = 32
"""With fewer answers nothing is known yet, and the ceiling holds."""
_LEAST_TOKENS = 16
"""What an answer costs beside its tokens (queue, prompt) is as if it had so many at least."""


class Patience:
    """Pure: the caller measures. All times are seconds."""

    def __init__(self, least_seconds: float, most_seconds: float) -> None:
        """Limits lie between these two; the upper one wins where they cross."""
        self._least = least_seconds
        self._most = most_seconds
        self._pace: deque[float] = deque(maxlen=_ANSWERS)
        """Seconds for each output token, queue and prompt included; the newest last."""

    def answered(self, seconds: float, output_tokens: int) -> None:
        """An answer has come after so long."""
        self._pace.append(seconds / max(output_tokens, _LEAST_TOKENS))

    def limit(self, request: ChunkRequest, timeouts: int) -> float:
        """Return how long the next try may take. After each of `timeouts` tries without an answer it is twice as long.

        The prompt's tokens count like those of the answer, though they cost less: too long a wait costs a place in the
        engine, too short a one costs the customer an answer. Cost: a look at 256 numbers.
        """
        if len(self._pace) < _ENOUGH:
            return self._most
        tokens = max(request.prompt_tokens + request.max_tokens, _LEAST_TOKENS)
        derived = _MARGIN * max(self._pace) * tokens
        return min(self._most, max(self._least, derived) * 2.0 ** min(timeouts, 30))
