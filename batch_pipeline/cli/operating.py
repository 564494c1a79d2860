"""Running the parts: worker, the embedded stack, the demo; and the configuration that counts."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click
from rich.console import Console

from batch_pipeline import ids
from batch_pipeline.cli.app import INTERRUPTED, App, pass_app, print_json
from batch_pipeline.cli.effective import masked, to_toml
from batch_pipeline.cli.progress import progress
from batch_pipeline.errors import CustomerError
from batch_pipeline.wire import codes

if TYPE_CHECKING:
    from batch_pipeline.embedded.demo import Show


@click.command()
@pass_app
def up(app: App) -> None:
    """Start the embedded stack (S3 server, HTTP service, Dagster) in the background and print its addresses."""
    from batch_pipeline.embedded.stack import Stack

    addresses = Stack(app.settings, app.config_file).up(say=_note)
    click.echo(f"Dagster UI   {addresses.dagster}")
    click.echo(f"S3           {addresses.object_store} (keys: {app.config_file or 'as configured'})")
    if addresses.api is not None:
        click.echo(f"API          {addresses.api}/v1 (`batch-pipeline customers keys add CUSTOMER` makes a key)")
    click.echo(f"drop files   {addresses.inbox}CUSTOMER/NAME.jsonl")
    click.echo(f"logs         {addresses.logs}")
    click.echo("`batch-pipeline down` stops it")


@click.command()
@pass_app
def down(app: App) -> None:
    """Stop what `up` has started. Files and databases stay."""
    from batch_pipeline.embedded.stack import Stack

    Stack(app.settings, app.config_file).down(say=_note)


@click.command()
@click.option(
    "--examples",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder with CUSTOMER/NAME.jsonl. Default: `examples` beside the configuration.",
)
@pass_app
def demo(app: App, examples: Path | None) -> int:
    """Run the example files through the whole service on this machine, and verify what comes back."""
    from batch_pipeline.embedded import demo as demonstration

    beside = app.config_file.parent if app.config_file else Path()
    # So that whoever ends the demo by a signal also ends what it has started.
    signal.signal(signal.SIGTERM, _interrupt)
    succeeded = demonstration.run(
        app.settings, app.config_file, examples or beside / "examples", TerminalScreen(app.console)
    )
    click.echo("the demo has succeeded" if succeeded else "the demo has FAILED: see PROBLEM above", err=not succeeded)
    return 0 if succeeded else 1


class TerminalScreen:
    """Shows the demo on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, line: str) -> None:
        """Print one line."""
        self._console.print(line, soft_wrap=True)

    def progress(self) -> AbstractContextManager[Show]:
        """Return what shows the batches' documents while they run."""
        return progress(self._console)


@click.command()
@click.argument("model")
@click.option("--batch", "batches", multiple=True, metavar="ID", help="Serve only this batch; may be repeated.")
@pass_app
def worker(app: App, model: str, batches: tuple[str, ...]) -> int:
    """Run a worker of MODEL in this process until there is no work for a while, or Ctrl-C.

    What it holds when it is interrupted it saves and hands back.
    """
    from batch_pipeline.worker import Ended, serve

    _check_known(app, model)
    for batch_id in batches:
        app.ledger.batches.get(batch_id)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    report = serve(app.settings, model, only_batches=batches)
    click.echo(str(report))
    return INTERRUPTED if report.ended == Ended.SIGNAL else 0


@click.command()
@click.argument("model")
@click.option("--batch", metavar="ID", help="Measure with requests of this batch. Default: with made-up ones.")
@click.option("--prompt-words", type=click.IntRange(1), default=200, show_default=True, help="Of a made-up request.")
@click.option("--answer-tokens", type=click.IntRange(1), default=64, show_default=True, help="Of a made-up request.")
@click.option("--seconds", type=click.FloatRange(0.01), default=5.0, show_default=True, help="Of a measure, at least.")
@pass_app
def calibrate(
    app: App, *, model: str, batch: str | None, prompt_words: int, answer_tokens: int, seconds: float
) -> None:
    """Find how many requests at once MODEL does best with on this machine, and keep that for its workers.

    The engine is started for it, or the one at the model's engine_url is used, which should have nothing else to do.
    Workers on such machines then use the number, unless max_in_flight is configured.
    """
    from batch_pipeline.engine import engine_for
    from batch_pipeline.engine.calibration import Search, Step
    from batch_pipeline.worker import calibrating

    _check_known(app, model)
    if batch is None:
        workload = calibrating.made_up(model, prompt_words, answer_tokens)
    else:
        workload = calibrating.of_batch(batch, model, app.ledger, app.store)
    catalogued = app.settings.models[model]
    log = Path(app.settings.embedded.data_dir) / "logs" / f"calibration-{ids.new_worker_id(model)}.log"

    def told(step: Step) -> None:
        click.echo(f"{step.in_flight:5d} at once: {step.per_second:.0f} tokens a second")

    calibration = asyncio.run(
        calibrating.calibrate(
            engine_for(model, catalogued, log, app.settings.worker.engine_url),
            model,
            workload,
            Search(),
            least_seconds=seconds,
            settings=app.settings,
            store=app.store,
            told=told,
        )
    )
    of = calibration.subject
    click.echo(f"{calibration.in_flight} at once are best: engine {of.engine_version} on {of.machine}")
    if catalogued.max_in_flight is not None:
        click.echo(f"workers keep to models.{model}.max_in_flight, which is configured", err=True)


@click.command("config")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of TOML.")
@pass_app
def show_config(app: App, as_json: bool) -> None:
    """Print the configuration that counts, with the defaults and the environment's overrides; secrets masked."""
    tables = masked(app.settings)
    if as_json:
        print_json(tables)
        return
    click.echo(f"# {app.config_file or 'no file: the defaults count'}\n")
    click.echo(to_toml(tables), nl=False)


def _note(line: str) -> None:
    click.echo(line, err=True)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _check_known(app: App, model: str) -> None:
    if model not in app.settings.models:
        known = ", ".join(app.settings.models) or "none"
        raise CustomerError(codes.MODEL_NOT_FOUND, f"no model {model!r} in the configuration; it has: {known}")


COMMANDS = (worker, calibrate, up, down, demo, show_config)
