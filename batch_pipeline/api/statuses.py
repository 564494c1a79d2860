"""The statuses of batches as OpenAI shows them: of those that are polled at the same time together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from batch_pipeline.api.openai_objects import BatchObject, batch_object
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.moments import Moment
from batch_pipeline.ledger.surroundings import Surroundings
from batch_pipeline.results.status import StatusDocument, expected_of, status_at
from batch_pipeline.settings import Settings


class OwnedBatch(NamedTuple):
    """A batch that a customer asks for."""

    customer: str
    batch_id: str


class Statuses:
    """Reads them. Cost: a transaction for the batches, and one for what the open ones wait for, however many."""

    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        self._ledger = ledger
        self._settings = settings

    def of(self, batch_id: str) -> BatchObject:
        """Return a batch, of which the caller is the owner, as it is now. Raises NotFound."""
        [shown] = self.at([self._ledger.moments.of(batch_id)])
        return shown

    def owned(self, asked: Sequence[OwnedBatch]) -> dict[OwnedBatch, BatchObject]:
        """Return batches as they are now; those that are none, or another customer's, are left out (I8)."""
        found = self._ledger.moments.these([one.batch_id for one in asked])
        mine = {one: found[one.batch_id] for one in asked if _is_of(one.customer, found.get(one.batch_id))}
        return dict(zip(mine, self.at(mine.values()), strict=True))

    def at(self, moments: Iterable[Moment]) -> list[BatchObject]:
        """Return batches as they were at their moments, with what they wait for a moment later."""
        seen = list(moments)
        open_ones = [moment.batch for moment in seen if not moment.batch.status.is_final]
        models = {model for batch in open_ones for model in batch.models}
        surroundings = self._ledger.surroundings.of_models(models) if open_ones else Surroundings()
        return [batch_object(moment.batch, self._document(moment, surroundings)) for moment in seen]

    def _document(self, moment: Moment, surroundings: Surroundings) -> StatusDocument:
        expected = expected_of(moment, self._ledger, self._settings)
        return status_at(moment, surroundings, expected, self._settings)


def _is_of(customer: str, moment: Moment | None) -> bool:
    return moment is not None and moment.batch.customer == customer
