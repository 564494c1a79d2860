"""One bounded run of housekeeping."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from batch_pipeline.errors import ProofFailed, StoreError
from batch_pipeline.housekeeping import api_files, objects
from batch_pipeline.housekeeping.archive import archive
from batch_pipeline.housekeeping.policy import Removal, Step, cutoffs
from batch_pipeline.intake import spool
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore

_MOST_FAILURES = 3

_log = logging.getLogger(__name__)


class Report(msgspec.Struct, kw_only=True):
    """What one run did, or in a dry run would do."""

    removals: list[Removal] = []
    held: dict[str, str] = {}
    """Batches of which something had to go and was kept, and what stands against it: somebody should look."""
    failures: list[str] = []
    """Where the store could not be used; the next run tries again."""

    def of(self, step: Step) -> list[Removal]:
        """Return the removals of one step."""
        return [removal for removal in self.removals if removal.step == step]


def tidy(
    *,
    ledger: Ledger,
    store: ObjectStore,
    settings: Settings,
    dry_run: bool = False,
    clock: Callable[[], float] = time.time,
    chance: random.Random | None = None,
) -> Report:
    """Remove what is over, at most `retention.per_run` batches in each step; in a dry run change nothing.

    Killed anywhere: what was begun is gone on with by the next run. A batch that is not what the ledger says is held
    and reported; where the store fails for one batch the others go on, until it has failed a few times. `clock` is
    compared with the ages of objects, in UTC seconds. Raises SQLAlchemy's OperationalError where the ledger is away.
    """
    run = _Run(ledger, store, settings, dry_run=dry_run, now=clock(), chance=chance or random.SystemRandom())
    for step in (run.archive, run.remove_files, run.remove_work, run.remove_others, run.remove_api_files):
        try:
            step()
        except _StoreAway:
            break
    if not dry_run:
        spool.sweep(Path(settings.intake.scratch_dir))
    return run.report


class _StoreAway(Exception):
    """The store has failed so often that the run ends here."""


class _Run:
    def __init__(
        self,
        ledger: Ledger,
        store: ObjectStore,
        settings: Settings,
        *,
        dry_run: bool,
        now: float,
        chance: random.Random,
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._retention = settings.retention
        self._dry_run = dry_run
        self._now = now
        self._chance = chance
        self._limit = settings.retention.per_run
        self._cutoffs = cutoffs(settings.retention, ledger.now())
        self.report = Report()

    def archive(self) -> None:
        """Let chunks leave the ledger."""
        for batch in self._ledger.retention.to_archive(self._cutoffs.archive, self._limit):
            self._do(batch, lambda batch: archive(batch, ledger=self._ledger, store=self._store, dry_run=self._dry_run))

    def remove_work(self) -> None:
        """Delete what files were made from."""
        for batch in self._ledger.retention.with_work(self._cutoffs.work, self._limit):
            self._do(
                batch,
                lambda batch: objects.remove_work(
                    batch,
                    ledger=self._ledger,
                    store=self._store,
                    rebuilt_before=self._age(self._retention.orphans_hours),
                    dry_run=self._dry_run,
                ),
            )

    def remove_files(self) -> None:
        """Delete files that have been kept long enough."""
        for batch in self._ledger.retention.with_objects(self._cutoffs.files, self._limit):
            self._do(
                batch,
                lambda batch: objects.remove_files(
                    batch,
                    ledger=self._ledger,
                    store=self._store,
                    answers_before=self._age(self._retention.files_days * 24),
                    dry_run=self._dry_run,
                ),
            )

    def remove_others(self) -> None:
        """Delete what belongs to no batch that is over."""
        orphans_before = self._age(self._retention.orphans_hours)
        files_before = self._age(self._retention.files_days * 24)
        self._collect(
            objects.remove_leftovers(
                ledger=self._ledger,
                store=self._store,
                written_before=self._age(self._retention.leftovers_hours),
                limit=self._limit,
                chance=self._chance,
                dry_run=self._dry_run,
            )
        )
        self._collect(
            objects.remove_orphans(
                ledger=self._ledger,
                store=self._store,
                written_before=orphans_before,
                limit=self._limit,
                dry_run=self._dry_run,
            )
        )
        self._collect(
            objects.abort_uploads(self._store, started_before=orphans_before, limit=self._limit, dry_run=self._dry_run)
        )
        self._collect(
            objects.remove_rejected(self._store, written_before=files_before, limit=self._limit, dry_run=self._dry_run)
        )
        self._forget_workers()

    def remove_api_files(self) -> None:
        """Delete what the API has received and nobody may have any more."""
        now = self._ledger.now()
        orphaned = self._retention.orphans_hours * 3600
        ledger, store, limit, dry_run = self._ledger, self._store, self._limit, self._dry_run
        self._collect(
            api_files.remove_expired(ledger=ledger, store=store, expired_before=now, limit=limit, dry_run=dry_run)
        )
        self._collect(
            api_files.remove_uploads(
                ledger=ledger, store=store, over_before=now - orphaned, limit=limit, dry_run=dry_run
            )
        )
        self._collect(
            api_files.remove_unowned(
                ledger=ledger, store=store, written_before=self._now - orphaned, limit=limit, dry_run=dry_run
            )
        )

    def _forget_workers(self) -> None:
        retention = self._ledger.retention
        forget = retention.silent_workers if self._dry_run else retention.forget_workers
        gone = forget(self._cutoffs.workers)
        if gone:
            self.report.removals.append(Removal(step=Step.WORKERS, subject="workers", rows=gone))

    def _age(self, hours: float) -> float:
        return self._now - hours * 3600

    def _do(self, batch: Batch, action: Callable[[Batch], Removal | None]) -> None:
        try:
            removal = action(batch)
        except ProofFailed as error:
            _log.warning("%s is kept: %s", batch.batch_id, error)
            self.report.held[batch.batch_id] = str(error)
        except StoreError as error:
            self._failed(f"{batch.batch_id}: {error}")
        else:
            if removal is not None:
                self.report.removals.append(removal)

    def _collect(self, removals: Iterator[Removal]) -> None:
        try:
            self.report.removals.extend(removals)
        except StoreError as error:
            self._failed(str(error))

    def _failed(self, what: str) -> None:
        _log.warning("housekeeping: %s; the next run tries again", what)
        self.report.failures.append(what)
        if len(self.report.failures) >= _MOST_FAILURES:
            raise _StoreAway
