"""The op `validate_requests`: the batch's input is read once, every line checked, and what was found is written down.

    batches/BATCH/input.jsonl ──> intake/invalid.jsonl (where a line is bad), then intake/requests.parquet

Both are functions of the input's bytes and the configuration alone, so a repeated run writes the same bytes to the same
keys. Killed before the table is written, the batch awaits a further run; after it, chunking has all it needs.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from batch_pipeline import ids
from batch_pipeline.intake import spool
from batch_pipeline.intake.scan import Scan
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, BatchStatus
from batch_pipeline.settings import Settings, limited
from batch_pipeline.store import ObjectStore, keys
from batch_pipeline.wire.lines import LineError, ResultLine, encode_result

_log = logging.getLogger(__name__)


class ValidationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What validation found in the whole file."""

    total: int
    """Requests: lines that are not blank."""
    invalid: int
    input_sha256: str


def awaits_intake(batch: Batch) -> bool:
    """Return whether intake has something to do for the batch: also where it was cancelled before it began."""
    return batch.input_sha256 is None and batch.status in (BatchStatus.VALIDATING, BatchStatus.CANCELLING)


def validate(
    batch_id: str, *, ledger: Ledger, store: ObjectStore, settings: Settings, run_id: str | None = None
) -> ValidationSummary:
    """Check every line of a batch's input. A batch whose intake is done is left alone.

    Raises NotFound, StoreError, OSError where the scratch folder cannot be used.
    """
    batch = ledger.batches.get(batch_id)
    if not awaits_intake(batch):
        return ValidationSummary(total=batch.total, invalid=batch.invalid, input_sha256=batch.input_sha256 or "")
    scratch = settings.intake.scratch_dir
    with spool.workspace(scratch, batch_id) as folder:
        limits = limited(settings.intake, ledger.customers.limits_of(batch.customer))
        scan = Scan(msgspec.structs.replace(settings, intake=limits), batch.endpoint, folder, batch.input_bytes)
        copy = folder / "input.jsonl"
        with copy.open("w+b") as file:
            found = scan.run(spool.pieces(store, batch.input_key, batch.input_bytes), file, fill=True)
        if found.invalid:
            invalid = folder / "invalid.jsonl"
            _write_error_lines(batch_id, scan, invalid)
            store.upload(invalid, keys.invalid_lines(batch_id))
        store.upload(scan.table, keys.request_table(batch_id))
        if not found.refused:
            copy.replace(spool.copy_of(scratch, batch_id))
    _log.info("run %s checked %s: %d requests, %d of them invalid", run_id, batch_id, found.total, found.invalid)
    return ValidationSummary(total=found.total, invalid=found.invalid, input_sha256=found.input_sha256)


def _write_error_lines(batch_id: str, scan: Scan, path: Path) -> None:
    with path.open("wb") as out:
        for problem in scan.read_problems():
            line = ResultLine(
                id=ids.request_id(batch_id, problem.line - 1),
                custom_id=problem.custom_id,
                response=None,
                error=LineError(problem.code, problem.message, problem.line),
            )
            out.write(encode_result(line))
