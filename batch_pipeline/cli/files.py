"""`validate`: the same validation as of a batch, offline. Needs the configuration's catalogue and no service."""

from __future__ import annotations

from pathlib import Path

import click

from batch_pipeline.cli.app import App, pass_app, print_json
from batch_pipeline.errors import CustomerError
from batch_pipeline.intake.options import parse_endpoint
from batch_pipeline.intake.problems import LineProblem
from batch_pipeline.wire import codes


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--endpoint", required=True, help="The url that its requests name, for instance /v1/chat/completions.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of {line, custom_id, code, message}.")
@pass_app
def validate(app: App, file: Path, endpoint: str, as_json: bool) -> int:
    """Check every line of FILE and print what is wrong with each bad one. Exit status 1 where a line is bad."""
    # The tokenizer's library takes a moment to import.
    from batch_pipeline.intake.check import check_file

    if not file.is_file():
        raise CustomerError(codes.INVALID_REQUEST, f"{file} is no file: name a file of requests, one JSON object a line")
    checked = check_file(file, parse_endpoint(endpoint), app.settings)
    problems = []
    for problem in checked:
        if as_json:
            problems.append(problem)
        else:
            click.echo(_shown(problem))
    if as_json:
        print_json(problems)
    else:
        click.echo(f"{checked.total} requests: {checked.total - checked.invalid} good, {checked.invalid} bad")
    return 1 if checked.invalid else 0


def _shown(problem: LineProblem) -> str:
    who = "" if problem.custom_id is None else f" ({problem.custom_id!r})"
    return f"line {problem.line}{who}: {problem.code}: {problem.message}"


COMMANDS = (validate,)
