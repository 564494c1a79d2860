"""How batches that run are shown: a bar each on a terminal, elsewhere a line for each change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from batch_pipeline.ledger.records import BatchStatus
from batch_pipeline.results.status import StatusDocument

if TYPE_CHECKING:
    from batch_pipeline.embedded.demo import Show

_RUNNING = "in_progress"


@contextmanager
def progress(console: Console) -> Iterator[Show]:
    """Yield what shows the documents of the batches, as often as it is called with newer ones."""
    if not console.is_terminal:
        yield Lines(lambda line: console.print(line, soft_wrap=True)).show
        return
    columns = (
        TextColumn("{task.fields[label]}", markup=False),
        BarColumn(bar_width=20, table_column=Column(no_wrap=True, min_width=20)),
        TextColumn("{task.completed:.0f}/{task.fields[known_total]}", markup=False),
        # The only one that may wrap: on a narrow terminal a long reason takes two lines, and nothing is cut off.
        TextColumn("{task.fields[words]}", markup=False, table_column=Column(no_wrap=False)),
    )
    with Progress(*columns, console=console) as bars:
        yield Bars(bars).show


class Bars:
    """One bar for each batch, on a terminal."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._paces: dict[str, Pace] = {}

    def show(self, documents: Sequence[StatusDocument]) -> None:
        """Bring the bars up to date."""
        for document in documents:
            pace = self._paces.setdefault(document.id, Pace())
            if document.id not in self._tasks:
                self._tasks[document.id] = self._bars.add_task(
                    "", total=None, label=label(document), known_total="?", words=""
                )
            total = document.request_counts.total
            self._bars.update(
                self._tasks[document.id],
                total=total or None,
                completed=done(document),
                known_total=str(total) if total else "?",
                words=words(document, pace.rate(document)),
            )


class Lines:
    """One line for each change: of status, of the count, of the reason."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._shown: dict[str, tuple[str, int, str | None]] = {}
        self._paces: dict[str, Pace] = {}

    def show(self, documents: Sequence[StatusDocument]) -> None:
        """Write what has changed since the last call."""
        for document in documents:
            rate = self._paces.setdefault(document.id, Pace()).rate(document)
            state = (document.status, done(document), document.reason)
            if self._shown.get(document.id) == state:
                continue
            self._shown[document.id] = state
            total = document.request_counts.total
            count = f"{done(document)}/{total or '?'}"
            self._write(f"{label(document)}  {count}  {words(document, rate)}")


class Pace:
    """Requests a second since the last look at which none had been run: the engine's start does not count."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def rate(self, document: StatusDocument) -> float | None:
        """Return the rate up to this document, or None before there is one."""
        at, count = document.as_of, document.counts.completed + document.counts.failed
        if self._first is None or count == 0:
            self._first = (at, count)
        since, before = self._first
        return (count - before) / (at - since) if at > since and count > before else None


def label(document: StatusDocument) -> str:
    """Return how a batch is called in front of its bar."""
    return f"{document.customer}/{document.name}"


def done(document: StatusDocument) -> int:
    """Return how many requests of a batch have an end, whichever it is."""
    return document.counts.ended


def words(document: StatusDocument, rate: float | None) -> str:
    """Return a batch's status, what it waits for, its rate and when it will be done, in one line."""
    parts = [document.status]
    if document.reason:
        parts.append(document.reason)
    if rate is not None and document.status == _RUNNING:
        parts.append(f"{rate:.2g} requests/s")
    if document.estimated_finish_at is not None and document.status == _RUNNING:
        parts.append(f"done in about {duration(document.estimated_finish_at - document.as_of)}")
    if document.warning is not None:
        parts.append(document.warning)
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return a duration in the two largest units that matter: 45 s, 3 min, 2 h 10 min, 3 d 4 h."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86_400
    if hours < 1:
        return f"{minutes} min"
    if days < 1:
        return f"{hours} h {minutes % 60} min"
    return f"{days} d {hours % 24} h"


def moment(seconds: float | None) -> str:
    """Return a time as UTC, or a dash where there is none."""
    return "-" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def follow(
    read: Callable[[], StatusDocument], show: Show, poll_seconds: float, sleep: Callable[[float], None] = time.sleep
) -> StatusDocument:
    """Show a batch until its status is final; return that document. The ledger tells nobody of changes: it is asked."""
    while True:
        document = read()
        show([document])
        if BatchStatus(document.status).is_final:
            return document
        sleep(poll_seconds)
