"""What a customer may have at once: batches that wait or run, and enqueued tokens of each model.

A batch takes the prompt tokens of its valid requests when its intake is recorded, and gives them back when nothing of
it waits or runs any more (finalizing), at a cancel, and at its deadline: each in the transaction that changes the
status, so that a status and the quota behind it are never apart. What a batch holds is in its own row (`enqueued`), and
`quotas` keeps the sums; `recount` makes them from the rows. Work on single chunks touches neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from batch_pipeline.errors import LimitReached
from batch_pipeline.ledger import rows
from batch_pipeline.ledger.customers import limits_in
from batch_pipeline.ledger.database import Database, Transaction
from batch_pipeline.ledger.records import BatchError
from batch_pipeline.ledger.schema import batches, customers, is_open, is_undecided, quotas
from batch_pipeline.ledger.transitions import HOLDS_NOTHING, add_to_quotas, held_by, insert_for
from batch_pipeline.settings import Limits
from batch_pipeline.wire import codes


def check_open_batches(tx: Transaction, customer: Any, defaults: Limits) -> None:
    """Raise LimitReached where a customer, whose row is locked, may not have one more open batch."""
    most = limits_in(customer, defaults).max_open_batches
    there = _open_batches(tx, customer.customer)
    if there >= most:
        raise LimitReached(
            codes.BATCH_LIMIT_EXCEEDED,
            f"{customer.customer} has {there} batches that wait or run, and may have {most} at once: "
            "submit this one when one of them has ended, or cancel one",
        )


def take(tx: Transaction, customer: str, wanted: Mapping[str, int], defaults: Limits) -> list[BatchError]:
    """Count prompt tokens by model as the customer's, all or none; return what forbids it, nothing where it is done."""
    row = tx.connection.execute(sa.select(customers).where(customers.c.customer == customer)).one_or_none()
    most = (defaults if row is None else limits_in(row, defaults)).max_enqueued_tokens
    held = {model: _lock(tx, customer, model) for model in sorted(wanted)}
    errors = [
        BatchError(
            codes.TOKEN_LIMIT_EXCEEDED,
            f"Enqueued token limit reached for {model}: {customer} may have {most} tokens enqueued, {held[model]} are, "
            f"and this batch has {tokens}. "
            + (
                "Submit it again when other batches have ended."
                if tokens <= most
                else "It is larger than the whole limit: divide it."
            ),
        )
        for model, tokens in sorted(wanted.items())
        if held[model] + tokens > most
    ]
    if not errors:
        add_to_quotas(tx, customer, wanted, 1)
    return errors


def as_column(tokens: Mapping[str, int]) -> str:
    """Return the column `enqueued` of a batch that holds these."""
    return rows.json(dict(sorted(tokens.items())))


def _open_batches(tx: Transaction, customer: str) -> int:
    # One that is cancelled or past its deadline has made room already: what is left of it is only to be handed out.
    mine = (batches.c.customer == customer, is_open, is_undecided)
    return int(tx.connection.execute(sa.select(sa.func.count()).select_from(batches).where(*mine)).scalar_one())


def _lock(tx: Transaction, customer: str, model: str) -> int:
    """Return the sum of one quota, its row made where it is missing, and locked until the end of the transaction."""
    tx.connection.execute(
        insert_for(tx, quotas).values(customer=customer, model=model, tokens=0).on_conflict_do_nothing()
    )
    one = (quotas.c.customer == customer) & (quotas.c.model == model)
    return int(tx.connection.execute(sa.select(quotas.c.tokens).where(one).with_for_update()).scalar_one())


class Quotas:
    """Reading what is taken."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def open_batches(self, customer: str) -> int:
        """Return how many of a customer's batches count for `max_open_batches`."""
        with self._database.read() as tx:
            return _open_batches(tx, customer)

    def enqueued(self, customer: str) -> dict[str, int]:
        """Return the tokens by model that a customer's batches hold; only what is above 0."""
        return {model: tokens for (owner, model), tokens in self.kept().items() if owner == customer}

    def kept(self) -> dict[tuple[str, str], int]:
        """Return the sums as they are kept, by customer and model; only what is not 0."""
        with self._database.read() as tx:
            found = tx.connection.execute(sa.select(quotas).where(quotas.c.tokens != 0))
            return {(row.customer, row.model): int(row.tokens) for row in found}

    def recount(self) -> dict[tuple[str, str], int]:
        """Return the sums as the open batches' rows make them; only what is not 0."""
        sums: Counter[tuple[str, str]] = Counter()
        query = sa.select(batches.c.customer, batches.c.enqueued).where(is_open, batches.c.enqueued != HOLDS_NOTHING)
        with self._database.read() as tx:
            for row in tx.connection.execute(query):
                sums.update({(row.customer, model): tokens for model, tokens in held_by(row).items()})
        return {key: tokens for key, tokens in sums.items() if tokens}
