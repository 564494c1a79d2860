"""`validate`: the same validation as of a batch, offline. Needs the configuration's catalogue and no service."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from batch_pipeline.cli.app import FAILED, STDIN, App, pass_app, print_json
from batch_pipeline.intake.options import parse_endpoint
from batch_pipeline.intake.problems import LineProblem
from batch_pipeline.intake.submission import check_is_file


@click.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--endpoint", required=True, help="The url that its requests name, for instance /v1/chat/completions.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of {line, custom_id, code, message}.")
@pass_app
def validate(app: App, file: Path, endpoint: str, as_json: bool) -> int:
    """Check every line of FILE (`-` reads stdin) and print what is wrong with each bad one.

    Needs no service. Exit status 1 where a line is bad, or the file as a whole cannot be a batch.
    """
    # The tokenizer's library takes a moment to import.
    from batch_pipeline.intake.check import check_file

    if str(file) != STDIN:
        check_is_file(file)
    source = sys.stdin.buffer if str(file) == STDIN else file
    report = check_file(source, parse_endpoint(endpoint), app.settings)
    if as_json:
        of_the_file = [_Problem(None, None, error.code, error.message) for error in report.errors]
        print_json([*report, *of_the_file])
    else:
        for problem in report:
            click.echo(_shown(problem))
        for error in report.errors:
            click.echo(f"the file: {error.code}: {error.message}")
        click.echo(f"{report.total} requests: {report.total - report.invalid} good, {report.invalid} bad")
    return FAILED if report.invalid or report.errors else 0


class _Problem(msgspec.Struct, frozen=True):
    """What is wrong with the file as a whole, in the form of a line's problem."""

    line: int | None
    custom_id: str | None
    code: str
    message: str


def _shown(problem: LineProblem) -> str:
    who = "" if problem.custom_id is None else f" ({problem.custom_id!r})"
    return f"line {problem.line}{who}: {problem.code}: {problem.message}"


COMMANDS = (validate,)
