"""Usage: what each batch and customer is charged for, day by day, and what was not billed and why.

A batch belongs to the day (UTC) on which it ended. Its bill was made by the merge, of the tokens in its output file,
and was written with its final status; nothing here computes a price again. Money is US dollars as exact decimals.

Rows of batches are never removed, so a bill stays when chunks, files and manifest are gone (docs/billing.md). Batches
that ended before bills were kept get theirs here, from their manifest; where that is gone too, their tokens are
known and their price is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import msgspec

from batch_pipeline.errors import NotAllowedInState, ProofFailed
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch
from batch_pipeline.ledger.usage import Billed, Charge, total_cost
from batch_pipeline.results.archived import read_manifest
from batch_pipeline.store import ObjectStore


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """One batch: its requests by how they ended, of which only those with a response are billed."""

    day: date
    customer: str
    batch_id: str
    name: str
    status: str
    requests: int
    billed: int
    """Requests that were answered."""
    invalid: int
    """Requests that were never run, as the next two; and those that ended as an error."""
    expired: int
    cancelled: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: Decimal | None
    """Null where the catalogue had no price for one of its models."""
    models: list[Charge]

    @property
    def is_whole(self) -> bool:
        """Whether the bill has the tokens that were counted in the batch's files."""
        return all(
            sum(getattr(charge, kind) for charge in self.models) == getattr(self, kind)
            for kind in ("input_tokens", "cached_tokens", "output_tokens")
        )


class CustomerDay(msgspec.Struct, frozen=True, kw_only=True):
    """What one customer had on one day: sums over its batches that ended then."""

    day: date
    customer: str
    batches: int = 0
    requests: int = 0
    billed: int = 0
    invalid: int = 0
    expired: int = 0
    cancelled: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost: Decimal = Decimal(0)
    """Of the batches with a price."""
    unpriced: int = 0
    """Batches without a price: `cost` lacks them."""

    def plus(self, batch: BatchUsage) -> CustomerDay:
        """Return the sums with one more batch."""
        more: dict[str, int | Decimal] = {name: getattr(self, name) + getattr(batch, name) for name in _SUMMED}
        return msgspec.structs.replace(
            self,
            **more,
            batches=self.batches + 1,
            cost=self.cost + (batch.cost or 0),
            unpriced=self.unpriced + (batch.cost is None),
        )


_SUMMED = (
    *("requests", "billed", "invalid", "expired", "cancelled", "failed"),
    *("input_tokens", "cached_tokens", "output_tokens"),
)


def usage(
    ledger: Ledger, store: ObjectStore, *, first: date, last: date, customer: str | None = None
) -> Iterator[BatchUsage]:
    """Yield the batches that ended from the day `first` to the day `last`, both included, in the order of their ends.

    A page of them is in memory at once. Batches of before bills were kept are charged on the way, once; killed there,
    the next call does it. Raises StoreError where a manifest is needed and the store is away.
    """
    for billed in ledger.usage.ended(_start(first), _start(last + timedelta(days=1)), customer):
        charges = billed.charges or _charged_late(billed.batch, ledger, store)
        yield _batch_usage(Billed(batch=billed.batch, charges=charges))


def by_customer(batches: Iterable[BatchUsage]) -> list[CustomerDay]:
    """Return the sums by day and customer, in that order."""
    sums: dict[tuple[date, str], CustomerDay] = {}
    for batch in batches:
        key = (batch.day, batch.customer)
        sums[key] = sums.get(key, CustomerDay(day=batch.day, customer=batch.customer)).plus(batch)
    return [sums[key] for key in sorted(sums)]


def check_over(day: date, ledger: Ledger) -> None:
    """Raise NotAllowedInState on a day that is not over by the ledger's clock: batches may still end on it."""
    if ledger.now() < _start(day + timedelta(days=1)):
        raise NotAllowedInState(f"{day} is not over yet (UTC): its report would not be the last word")


def day_of(moment: float) -> date:
    """Return the day (UTC) of a moment."""
    return datetime.fromtimestamp(moment, UTC).date()


def _start(day: date) -> float:
    return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()


def _batch_usage(billed: Billed) -> BatchUsage:
    batch = billed.batch
    return BatchUsage(
        day=day_of(batch.ended_at or 0.0),
        customer=batch.customer,
        batch_id=batch.batch_id,
        name=batch.name,
        status=batch.status,
        requests=batch.total,
        billed=batch.completed,
        invalid=batch.invalid,
        expired=batch.expired,
        cancelled=batch.cancelled,
        failed=batch.failed,
        input_tokens=batch.input_tokens,
        cached_tokens=batch.cached_tokens,
        output_tokens=batch.output_tokens,
        cost=total_cost(billed.charges),
        models=billed.charges,
    )


def _charged_late(batch: Batch, ledger: Ledger, store: ObjectStore) -> list[Charge]:
    """Charge a batch that ended before bills were kept, at the prices in its manifest; without one at no price."""
    if not batch.models:
        # Nothing of it was valid.
        return []
    try:
        charges = [
            Charge(
                model=used.model,
                **msgspec.structs.asdict(used.usage),
                prices=used.prices,
                # Not the manifest's own sum: older ones have it as a float.
                cost=None
                if used.prices is None
                else used.prices.cost(used.usage.input_tokens, used.usage.output_tokens),
            )
            for used in read_manifest(batch, store).models
        ]
    except (NotAllowedInState, ProofFailed):
        charges = [
            Charge(
                model=lane.model,
                input_tokens=lane.input_tokens,
                cached_tokens=lane.cached_tokens,
                output_tokens=lane.output_tokens,
                prices=None,
                cost=None,
            )
            for lane in ledger.batches.lanes(batch.batch_id)
        ]
    ledger.usage.record(batch.batch_id, charges)
    return ledger.usage.of(batch.batch_id)
