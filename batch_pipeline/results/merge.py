"""Merge: a batch whose every chunk has stopped becomes its final files, and then its final status becomes visible.

In order, with what a kill at each point leaves behind (each step may be repeated, by several runs at once):

1. output.jsonl and errors.jsonl are written (`assemble`). Killed before or during: the keys have nothing, or a whole
   file of the same bytes; nobody is told of them yet. The next merge writes them again.
2. Both are read back and counted against the input (`proof`). Killed: as after 1.
3. manifest.json is written with one put, and read back. Killed before: as after 1. After: the same bytes are written
again.
4. The ledger flips the status and the ids of the files in one transaction (invariant I6). Killed before: the next merge
   repeats all of it with the same bytes (I5). After: the batch is final, and a further merge does nothing.

Files are made from committed chunks and from the checkpoints of stopped ones only. What does not add up raises
ProofFailed and leaves the status as it is: a wrong file is never given out.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from batch_pipeline import ids
from batch_pipeline.errors import NotAllowedInState, ProofFailed
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, BatchStatus, Chunk, ChunkState, FinalFiles
from batch_pipeline.ledger.usage import Charge
from batch_pipeline.models import Prices
from batch_pipeline.results import manifest
from batch_pipeline.results.archived import all_chunks, all_events, check_files_kept
from batch_pipeline.results.assemble import Assembled, assemble
from batch_pipeline.results.facts import (
    build_manifest,
    chunks_of,
    event_facts,
    events_until_merge,
    refused_whole,
    until_merge,
)
from batch_pipeline.results.findings import Finding, Problems
from batch_pipeline.results.manifest import EventFacts
from batch_pipeline.results.proof import Counted, Files, Taps, count_files
from batch_pipeline.results.sections import SectionHashes
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectMissing, ObjectStore, keys

OUTPUT = "output.jsonl"
ERRORS = "errors.jsonl"
MANIFEST = "manifest.json"


def merge(
    batch_id: str,
    *,
    ledger: Ledger,
    store: ObjectStore,
    settings: Settings,
    run_id: str | None,
    rebuild: bool = False,
) -> FinalFiles:
    """Make the batch's final files and its final status; return what the ledger then says of them.

    A batch that is final already is left alone; with `rebuild` its files are made again from its chunks, beside the old
    ones, and take their place only if they have the sizes and hashes that its manifest and the ledger say.

    Raises NotFound; NotAllowedInState while chunks are waiting or running; ProofFailed where files would not hold
    exactly one result per request; StoreError and SQLAlchemy's OperationalError where a part is away. Memory:
    bounded by the 20,000 chunks of the largest batch and one group of interleaved ones (at most a segment of
    intake); see `scatter`.
    """
    batch = ledger.batches.get(batch_id)
    if batch.status.is_final:
        if rebuild:
            _rebuild(batch, ledger, store, settings)
        return _final_files(batch)
    failed = batch.status == BatchStatus.VALIDATING and batch.outcome == BatchStatus.FAILED
    if batch.status != BatchStatus.FINALIZING and not failed:
        raise NotAllowedInState(
            f"batch {batch_id} is {batch.status}: its results are merged once all of its chunks stop"
        )
    chunks = _stopped_chunks(batch, ledger)
    if chunks is None:
        return _final_files(ledger.batches.get(batch_id))
    prefix = keys.final(batch_id, "")
    counted, data, charges = _make_files(
        batch,
        chunks,
        store,
        scratch=_scratch(settings),
        prefix=prefix,
        prices=_catalogue_prices(settings),
        events=events_until_merge(batch_id, ledger),
    )
    files = FinalFiles(
        output_key=None if counted.output is None else counted.output.key,
        error_key=None if counted.errors is None else counted.errors.key,
        manifest_key=_write_manifest(store, prefix, data),
        completed=counted.counts.completed,
        failed=counted.counts.failed,
        expired=counted.counts.expired,
        cancelled=counted.counts.cancelled,
        output_bytes=0 if counted.output is None else counted.output.bytes,
        error_bytes=0 if counted.errors is None else counted.errors.bytes,
        **msgspec.structs.asdict(counted.usage),
    )
    return _final_files(ledger.batches.finish(batch_id, files, charges=charges, run_id=run_id))


def _stopped_chunks(batch: Batch, ledger: Ledger) -> list[Chunk] | None:
    """Return the batch's chunks; None where another merge has ended it meanwhile.

    Nothing may be written from a part of them: the chunks of a batch that has ended leave the ledger, maybe while they
    are read here.
    """
    chunks = chunks_of(batch.batch_id, ledger)
    requests = sum(chunk.requests for chunk in chunks)
    if ledger.batches.get(batch.batch_id).status.is_final:
        return None
    if requests != batch.total - batch.invalid:
        raise ProofFailed(
            [f"the chunks of {batch.batch_id} have {requests} requests, {batch.total - batch.invalid} are valid"]
        )
    running = [chunk for chunk in chunks if chunk.state in (ChunkState.PENDING, ChunkState.LEASED)]
    if running:
        raise NotAllowedInState(
            f"batch {batch.batch_id}: {len(running)} of its {len(chunks)} chunks have not stopped, the first is chunk "
            f"{running[0].chunk}"
        )
    return chunks


def _make_files(
    batch: Batch,
    chunks: list[Chunk],
    store: ObjectStore,
    *,
    scratch: Path,
    prefix: str,
    prices: dict[str, Prices],
    events: Iterable[EventFacts],
) -> tuple[Counted, bytes, list[Charge]]:
    """Write output and error file below `prefix`, prove them, and return what they hold, the manifest's bytes and the
    bill.

    The manifest names the files by their final keys wherever they lie.
    """
    written = assemble(
        batch,
        chunks,
        store=store,
        scratch=scratch,
        output_key=f"{prefix}{OUTPUT}",
        error_key=f"{prefix}{ERRORS}",
    )
    counted = _read_back(batch, written, store, prefix)
    return counted, *build_manifest(batch, chunks, written.kept, counted, prices=prices, events=events)


def _read_back(batch: Batch, written: Assembled, store: ObjectStore, prefix: str) -> Counted:
    """Count what was written, and raise ProofFailed unless it is exactly one result per request of the batch."""
    problems = Problems()
    hashes = SectionHashes(written.sections)
    files = Files(
        batch_id=batch.batch_id,
        input_key=None if refused_whole(batch) else batch.input_key,
        output_key=f"{prefix}{OUTPUT}" if written.output_bytes else None,
        error_key=f"{prefix}{ERRORS}" if written.error_bytes else None,
    )
    counted = count_files(files, store, problems, Taps(hashes.output, hashes.errors))
    by = "the ledger"
    if files.input_key is not None:
        problems.differ("sha256 of the input", counted.input_sha256, by, batch.input_sha256)
    problems.differ("requests", counted.counts.total, by, batch.total)
    problems.differ("invalid requests", counted.counts.invalid, by, batch.invalid)
    problems.differ("requests with an end", counted.counts.ended, "the input", counted.counts.total)
    for name, facts, size in (
        ("output", counted.output, written.output_bytes),
        ("error", counted.errors, written.error_bytes),
    ):
        problems.differ(f"bytes of the {name} file", 0 if facts is None else facts.bytes, "the merge", size)
    for sentence in hashes.problems():
        problems.add(Finding.MANIFEST_AGREES, sentence)
    found = [sentence for verdict in problems.verdicts.values() for sentence in verdict.problems]
    if found:
        raise ProofFailed(found)
    final = keys.final(batch.batch_id, "")
    return msgspec.structs.replace(
        counted,
        output=None if counted.output is None else msgspec.structs.replace(counted.output, key=f"{final}{OUTPUT}"),
        errors=None if counted.errors is None else msgspec.structs.replace(counted.errors, key=f"{final}{ERRORS}"),
    )


def _write_manifest(store: ObjectStore, prefix: str, data: bytes) -> str:
    """Write the manifest and read it back: killed before, there is none or an equal one; after, it is whole."""
    key = f"{prefix}{MANIFEST}"
    store.put(key, data, content_type="application/json")
    if store.get(key) != data:
        raise ProofFailed([f"{key} does not have the bytes that were written to it"])
    return key


def _rebuild(batch: Batch, ledger: Ledger, store: ObjectStore, settings: Settings) -> None:
    """Make the final files of a final batch again. Raises NotAllowedInState where what they are made from is removed.

    Killed before the copies: the old files are untouched, what lies beside them is garbage. Between the copies: some
    are old and some new, and both have the hashes that the manifest says.
    """
    check_files_kept(batch)
    if batch.work_removed_at is not None:
        raise NotAllowedInState(
            f"batch {batch.batch_id} cannot be rebuilt: its chunk results were removed, as retention.work_hours says; "
            "its final files are the only copy"
        )
    old = _old_manifest(batch, store)
    prices = _catalogue_prices(settings)
    if old is not None:
        # The prices are those of the day on which the batch ended.
        prices = {entry.model: entry.prices for entry in old.models if entry.prices is not None}
    prefix = keys.rebuild(batch.batch_id, ids.new_nonce())
    chunks = all_chunks(batch, ledger, store)
    events = [event_facts(event) for event in all_events(batch, ledger, store)]
    counted, data, _ = _make_files(
        batch, chunks, store, scratch=_scratch(settings), prefix=prefix, prices=prices, events=until_merge(events)
    )
    made = Problems()
    for field in ("completed", "failed", "expired", "cancelled"):
        made.differ(f"{field} requests", getattr(counted.counts, field), "the ledger", getattr(batch, field))
    if old is not None:
        made.differ("output", counted.output, "the manifest", old.output)
        made.differ("errors", counted.errors, "the manifest", old.errors)
    problems = made.verdicts[Finding.MANIFEST_AGREES].problems
    if problems:
        raise ProofFailed([f"rebuilt files are at {prefix}, the old ones were not touched", *problems])
    _write_manifest(store, prefix, data)
    for file in (OUTPUT, ERRORS, MANIFEST):
        info = store.head(f"{prefix}{file}")
        if info is not None:
            store.copy(info, keys.final(batch.batch_id, file))
            store.delete(info.key)


def _old_manifest(batch: Batch, store: ObjectStore) -> manifest.Manifest | None:
    """Return the manifest as it is, or None where it is lost or damaged: mending that is what a rebuild is for."""
    if batch.manifest_key is None:
        return None
    try:
        return manifest.decode(store.get(batch.manifest_key))
    except (ObjectMissing, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _scratch(settings: Settings) -> Path:
    return Path(settings.intake.scratch_dir)


def _catalogue_prices(settings: Settings) -> dict[str, Prices]:
    return {name: model.prices for name, model in settings.models.items()}


def _final_files(batch: Batch) -> FinalFiles:
    return msgspec.convert(msgspec.structs.asdict(batch), FinalFiles)
