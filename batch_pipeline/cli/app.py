"""What the commands share. Nothing is opened before a command needs it, so that offline commands need no service."""

from __future__ import annotations

import os
import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.text import Text

from batch_pipeline import settings as configuration
from batch_pipeline.errors import CustomerError
from batch_pipeline.plain import printable
from batch_pipeline.wire import codes

if TYPE_CHECKING:
    from batch_pipeline.cli.doors import BatchDoor
    from batch_pipeline.ledger import Ledger
    from batch_pipeline.store import ObjectStore

FAILED = 1
CANNOT_SERVE = 3
INTERRUPTED = 130
"""Exit statuses; see `program`."""

STDIN = "-"
URL_VARIABLE = "BATCH_PIPELINE_URL"
KEY_VARIABLE = "BATCH_PIPELINE_KEY"
NARROWEST = 200
"""Columns where the output goes to a file or a pipe: rich would take 80 and cut keys and ids."""


class App:
    """The configuration, and the parts that it names."""

    def __init__(self, config: Path | None, url: str | None = None) -> None:
        self._config = config
        self._url = url

    @cached_property
    def settings(self) -> configuration.Settings:
        """The configuration. Raises SettingsError."""
        return configuration.load(self._config)

    @property
    def config_file(self) -> Path | None:
        """The file that the configuration is read from, or None where there is none and the defaults count."""
        if self._config is not None:
            return self._config
        named = os.environ.get(configuration.CONFIG_VARIABLE)
        file = Path(named or configuration.DEFAULT_FILE)
        return file if named or file.is_file() else None

    @cached_property
    def store(self) -> ObjectStore:
        """The object store."""
        from batch_pipeline.store import ObjectStore

        return ObjectStore.open(self.settings.store)

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger."""
        from batch_pipeline.ledger import Ledger

        return Ledger.from_settings(self.settings)

    @cached_property
    def door(self) -> BatchDoor:
        """The way to batches: over HTTP where a URL is given, else on ledger and store. Raises CustomerError."""
        from batch_pipeline.cli.doors import Direct
        from batch_pipeline.cli.remote import Remote

        if self._url is None:
            return Direct(self)
        key = os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise CustomerError(codes.INVALID_OPTION, f"with --url, {KEY_VARIABLE} must hold your key")
        return Remote(self._url, key)

    @cached_property
    def console(self) -> Console:
        """Where results go: stdout."""
        return make_console()

    @cached_property
    def error_console(self) -> Console:
        """Where progress goes while stdout is for a program: stderr."""
        return make_console(to_stderr=True)

    def close(self) -> None:
        """Close what was opened."""
        if "door" in self.__dict__:
            self.door.close()
        if "ledger" in self.__dict__:
            self.ledger.close()


pass_app = click.make_pass_decorator(App)
_encoder = msgspec.json.Encoder(decimal_format="number")


def make_console(*, to_stderr: bool = False) -> Console:
    """Return a console that cuts nothing off where nobody looks at it, and sees no markup in what customers sent."""
    stream = sys.stderr if to_stderr else sys.stdout
    width = None if stream.isatty() else NARROWEST
    return PlainConsole(stderr=to_stderr, width=width, highlight=False, markup=False, emoji=False)


class PlainConsole(Console):
    """A console on which nothing that it shows can act: control characters of customers and engines are escaped."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text as it is shown."""
        return super().render_str(printable(text), **options)


def print_json(value: Any) -> None:
    """Print a value as one JSON document, indented for people, on stdout and nowhere else."""
    click.echo(printable(msgspec.json.format(_encoder.encode(value), indent=2).decode()))
