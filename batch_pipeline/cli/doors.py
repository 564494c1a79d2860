"""What the commands of a batch do, whichever way they reach it: here on ledger and store, or over HTTP (`remote`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import click

from batch_pipeline.intake import options, submission
from batch_pipeline.ledger.records import BatchStatus, Door
from batch_pipeline.results import collect, outbox
from batch_pipeline.results.status import StatusDocument, current_status

if TYPE_CHECKING:
    from batch_pipeline.cli.app import App


class Submission(NamedTuple):
    """A file to hand in, and what is asked for with it."""

    file: Path
    name: str
    customer: str | None
    endpoint: str
    window: str | None
    on_invalid: str
    metadata: dict[str, str]
    idempotency_key: str | None


class BatchDoor(Protocol):
    """A way to the batches. Every call raises CustomerError for what cannot be done."""

    def submit(self, wanted: Submission) -> str:
        """Make a batch of a file; return its id. The same idempotency key gives the same batch."""

    def document(self, batch_id: str) -> StatusDocument:
        """Return where a batch is."""

    def recent(self, customer: str | None, status: str | None, limit: int) -> list[StatusDocument]:
        """Return batches, newest first."""

    def cancel(self, batch_id: str) -> str:
        """Cancel a batch; return its status."""

    def results(self, batch_id: str, folder: Path, *, overwrite: bool) -> list[Path]:
        """Bring a batch's files into a folder, and compare each with its hash."""

    def close(self) -> None:
        """Let go of what only this door has opened."""


class Direct:
    """On the ledger and the store of the configuration."""

    def __init__(self, app: App) -> None:
        self._app = app

    def submit(self, wanted: Submission) -> str:
        """Make a batch of a file; return its id."""
        if wanted.customer is None:
            raise click.UsageError("Missing option '--customer': whose batch it is.", click.get_current_context())
        app = self._app
        chosen = options.choose(
            app.settings.intake,
            endpoint=wanted.endpoint,
            window=wanted.window,
            on_invalid=wanted.on_invalid,
            metadata=wanted.metadata,
        )
        submitted = submission.submit(
            wanted.file,
            customer=wanted.customer,
            name=wanted.name,
            door=Door.CLI,
            options=chosen,
            idempotency_key=wanted.idempotency_key,
            ledger=app.ledger,
            store=app.store,
            settings=app.settings,
        )
        return submitted.batch.batch_id

    def document(self, batch_id: str) -> StatusDocument:
        """Return where a batch is."""
        return current_status(batch_id, ledger=self._app.ledger, settings=self._app.settings)

    def recent(self, customer: str | None, status: str | None, limit: int) -> list[StatusDocument]:
        """Return batches, newest first."""
        statuses = [BatchStatus(status)] if status else []
        found = self._app.ledger.batches.recent(customer=customer, statuses=statuses, limit=limit)
        return [self.document(batch.batch_id) for batch in found]

    def cancel(self, batch_id: str) -> str:
        """Cancel a batch; return its status."""
        app = self._app
        batch = app.ledger.batches.cancel(batch_id, actor="cli")
        outbox.publish_status(batch_id, ledger=app.ledger, store=app.store, settings=app.settings)
        return batch.status

    def results(self, batch_id: str, folder: Path, *, overwrite: bool) -> list[Path]:
        """Bring a batch's files into a folder."""
        batch = self._app.ledger.batches.get(batch_id)
        return collect.collect(batch, folder, self._app.store, overwrite=overwrite).files

    def close(self) -> None:
        """Nothing: the parts are the command line's."""
