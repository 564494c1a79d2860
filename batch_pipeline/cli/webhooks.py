"""`customers webhooks`: where a customer is told of its batches' ends."""

from __future__ import annotations

import click
from rich.table import Table

from batch_pipeline.cli.app import App, pass_app, print_json
from batch_pipeline.cli.batches import json_option
from batch_pipeline.cli.progress import moment
from batch_pipeline.errors import CustomerError
from batch_pipeline.wire import codes
from batch_pipeline.wire.webhooks import url_problem


@click.group("webhooks")
def webhooks() -> None:
    """Where a customer is told of its batches' ends. The service (`serve`) sends, signed as Standard Webhooks says."""


@webhooks.command("add")
@click.argument("customer")
@click.argument("url")
@json_option
@pass_app
def add(app: App, customer: str, url: str, as_json: bool) -> None:
    """Send the ends of CUSTOMER's batches to URL from now on, and print the secret under which they are signed.

    The secret cannot be shown again. Verify with it what comes: `client.webhooks.unwrap` of the openai SDK does.
    """
    problem = url_problem(url, allow_private=app.settings.webhooks.allow_private_addresses)
    if problem is not None:
        raise CustomerError(codes.INVALID_OPTION, f"{url}: {problem}")
    made = app.ledger.webhooks.add(customer, url)
    if as_json:
        print_json({"webhook": made.webhook, "secret": made.secret})
        return
    click.echo(made.secret)


@webhooks.command("list")
@click.argument("customer")
@json_option
@pass_app
def list_webhooks(app: App, customer: str, as_json: bool) -> None:
    """List the webhooks of CUSTOMER, and what waits to be sent to each."""
    found = app.ledger.webhooks.of(customer)
    if as_json:
        print_json(found)
        return
    table = Table("id", "url", "made", "waiting", "last error", box=None, pad_edge=False)
    for hook in found:
        trouble = "wants nothing more" if hook.disabled_at is not None else hook.last_error or ""
        table.add_row(hook.webhook_id, hook.url, moment(hook.created_at), str(hook.waiting), trouble)
    app.console.print(table)


@webhooks.command("remove")
@click.argument("customer")
@click.argument("webhook_id")
@pass_app
def remove(app: App, customer: str, webhook_id: str) -> None:
    """Send nothing more to a webhook of CUSTOMER, not even what waits."""
    app.ledger.webhooks.remove(customer, webhook_id)
    click.echo(f"{webhook_id} is removed")
