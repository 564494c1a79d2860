"""The group of commands, and what becomes of errors.

Exit statuses: 0 done; 1 what was asked for cannot be done, or has failed (a customer's mistake, a batch that did not
complete, a proof that failed); 2 the command line is wrong; 3 the service is configured wrongly or a part of it cannot
be reached; 130 Ctrl-C.

A mistake or an outage is one line on stderr, `error: ...`. A traceback is only ever a fault of the program itself.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from click.core import ParameterSource

from batch_pipeline.cli import (
    batches,
    billing,
    customers,
    doctor,
    files,
    operating,
    proofs,
    serving,
    simulating,
    tidying,
    webhooks,
)
from batch_pipeline.cli.app import CANNOT_SERVE, FAILED, INTERRUPTED, KEY_VARIABLE, URL_VARIABLE, App
from batch_pipeline.errors import BatchPipelineError, CustomerError, ProofFailed, StoreError
from batch_pipeline.plain import printable


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The configuration. Default: the file named by BATCH_PIPELINE_CONFIG, else batch-pipeline.toml here.",
)
@click.option(
    "--url",
    envvar=URL_VARIABLE,
    metavar="URL",
    help="submit, status, list, watch, cancel and results go to the HTTP service there, with the key in "
    f"{KEY_VARIABLE}. Default: {URL_VARIABLE}, else straight to ledger and store.",
)
@click.version_option(package_name="batch-pipeline")
@click.pass_context
def commands(context: click.Context, config: Path | None, url: str | None) -> None:
    """Batch inference: files of LLM requests in, exactly one result per request out."""
    invoked = context.invoked_subcommand
    if url and invoked not in {command.name for command in batches.COMMANDS}:
        if context.get_parameter_source("url") is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--url: {invoked} does not go over HTTP; leave it out")
        if invoked in {command.name for command in (*proofs.COMMANDS, *billing.COMMANDS)}:
            # It would look for the batch in a ledger that is here by chance.
            raise click.UsageError(f"{URL_VARIABLE} is set, and {invoked} does not go over HTTP; unset it")
    app = App(config, url or None)
    context.obj = app
    context.call_on_close(app.close)


for module in (batches, files, proofs, billing, operating, tidying, serving, customers, doctor, simulating):
    for command in module.COMMANDS:
        commands.add_command(command)
customers.customers.add_command(webhooks.webhooks)

_HINT = "`batch-pipeline doctor` looks at every part"


def main() -> None:
    """Run the command line of this process and end it."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit status."""
    try:
        ended = commands.main(arguments, prog_name="batch-pipeline", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head`). Python flushes stdout once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if isinstance(error, UnicodeEncodeError) and error.object in arguments:
            click.echo(f"error: {printable(error.object)}: the argument is not UTF-8", err=True)
            return FAILED
        status = _status(error)
        if status is None:
            raise
        click.echo(f"error: {printable(_message(error))}", err=True)
        return status
    return ended if isinstance(ended, int) else 0


def _status(error: Exception) -> int | None:
    """Return the exit status that an error stands for; None where it is a fault of the program."""
    if isinstance(error, CustomerError | ProofFailed | OSError):
        return FAILED
    if isinstance(error, BatchPipelineError) or _is_outage(error):
        return CANNOT_SERVE
    return None


def _message(error: Exception) -> str:
    if isinstance(error, StoreError):
        return f"{error}; {_HINT}"
    if not _is_outage(error):
        return str(error)
    said = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
    return f"the ledger cannot be used: {said.splitlines()[0]}; {_HINT}"


def _is_outage(error: Exception) -> bool:
    """Return whether this is the database's word that it cannot be used."""
    if "sqlalchemy" not in sys.modules:
        return False
    from sqlalchemy import exc

    # What is none of its special kinds: SQLite says so of a file that is no database, or a damaged one.
    is_unusable = type(error) is exc.DatabaseError
    return is_unusable or isinstance(error, exc.OperationalError | exc.InterfaceError | exc.TimeoutError)
