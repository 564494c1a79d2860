"""`usage`: what customers are charged for, and what was not billed and why."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal

import click
from rich.table import Table

from batch_pipeline.cli.app import App, pass_app, print_json
from batch_pipeline.cli.batches import json_option
from batch_pipeline.results.usage import BatchUsage, CustomerDay, by_customer, day_of
from batch_pipeline.results.usage import usage as used

_DAY = click.DateTime(["%Y-%m-%d"])
_COUNTS = ("requests", "billed", "invalid", "expired", "cancelled", "failed")
_TOKENS = ("input_tokens", "cached_tokens", "output_tokens")


@click.command()
@click.option("--customer", help="Only this customer's.")
@click.option(
    "--from", "first", type=_DAY, metavar="DAY", help="First day (UTC), as 2026-11-29. Default: this month's."
)
@click.option("--to", "last", type=_DAY, metavar="DAY", help="Last day, included. Default: today.")
@click.option("--batches", "each", is_flag=True, help="Show each batch as well.")
@json_option
@pass_app
def usage(
    app: App, *, customer: str | None, first: datetime | None, last: datetime | None, each: bool, as_json: bool
) -> None:
    """Print tokens and price by customer and day, and how many requests were not billed and why.

    A batch counts on the day on which it ended. Prices are US dollars, exact, less the batch discount; requests without
    a response (invalid, expired, cancelled, failed) cost nothing.
    """
    today = day_of(app.ledger.now())
    until = today if last is None else last.replace(tzinfo=UTC).date()
    since = until.replace(day=1) if first is None else first.replace(tzinfo=UTC).date()
    if since > until:
        raise click.UsageError(f"--from {since} is after --to {until}")
    kept: list[BatchUsage] = []
    days = by_customer(_kept(app, since, until, customer, kept if each else None))
    cost = sum((day.cost for day in days), Decimal(0))
    if as_json:
        document = {"from": since, "to": until, "customers": days, "cost": cost}
        print_json({**document, "batches": kept} if each else document)
        return
    if each:
        _show_batches(app, kept)
    _show_days(app, days)
    click.echo(f"{since} to {until}: {sum(day.batches for day in days)} batches, {cost:f} USD")
    unpriced = sum(day.unpriced for day in days)
    if unpriced:
        click.echo(
            f"{unpriced} batches have no price: the catalogue had none for their model when they ended", err=True
        )


def _kept(
    app: App, first: date, last: date, customer: str | None, kept: list[BatchUsage] | None
) -> Iterator[BatchUsage]:
    for batch in used(app.ledger, app.store, first=first, last=last, customer=customer):
        if kept is not None:
            kept.append(batch)
        yield batch


def _show_days(app: App, days: list[CustomerDay]) -> None:
    table = Table("day", "customer", "batches", *_COUNTS, *_TOKENS, "USD", box=None, pad_edge=False)
    for day in days:
        cells = [getattr(day, name) for name in ("day", "customer", "batches", *_COUNTS, *_TOKENS)]
        table.add_row(*map(str, cells), f"{day.cost:f}")
    app.console.print(table)


def _show_batches(app: App, batches: list[BatchUsage]) -> None:
    table = Table("day", "customer", "batch", "status", *_COUNTS, *_TOKENS, "USD", box=None, pad_edge=False)
    for batch in batches:
        cells = [getattr(batch, name) for name in ("day", "customer", "batch_id", "status", *_COUNTS, *_TOKENS)]
        table.add_row(*map(str, cells), "unknown" if batch.cost is None else f"{batch.cost:f}")
    app.console.print(table)
    app.console.print()


COMMANDS = (usage,)
