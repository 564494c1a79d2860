"""The GPU worker: lease, feed, checkpoint, quarantine, commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from batch_pipeline import ids
from batch_pipeline.engine import engine_for
from batch_pipeline.errors import SettingsError
from batch_pipeline.ledger import Ledger
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from batch_pipeline.worker.report import Ended, WorkerReport
from batch_pipeline.worker.worker import Worker

__all__ = ["Ended", "Worker", "WorkerReport", "serve"]


def serve(
    settings: Settings,
    model: str,
    run_id: str | None = None,
    *,
    ledger: Ledger | None = None,
    store: ObjectStore | None = None,
    only_batches: Sequence[str] = (),
    on_batch_drained: Callable[[str], None] | None = None,
    on_signal: Callable[[], None] | None = None,
) -> WorkerReport:
    """Build the parts of a worker from the configuration, those that are not given, and run it to its end.

    Raises SettingsError where the model is not in the catalogue, EngineError where its engine does not start or does
    not come back. The engine's log is in `logs` below the configured data folder.
    """
    if model not in settings.models:
        raise SettingsError(f"models.{model} is not in the catalogue: add it, or name another")
    worker_id = ids.new_worker_id(model)
    log = Path(settings.embedded.data_dir) / "logs" / f"engine-{worker_id}.log"
    opened = ledger or Ledger.from_settings(settings)
    try:
        return Worker(
            ledger=opened,
            store=store or ObjectStore.open(settings.store),
            settings=settings,
            model=model,
            engine=engine_for(model, settings.models[model], log, settings.worker.engine_url),
            run_id=run_id,
            only_batches=only_batches,
            on_batch_drained=on_batch_drained or (lambda _batch_id: None),
            on_signal=on_signal or (lambda: None),
            worker_id=worker_id,
        ).run()
    finally:
        if ledger is None:
            opened.close()
