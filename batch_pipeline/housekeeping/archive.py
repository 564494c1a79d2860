"""Chunks leave the ledger once the manifest has them.

    read the manifest ──> compare it with every row ──> look at the files' sizes ──> one transaction: the rows go

Killed before the transaction the rows are all there, after it they are all gone, and then whoever asks for chunks reads
the manifest. A batch whose manifest or files are not what the ledger says keeps its rows, and is reported.
"""

from __future__ import annotations

import msgspec

from batch_pipeline.errors import ProofFailed
from batch_pipeline.housekeeping.policy import Removal, Step, disagreements
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch
from batch_pipeline.results import manifest
from batch_pipeline.results.archived import manifest_bytes
from batch_pipeline.results.facts import chunks_of
from batch_pipeline.results.manifest import Manifest
from batch_pipeline.store import ObjectStore


def archive(batch: Batch, *, ledger: Ledger, store: ObjectStore, dry_run: bool) -> Removal | None:
    """Let the chunks of a final batch go; None where they are gone already.

    Raises ProofFailed, naming what stands against it, and then nothing was changed; StoreError. Memory: 2 kB for each
    chunk, and the manifest.
    """
    data = manifest_bytes(batch, store)
    try:
        says = manifest.decode(data)
        recorded = {event.sequence for event in manifest.events_in(data)}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProofFailed([f"the manifest of {batch.batch_id} cannot be read: {error}"]) from error
    chunks = chunks_of(batch.batch_id, ledger)
    events = [event.sequence for event in ledger.events.of(batch.batch_id) if event.chunk is not None]
    # Another run may have let them go since the batch was read.
    if ledger.batches.get(batch.batch_id).archived_at is not None:
        return None
    problems = disagreements(batch, chunks, says) + missing_files(says, store)
    lacking = sum(sequence not in recorded for sequence in events)
    if lacking:
        problems.append(f"the manifest lacks {lacking} events of chunks")
    if problems:
        raise ProofFailed([f"{batch.batch_id}: {problem}" for problem in problems])
    if not dry_run:
        ledger.retention.archive(batch.batch_id, len(chunks))
    return Removal(step=Step.ARCHIVE, subject=batch.batch_id, rows=len(chunks) + len(events))


def missing_files(says: Manifest, store: ObjectStore) -> list[str]:
    """Return which final files are not there in the size that the manifest says."""
    problems = []
    for facts in (says.output, says.errors):
        info = None if facts is None else store.head(facts.key)
        if facts is not None and (info is None or info.size != facts.bytes):
            found = "is missing" if info is None else f"has {info.size} bytes"
            problems.append(f"{facts.key} {found}, and the manifest says {facts.bytes}: rebuild it")
    return problems
