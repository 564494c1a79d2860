"""`housekeeping`: remove what is over, or say what would be removed."""

from __future__ import annotations

import click
from rich.table import Table

from batch_pipeline.cli.app import App, pass_app, print_json
from batch_pipeline.cli.batches import json_option
from batch_pipeline.housekeeping import Report, Step, tidy

_SHOWN = 100


@click.command()
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@json_option
@pass_app
def housekeeping(app: App, dry_run: bool, as_json: bool) -> int:
    """Remove what is over, as the section [retention] of the configuration says.

    Chunk rows whose batch is final, objects that no final file needs, expired files, uploads that never became a batch.
    Dagster's partitions are removed by the job of the same name. Exit status 1 where the object store failed.
    """
    report = tidy(ledger=app.ledger, store=app.store, settings=app.settings, dry_run=dry_run)
    if as_json:
        print_json({"dry_run": dry_run, "report": report})
    else:
        _show(app, report, dry_run=dry_run)
    return 1 if report.failures else 0


def _show(app: App, report: Report, *, dry_run: bool) -> None:
    if report.removals:
        table = Table("step", "of", "objects", "bytes", "rows", box=None, pad_edge=False)
        for removal in report.removals[:_SHOWN]:
            cells = (removal.step, removal.subject, removal.objects, removal.bytes, removal.rows)
            table.add_row(*map(str, cells))
        app.console.print(table)
        if len(report.removals) > _SHOWN:
            app.console.print(f"{len(report.removals) - _SHOWN} more: --json prints them all")
    for step in Step:
        found = report.of(step)
        if found:
            objects, rows = sum(entry.objects for entry in found), sum(entry.rows for entry in found)
            done = "would be removed" if dry_run else "removed"
            click.echo(f"{step}: {len(found)} ({objects} objects, {rows} rows) {done}")
    if not report.removals:
        click.echo("nothing to remove was found in what could be looked at" if report.failures else "nothing to remove")
    for batch_id, why in report.held.items():
        click.echo(f"kept {batch_id}: {why}", err=True)
    for failure in report.failures:
        click.echo(f"failed: {failure}", err=True)


COMMANDS = (housekeeping,)
