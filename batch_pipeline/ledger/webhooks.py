"""Webhooks: where a customer wants to hear of its batches' ends, and the queue of what is to be sent.

A delivery is queued in the transaction of the final status, so none is lost and none is sent of a status that is not
there. Sending is leased by time: who takes a delivery puts it off by the lease, and what it says afterwards counts only
if nobody has taken it since. Killed after sending and before saying so, it is sent again under the same id.

    (final status) ──> due ──taken, sent──> delivered
                        ^ └── failed: due again after a pause ──> given up after the last try
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from batch_pipeline import ids
from batch_pipeline.errors import CustomerError, NotFound
from batch_pipeline.ledger.database import Database, Transaction
from batch_pipeline.ledger.schema import deliveries, is_undelivered, webhooks
from batch_pipeline.ledger.transitions import ensure_customer, insert_for
from batch_pipeline.plain import one_line
from batch_pipeline.wire import codes
from batch_pipeline.wire.webhooks import event_id, new_secret

MOST_WEBHOOKS = 20
"""Of one customer."""
MOST_AT_ONCE = 4
"""Most deliveries of one webhook that are taken together: one that does not answer holds up no other."""


class Webhook(msgspec.Struct, frozen=True, kw_only=True):
    """One address, and how it fares."""

    webhook_id: str
    customer: str
    url: str
    created_at: float
    disabled_at: float | None
    """When its receiver answered 410 (Gone): nothing is queued for it any more."""
    waiting: int = 0
    """Deliveries that are still to be sent."""
    last_error: str | None = None
    """Of those, why the newest try failed."""


class NewWebhook(NamedTuple):
    """A webhook that was just made: its secret is not shown again."""

    webhook: Webhook
    secret: str


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """One event for one webhook, taken to be sent now."""

    event_id: str
    webhook_id: str
    batch_id: str
    event: str
    event_at: float
    attempt: int
    """From 1; with it the outcome is told."""
    url: str
    secret: str


def queue_deliveries(tx: Transaction, batch_id: str, customer: str, status: str) -> None:
    """Queue the news of a batch's end for every webhook of its customer, in the transaction of the status."""
    wanted = sa.select(webhooks.c.webhook_id).where(webhooks.c.customer == customer, webhooks.c.disabled_at.is_(None))
    # None of them can be removed before this transaction is over.
    held = wanted.order_by(webhooks.c.webhook_id).with_for_update(read=True, key_share=True)
    for webhook_id in tx.connection.execute(held).scalars().all():
        values = {
            "event_id": event_id(batch_id),
            "webhook_id": webhook_id,
            "batch_id": batch_id,
            "event": f"batch.{status}",
            "event_at": tx.now,
            "due_at": tx.now,
        }
        tx.connection.execute(insert_for(tx, deliveries).values(**values).on_conflict_do_nothing())


class Webhooks:
    """Each function is one transaction: killed before its commit nothing has changed, after it all has."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, customer: str, url: str) -> NewWebhook:
        """Add an address, which the caller has checked. Raises CustomerError where the customer has too many."""
        if not ids.CUSTOMER_PATTERN.fullmatch(customer):
            raise CustomerError(codes.INVALID_NAME, f"{customer!r} can be no customer's name")
        secret = new_secret()
        with self._database.write() as tx:
            ensure_customer(tx, customer)
            count = sa.select(sa.func.count()).select_from(webhooks).where(webhooks.c.customer == customer)
            if tx.connection.execute(count).scalar_one() >= MOST_WEBHOOKS:
                raise CustomerError(codes.INVALID_OPTION, f"{customer} has {MOST_WEBHOOKS} webhooks: remove one first")
            hook = Webhook(
                webhook_id=f"wh_{ids.new_nonce()}{ids.new_nonce()}",
                customer=customer,
                url=url,
                created_at=tx.now,
                disabled_at=None,
            )
            columns = {name: getattr(hook, name) for name in ("webhook_id", "customer", "url", "created_at")}
            tx.connection.execute(webhooks.insert().values(**columns, secret=secret))
            return NewWebhook(hook, secret)

    def of(self, customer: str) -> list[Webhook]:
        """Return a customer's webhooks, the oldest first, with what waits for each."""
        waiting = (
            sa.select(deliveries.c.webhook_id, sa.func.count().label("waiting"), sa.func.max(deliveries.c.error))
            .where(is_undelivered)
            .group_by(deliveries.c.webhook_id)
        )
        query = sa.select(webhooks).where(webhooks.c.customer == customer)
        with self._database.read() as tx:
            counts = {row[0]: (int(row[1]), row[2]) for row in tx.connection.execute(waiting)}
            found = tx.connection.execute(query.order_by(webhooks.c.created_at, webhooks.c.webhook_id)).all()
        return [_webhook(row, *counts.get(row.webhook_id, (0, None))) for row in found]

    def remove(self, customer: str, webhook_id: str) -> None:
        """Forget a webhook and what waits for it. Raises NotFound, also where it is another's (I8)."""
        mine = (webhooks.c.webhook_id == webhook_id) & (webhooks.c.customer == customer)
        with self._database.write() as tx:
            locked = sa.select(webhooks.c.webhook_id).where(mine).with_for_update()
            if tx.connection.execute(locked).first() is None:
                raise NotFound(f"no webhook {webhook_id}")
            tx.connection.execute(deliveries.delete().where(deliveries.c.webhook_id == webhook_id))
            tx.connection.execute(webhooks.delete().where(mine))

    def take(self, limit: int, lease_seconds: float, busy: Collection[str] = ()) -> list[Delivery]:
        """Take deliveries that are due, those that have waited longest first, a few of each webhook and none of those
        in `busy`; nobody else takes them before the lease is over.
        """
        free = deliveries.c.webhook_id.not_in(sorted(busy))
        with self._database.read() as tx:
            if tx.connection.execute(sa.select(deliveries.c.event_id).where(*_due(tx), free).limit(1)).first() is None:
                return []
        with self._database.write() as tx:
            place = sa.func.row_number().over(partition_by=deliveries.c.webhook_id, order_by=deliveries.c.due_at)
            due = sa.select(deliveries.c.event_id, deliveries.c.webhook_id, place.label("place")).where(*_due(tx), free)
            of_each = due.subquery()
            wanted = sa.select(of_each.c.event_id, of_each.c.webhook_id).where(of_each.c.place <= MOST_AT_ONCE)
            locked = (
                sa.select(deliveries.c.event_id, deliveries.c.webhook_id)
                .where(sa.tuple_(deliveries.c.event_id, deliveries.c.webhook_id).in_(wanted), *_due(tx))
                .order_by(deliveries.c.due_at, deliveries.c.event_id, deliveries.c.webhook_id)
                .limit(limit)
                .with_for_update(skip_locked=True)
            )
            taken = [tuple(row) for row in tx.connection.execute(locked)]
            if not taken:
                return []
            these = sa.tuple_(deliveries.c.event_id, deliveries.c.webhook_id).in_(taken)
            tx.connection.execute(
                deliveries.update()
                .where(these)
                .values(due_at=tx.now + lease_seconds, attempts=deliveries.c.attempts + 1)
            )
            query = sa.select(deliveries, webhooks.c.url, webhooks.c.secret).join(
                webhooks, webhooks.c.webhook_id == deliveries.c.webhook_id
            )
            return [_delivery(row) for row in tx.connection.execute(query.where(these))]

    def delivered(self, delivery: Delivery) -> bool:
        """due -> delivered. False where somebody else has taken it since: then nothing changes."""
        with self._database.write() as tx:
            return _end(tx, delivery, ended_at=tx.now, error=None)

    def failed(self, delivery: Delivery, error: str, pause_seconds: float | None) -> bool:
        """due -> due again after a pause, or given up where there is none. False as for `delivered`."""
        said = one_line(error, 500)
        with self._database.write() as tx:
            if pause_seconds is None:
                return _end(tx, delivery, ended_at=tx.now, error=said)
            return _end(tx, delivery, due_at=tx.now + pause_seconds, error=said)

    def disable(self, delivery: Delivery, error: str) -> None:
        """Its receiver wants nothing more: give up what waits for this webhook, and queue nothing further."""
        said = one_line(error, 500)
        hook = webhooks.c.webhook_id == delivery.webhook_id
        with self._database.write() as tx:
            tx.connection.execute(
                webhooks.update().where(hook, webhooks.c.disabled_at.is_(None)).values(disabled_at=tx.now)
            )
            of_hook = deliveries.c.webhook_id == delivery.webhook_id
            tx.connection.execute(
                deliveries.update().where(of_hook, is_undelivered).values(ended_at=tx.now, error=said)
            )

    def forget(self, older_than_seconds: float) -> int:
        """Delete deliveries that ended so long ago; returns how many."""
        with self._database.write() as tx:
            over = deliveries.c.ended_at < tx.now - older_than_seconds
            return int(tx.connection.execute(deliveries.delete().where(over)).rowcount)


def _due(tx: Transaction) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    return is_undelivered, deliveries.c.due_at <= tx.now


def _end(tx: Transaction, delivery: Delivery, **values: Any) -> bool:
    mine = (deliveries.c.event_id == delivery.event_id) & (deliveries.c.webhook_id == delivery.webhook_id)
    newest = deliveries.c.attempts == delivery.attempt
    return bool(
        tx.connection.execute(deliveries.update().where(mine, newest, is_undelivered).values(**values)).rowcount
    )


def _delivery(row: Any) -> Delivery:
    return Delivery(
        event_id=row.event_id,
        webhook_id=row.webhook_id,
        batch_id=row.batch_id,
        event=row.event,
        event_at=row.event_at,
        attempt=row.attempts,
        url=row.url,
        secret=row.secret,
    )


def _webhook(row: Any, waiting: int, last_error: str | None) -> Webhook:
    return Webhook(
        webhook_id=row.webhook_id,
        customer=row.customer,
        url=row.url,
        created_at=row.created_at,
        disabled_at=row.disabled_at,
        waiting=waiting,
        last_error=last_error,
    )
