"""`verify` and `audit`: what is proved of a batch, and where each of its results comes from."""

from __future__ import annotations

import click
from rich.table import Table

from batch_pipeline.cli.app import App, pass_app, print_json
from batch_pipeline.results.findings import KEPT_PROBLEMS
from batch_pipeline.results.verify import Proof
from batch_pipeline.results.verify import verify as prove


@click.command()
@click.argument("batch_id")
@click.option("--json", "as_json", is_flag=True, help="Print the proof as JSON.")
@pass_app
def verify(app: App, batch_id: str, as_json: bool) -> int:
    """Prove that a finished batch has exactly one result for each request.

    Counts the files themselves: the input against the output and error file, and both against manifest and ledger. Exit
    status 1 where the proof fails.
    """
    proof = prove(batch_id, ledger=app.ledger, store=app.store)
    if as_json:
        print_json(proof)
    else:
        _show(app, proof)
    return 0 if proof.holds else 1


def _show(app: App, proof: Proof) -> None:
    table = Table("finding", "verdict", box=None, pad_edge=False)
    for finding, verdict in proof.verdicts.items():
        table.add_row(finding, "proved" if verdict.holds else f"{verdict.count} problems")
    counts = proof.counted.counts
    app.console.print(f"{proof.batch_id}  {proof.status}")
    app.console.print(table)
    app.console.print(
        f"counted: {counts.total} requests = {counts.completed} completed, {counts.failed} failed, "
        f"{counts.expired} expired, {counts.cancelled} cancelled, {counts.invalid} invalid"
    )
    for problem in proof.problems:
        click.echo(f"problem: {problem}", err=True)
    if proof.problem_count > len(proof.problems):
        click.echo(f"{proof.problem_count} problems; at most {KEPT_PROBLEMS} of each finding are shown", err=True)


COMMANDS = (verify,)
