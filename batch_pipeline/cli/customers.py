"""`customers`: who may use the API, with which keys and limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from batch_pipeline.cli.app import App, pass_app, print_json
from batch_pipeline.cli.batches import json_option
from batch_pipeline.cli.progress import moment

if TYPE_CHECKING:
    from collections.abc import Callable

    from batch_pipeline.ledger.customers import Customer

_LIMITS = {
    "max_requests": "Requests in one file.",
    "max_file_bytes": "Bytes of one file.",
    "max_open_batches": "Batches without a final status.",
    "max_enqueued_tokens": "Prompt tokens of one model in batches that wait or run.",
    "requests_per_minute": "Requests to the API with one key.",
}


def _limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, words in reversed(_LIMITS.items()):
        command = click.option(f"--{name.replace('_', '-')}", name, type=click.IntRange(1), help=words)(command)
    weight = "Share of a model's service where several customers wait: twice the weight, twice the tokens."
    return click.option("--weight", type=float, help=weight)(command)


@click.group("customers")
def customers() -> None:
    """Who may use the API, with which keys and limits."""


@customers.command("add")
@click.argument("customer")
@_limit_options
@pass_app
def add(app: App, /, customer: str, weight: float | None, **limits: int | None) -> None:
    """Add CUSTOMER. One that is there already is given the values that are named, and keeps the others."""
    given = {name: limit for name, limit in limits.items() if limit is not None}
    app.ledger.customers.add(customer, weight=weight, limits=given)
    click.echo(customer)


@customers.command("set")
@click.argument("customer")
@click.option("--default", "reset", multiple=True, type=click.Choice(sorted(_LIMITS)), help="Forget this own limit.")
@_limit_options
@pass_app
def change(app: App, /, customer: str, reset: tuple[str, ...], weight: float | None, **limits: int | None) -> None:
    """Change what is named of CUSTOMER."""
    changes: dict[str, int | None] = dict.fromkeys(reset)
    changes |= {name: limit for name, limit in limits.items() if limit is not None}
    _show(app, app.ledger.customers.set(customer, weight=weight, limits=changes))


@customers.command("list")
@json_option
@pass_app
def list_customers(app: App, as_json: bool) -> None:
    """List customers, also those that have only dropped files."""
    found = app.ledger.customers.all()
    if as_json:
        print_json(found)
        return
    table = Table("customer", "weight", "own limits", "since", box=None, pad_edge=False)
    for entry in found:
        own = ", ".join(f"{name} {limit}" for name, limit in entry.own_limits.items())
        table.add_row(entry.customer, f"{entry.weight:g}", own, moment(entry.created_at))
    app.console.print(table)


@customers.command("show")
@click.argument("customer")
@json_option
@pass_app
def show(app: App, customer: str, as_json: bool) -> None:
    """Print what counts for CUSTOMER, its keys, and how much of its quotas is taken."""
    found = app.ledger.customers.get(customer)
    if as_json:
        print_json(
            {
                "customer": found,
                "open_batches": app.ledger.quotas.open_batches(customer),
                "enqueued_tokens": app.ledger.quotas.enqueued(customer),
                "keys": app.ledger.customers.keys(customer),
            }
        )
    else:
        _show(app, found)


def _show(app: App, found: Customer) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_row("customer", found.customer)
    table.add_row("weight", f"{found.weight:g}")
    for name in _LIMITS:
        origin = "" if name in found.own_limits else " (as configured)"
        table.add_row(name, f"{getattr(found.limits, name)}{origin}")
    table.add_row("open batches", str(app.ledger.quotas.open_batches(found.customer)))
    for model, tokens in app.ledger.quotas.enqueued(found.customer).items():
        table.add_row(f"enqueued tokens of {model}", str(tokens))
    table.add_row("keys", str(sum(key.revoked_at is None for key in app.ledger.customers.keys(found.customer))))
    app.console.print(table)


@customers.group("keys")
def keys() -> None:
    """The keys of a customer. A key is shown once, when it is made; only its hash is kept."""


@keys.command("add")
@click.argument("customer")
@click.option("--label", default="", help="What it is for.")
@json_option
@pass_app
def add_key(app: App, customer: str, label: str, as_json: bool) -> None:
    """Make a key of CUSTOMER and print it: it cannot be shown again. A customer that is not there is added."""
    app.ledger.customers.add(customer)
    made = app.ledger.customers.add_key(customer, label)
    if as_json:
        print_json({"key": made.secret, "key_id": made.key.key_id, "customer": customer, "label": label})
    else:
        click.echo(made.secret)


@keys.command("list")
@click.argument("customer")
@json_option
@pass_app
def list_keys(app: App, customer: str, as_json: bool) -> None:
    """List the keys of CUSTOMER by their first letters."""
    found = app.ledger.customers.keys(customer)
    if as_json:
        print_json(found)
        return
    table = Table("id", "begins with", "label", "made", "revoked", box=None, pad_edge=False)
    for key in found:
        revoked = "" if key.revoked_at is None else moment(key.revoked_at)
        table.add_row(key.key_id, key.prefix, key.label, moment(key.created_at), revoked)
    app.console.print(table)


@keys.command("revoke")
@click.argument("customer")
@click.argument("key_id")
@pass_app
def revoke_key(app: App, customer: str, key_id: str) -> None:
    """Revoke a key of CUSTOMER: from the next request on it opens nothing."""
    key = app.ledger.customers.revoke_key(customer, key_id)
    click.echo(f"{key.key_id} is revoked")


COMMANDS = (customers,)
