"""What batches cost, by model: written in the transaction of a batch's final status, and never changed after that.

So the bill of a batch survives the removal of its chunks, files and manifest, and a later change of the catalogue's
prices does not reach it. Money is US dollars as exact decimals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal

import msgspec
import sqlalchemy as sa

from batch_pipeline.ledger import records, rows
from batch_pipeline.ledger.database import Database, Transaction
from batch_pipeline.ledger.schema import batches, charges
from batch_pipeline.ledger.transitions import insert_for
from batch_pipeline.models import Prices


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """What one model did for one batch: tokens of the requests that were answered, and what they cost."""

    model: str
    input_tokens: int
    cached_tokens: int
    """Of the input tokens, those that the prefix cache had: they cost as much as the others."""
    output_tokens: int
    prices: Prices | None
    """Those of the day on which the batch ended; null where the catalogue did not have the model any more."""
    cost: Decimal | None
    """In US dollars at the batch price; null where there are no prices."""


class Billed(msgspec.Struct, frozen=True, kw_only=True):
    """A final batch, and what it is charged for."""

    batch: records.Batch
    charges: list[Charge]


def total_cost(of: Iterable[Charge]) -> Decimal | None:
    """Return the sum of the costs; None where one of them is not known."""
    costs = [charge.cost for charge in of]
    known = [cost for cost in costs if cost is not None]
    return sum(known, Decimal(0)) if len(known) == len(costs) else None


def charge(tx: Transaction, batch_id: str, new: Sequence[Charge]) -> None:
    """Add a batch's charges to the transaction; those that are there already stay as they are."""
    for one in new:
        values = {
            **msgspec.structs.asdict(one),
            "prices": None if one.prices is None else rows.json(one.prices),
            "cost": None if one.cost is None else format(one.cost, "f"),
        }
        tx.connection.execute(insert_for(tx, charges).values(batch_id=batch_id, **values).on_conflict_do_nothing())


class Usage:
    """Reading the bills, and making those of batches that ended before there were any."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, batch_id: str) -> list[Charge]:
        """Return the charges of a batch, by model; none before its end."""
        with self._database.read() as tx:
            return charges_of(tx, [batch_id]).get(batch_id, [])

    def record(self, batch_id: str, new: Sequence[Charge]) -> None:
        """Charge a final batch that has no charges, all or nothing; what it has already stays as it is."""
        with self._database.write() as tx:
            charge(tx, batch_id, new)

    def ended(self, since: float, until: float, customer: str | None = None, page: int = 1000) -> Iterator[Billed]:
        """Yield batches that ended in `since <= t < until`, in the order of their ends, a page in memory at once."""
        after = (since, "")
        while True:
            is_next = (batches.c.ended_at > after[0]) | (
                (batches.c.ended_at == after[0]) & (batches.c.batch_id > after[1])
            )
            query = (
                rows.BATCH.where(batches.c.ended_at >= after[0], batches.c.ended_at < until, is_next)
                .order_by(batches.c.ended_at, batches.c.batch_id)
                .limit(page)
            )
            if customer is not None:
                query = query.where(batches.c.customer == customer)
            with self._database.read() as tx:
                found = [rows.batch(row) for row in tx.connection.execute(query)]
                charged = charges_of(tx, [batch.batch_id for batch in found])
            for batch in found:
                yield Billed(batch=batch, charges=charged.get(batch.batch_id, []))
            if len(found) < page:
                return
            after = (found[-1].ended_at or 0.0, found[-1].batch_id)


_OF_BATCHES = (
    sa.select(charges)
    .where(charges.c.batch_id.in_(sa.bindparam("batch_ids", expanding=True)))
    .order_by(charges.c.batch_id, charges.c.model)
)


def charges_of(tx: Transaction, batch_ids: Sequence[str]) -> dict[str, list[Charge]]:
    """Return the charges of batches, by model; of those that have any."""
    found: dict[str, list[Charge]] = {}
    for row in tx.connection.execute(_OF_BATCHES, {"batch_ids": batch_ids}):
        found.setdefault(row.batch_id, []).append(
            Charge(
                model=row.model,
                input_tokens=row.input_tokens,
                cached_tokens=row.cached_tokens,
                output_tokens=row.output_tokens,
                prices=None if row.prices is None else msgspec.json.decode(row.prices, type=Prices),
                cost=None if row.cost is None else Decimal(row.cost),
            )
        )
    return found
