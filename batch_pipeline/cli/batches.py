"""`submit`, `status`, `list`, `watch`, `cancel` and `results`: a batch from its file to its results."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import click
from rich.table import Table

from batch_pipeline.cli.app import STDIN, App, pass_app, print_json
from batch_pipeline.cli.doors import Submission
from batch_pipeline.cli.progress import done, follow, moment, progress, words
from batch_pipeline.errors import CustomerError
from batch_pipeline.intake import options, submission
from batch_pipeline.ledger.records import BatchStatus
from batch_pipeline.results.status import StatusDocument
from batch_pipeline.wire import codes

_POLL_SECONDS = 1.0
_PATIENCE_SECONDS = 900.0
"""How long a service that is watched may be away."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command()
@click.argument("file")
@click.option("--customer", help="Whose batch it is. Not with --url: the key says it.")
@click.option("--name", help="What to call it; the outbox folder gets this name. Default: the file's name.")
@click.option("--endpoint", default=options.DEFAULT_ENDPOINT, show_default=True, help="The url of its requests.")
@click.option("--window", help="Time until the deadline: 90m, 24h, 7d. Default: as configured.")
@click.option("--on-invalid", type=click.Choice(["skip", "fail"]), default="skip", show_default=True)
@click.option("--share-identical", is_flag=True, help="One call of the engine for requests that are the same.")
@click.option("--metadata", multiple=True, metavar="KEY=VALUE", help="Kept with the batch; may be repeated.")
@click.option("--idempotency-key", help="Submitting again with the same key returns the same batch.")
@click.option("--wait", is_flag=True, help="Watch it until its end; the exit status is that of `watch`.")
@json_option
@pass_app
def submit(
    app: App,
    *,
    file: str,
    customer: str | None,
    name: str | None,
    endpoint: str,
    window: str | None,
    on_invalid: str,
    share_identical: bool,
    metadata: tuple[str, ...],
    idempotency_key: str | None,
    wait: bool,
    as_json: bool,
) -> int:
    """Hand in FILE, a JSONL file of requests (`-` reads stdin), and print the id of its batch."""
    with _opened(file, app) as path:
        wanted = Submission(
            file=path,
            name=name or ("stdin" if file == STDIN else path.name.removesuffix(".jsonl")),
            customer=customer,
            endpoint=endpoint,
            window=window,
            on_invalid=on_invalid,
            metadata=_pairs(metadata) | ({options.SHARE_IDENTICAL: "yes"} if share_identical else {}),
            idempotency_key=idempotency_key,
        )
        batch_id = app.door.submit(wanted)
    if not wait:
        if as_json:
            print_json(app.door.document(batch_id))
        else:
            click.echo(batch_id)
        return 0
    click.echo(batch_id, err=as_json)
    return _watch(app, batch_id, as_json)


@click.command()
@click.argument("batch_id")
@json_option
@pass_app
def status(app: App, batch_id: str, as_json: bool) -> None:
    """Print where a batch is: the document that lies in its outbox as status.json."""
    document = app.door.document(batch_id)
    if as_json:
        print_json(document)
    else:
        _show(app, document)


@click.command("list")
@click.option("--customer", help="Only this customer's.")
@click.option("--status", "only", type=click.Choice([str(status) for status in BatchStatus]), help="Only those.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@json_option
@pass_app
def list_batches(app: App, customer: str | None, only: str | None, limit: int, as_json: bool) -> None:
    """List batches, newest first: how many of their requests are answered, and how many have ended without an answer.

    Those have a line in the error file: invalid, failed, expired or cancelled.
    """
    documents = app.door.recent(customer, only, limit)
    if as_json:
        print_json(documents)
        return
    columns = ("batch", "customer", "name", "status", "answered", "not", "of", "created")
    table = Table(*columns, box=None, pad_edge=False)
    for document in documents:
        answered, total = document.counts.completed, document.request_counts.total
        counts = (str(answered), str(done(document) - answered), str(total or "?"))
        named = (document.id, document.customer, document.name, document.status)
        table.add_row(*named, *counts, moment(document.created_at))
    app.console.print(table)


@click.command()
@click.argument("batch_id")
@json_option
@pass_app
def watch(app: App, batch_id: str, as_json: bool) -> int:
    """Show a batch until its end. Exit status 0 when it has completed, 1 when it failed, expired or was cancelled."""
    return _watch(app, batch_id, as_json)


@click.command()
@click.argument("batch_id")
@pass_app
def cancel(app: App, batch_id: str) -> None:
    """Cancel a batch: what is finished is returned, the rest ends as cancelled."""
    click.echo(f"{batch_id} {app.door.cancel(batch_id)}")


@click.command()
@click.argument("batch_id")
@click.option("--to", "folder", type=click.Path(path_type=Path, file_okay=False), required=True, metavar="DIR")
@click.option("--overwrite", is_flag=True, help="Replace another batch's files in DIR.")
@pass_app
def results(app: App, batch_id: str, folder: Path, overwrite: bool) -> None:
    """Download output.jsonl, errors.jsonl and manifest.json of a finished batch into DIR.

    Each file is compared with its sha256. A DIR with a manifest.json is complete.
    """
    for file in app.door.results(batch_id, folder, overwrite=overwrite):
        click.echo(f"{file}")


def _opened(file: str, app: App) -> AbstractContextManager[Path]:
    """Return the file by its path; what comes from stdin is a file of its own for as long as it is needed."""
    if file == STDIN:
        return submission.spooled(sys.stdin.buffer, app.settings.intake)
    return nullcontext(Path(file))


def _watch(app: App, batch_id: str, as_json: bool) -> int:
    with progress(app.console if not as_json else app.error_console) as show:
        document = follow(lambda: _document(app, batch_id), show, _POLL_SECONDS)
    if as_json:
        print_json(document)
    else:
        _show(app, document)
    return 0 if document.status == BatchStatus.COMPLETED else 1


def _document(app: App, batch_id: str) -> StatusDocument:
    """Return where a batch is; wait for a service that is away: the batch goes on meanwhile."""
    from batch_pipeline.cli.remote import ServiceUnavailable

    given_up_at = time.monotonic() + _PATIENCE_SECONDS
    is_said = False
    while True:
        try:
            return app.door.document(batch_id)
        except ServiceUnavailable as error:
            if time.monotonic() >= given_up_at:
                raise
            if not is_said:
                click.echo(f"{error}; waiting for it", err=True)
                is_said = True
            time.sleep(_POLL_SECONDS)


def _show(app: App, document: StatusDocument) -> None:
    counts = document.counts
    lines = {
        "batch": document.id,
        "customer": f"{document.customer}, as {document.name}",
        "status": words(document, None),
        "requests": (
            f"{counts.total or '?'}: {counts.completed} completed, {counts.failed} failed, {counts.invalid} invalid, "
            f"{counts.expired} expired, {counts.cancelled} cancelled"
        ),
        "created": moment(document.created_at),
        "deadline": moment(document.expires_at),
    }
    if document.usage.total_tokens:
        tokens = f"{document.usage.input_tokens} in, {document.usage.output_tokens} out"
        lines["tokens"] = tokens if document.cost is None else f"{tokens}; {document.cost:.6f} USD"
    for what, text in lines.items():
        app.console.print(f"{what:<9} {text}", soft_wrap=True)
    for error in (document.errors.data if document.errors else [])[:20]:
        where = "" if error.line is None else f"line {error.line}: "
        app.console.print(f"error     {where}{error.code}: {error.message}", soft_wrap=True)


def _pairs(texts: tuple[str, ...]) -> dict[str, str]:
    pairs = dict(text.partition("=")[::2] for text in texts if "=" in text)
    if wrong := [text for text in texts if "=" not in text]:
        raise CustomerError(codes.INVALID_OPTION, f"--metadata {wrong[0]!r}: write it as KEY=VALUE")
    return pairs


COMMANDS = (submit, status, list_batches, watch, cancel, results)
