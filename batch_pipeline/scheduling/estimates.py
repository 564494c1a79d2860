"""What is left to do, in tokens as they will be used (pure).

Intake counts a request's prompt and takes its max_tokens for the answer. What is really used is usually less, and by
how much is a habit of the customer and the model: so the estimates are scaled by what was used before, in the batch
itself and, until that tells enough, in the customer's earlier ones.
"""

from __future__ import annotations

import msgspec

HISTORY_TOKENS = 50_000_000.0
"""Estimated tokens after which what came before begins to fade."""
PRIOR_TOKENS = 200_000.0
"""Estimated tokens that a batch must have used for its own habit to count as much as its customer's."""


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of answered requests: as they were estimated, and as the engine counted them."""

    estimated: float = 0.0
    real: float = 0.0

    @property
    def ratio(self) -> float | None:
        """Real tokens for each estimated one; None where nothing has finished."""
        return self.real / self.estimated if self.estimated > 0 else None


def usage_ratio(batch: Used, history: Used) -> float:
    """Return how many tokens will be used for each estimated one: the batch's own ratio and its customer's, weighted by
    how much the batch has shown; 1 where nothing is known.
    """
    before = history.ratio
    if before is None:
        before = 1.0 if batch.ratio is None else batch.ratio
    return (batch.real + before * PRIOR_TOKENS) / (batch.estimated + PRIOR_TOKENS)


def remembered(history: Used, batch: Used) -> Used:
    """Return a customer's history with one more batch in it."""
    kept = min(1.0, HISTORY_TOKENS / history.estimated) if history.estimated > 0 else 1.0
    return Used(estimated=history.estimated * kept + batch.estimated, real=history.real * kept + batch.real)


def refilled(credit: float, seconds: float, *, tokens_per_second: float, share: float, most: float) -> float:
    """Return the tokens that may go out of turn, so many seconds after there were `credit` (see `order.Conditions`).

    It grows by a share of the model's measured speed: so batches at risk get at most that share of the service, and
    `most` (and one chunk) beyond it in any stretch of time.
    """
    return min(most, credit + max(0.0, seconds) * tokens_per_second * share)
