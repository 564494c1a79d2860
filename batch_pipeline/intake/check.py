"""The same validation without a service: what `batch-pipeline validate` prints."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from batch_pipeline.intake.problems import LineProblem
from batch_pipeline.intake.scan import Scan
from batch_pipeline.ledger.records import BatchError
from batch_pipeline.settings import Settings

_BLOCK_BYTES = 512 * 1024


class FileReport:
    """What is in a file: iterate over it for the problems, in the order of their lines, as often as needed."""

    def __init__(self, source: Path | BinaryIO, endpoint: str, settings: Settings) -> None:
        folder = Path(tempfile.mkdtemp(prefix="batch-pipeline-check-"))
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        size = source.stat().st_size if isinstance(source, Path) else None
        self._scan = Scan(settings, endpoint, folder, size)
        if isinstance(source, Path):
            with source.open("rb") as file, source.open("rb") as again:
                summary = self._scan.run(_blocks(file), again, fill=False)
        else:
            with (folder / "input.jsonl").open("w+b") as copy:
                summary = self._scan.run(_blocks(source), copy, fill=True)
        self.total = summary.total
        """Requests: lines that are not blank."""
        self.invalid = summary.invalid
        self.errors: list[BatchError] = [error for error in summary.errors if error.line is None]
        """What is wrong with the file as a whole: it is empty, or has too many requests."""

    def __iter__(self) -> Iterator[LineProblem]:
        # A generator of its own keeps this report, and with it the files, alive while it is read.
        yield from self._scan.read_problems()


def check_file(source: Path | BinaryIO, endpoint: str, settings: Settings) -> FileReport:
    """Check a file, or a stream such as standard input, against an endpoint and the configured models.

    Nothing is sent anywhere. Raises OSError where the file cannot be read.
    """
    return FileReport(source, endpoint, settings)


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(_BLOCK_BYTES):
        yield block
