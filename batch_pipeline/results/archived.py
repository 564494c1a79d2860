"""The chunks and the events of a batch, wherever they are: in the ledger, or after its end in the manifest alone."""

from __future__ import annotations

import msgspec

from batch_pipeline.errors import NotAllowedInState, ProofFailed
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, Chunk, ChunkResult, ChunkState, Event, Part
from batch_pipeline.results import manifest
from batch_pipeline.results.facts import chunks_of, event_facts
from batch_pipeline.results.manifest import ChunkFacts, EventFacts, Manifest
from batch_pipeline.store import ObjectMissing, ObjectStore


def check_files_kept(batch: Batch) -> None:
    """Raise NotAllowedInState where the batch's files are not given out any more."""
    if batch.deleted_at is not None:
        raise NotAllowedInState(f"batch {batch.batch_id} was deleted by its customer, and its files with it")
    if batch.files_removed_at is not None:
        raise NotAllowedInState(
            f"the files of batch {batch.batch_id} were removed {_ago(batch.files_removed_at, batch)} after its end, "
            "as retention.files_days says; its counts are in its status"
        )


def manifest_bytes(batch: Batch, store: ObjectStore) -> bytes:
    """Return the manifest of a final batch. Raises NotAllowedInState where it was removed, ProofFailed where it is
    lost; StoreError.
    """
    check_files_kept(batch)
    try:
        return store.get(batch.manifest_key or "")
    except ObjectMissing as error:
        raise ProofFailed(
            [f"the manifest of {batch.batch_id} is missing, and it alone has the batch's chunks: {error}"]
        ) from error


def read_manifest(batch: Batch, store: ObjectStore) -> Manifest:
    """Return the manifest of a final batch. Raises as `manifest_bytes`, and ProofFailed where it cannot be read."""
    try:
        return manifest.decode(manifest_bytes(batch, store))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProofFailed([f"the manifest of {batch.batch_id} cannot be read: {error}"]) from error


def all_chunks(batch: Batch, ledger: Ledger, store: ObjectStore) -> list[Chunk]:
    """Return all chunks of a batch, in order: about 2 kB of memory each. Raises as `read_manifest` where the ledger has
    none any more.
    """
    if batch.archived_at is None:
        chunks = chunks_of(batch.batch_id, ledger)
        # They may have left while they were read.
        batch = ledger.batches.get(batch.batch_id)
        if batch.archived_at is None:
            return chunks
    return [chunk_from(batch.batch_id, facts) for facts in read_manifest(batch, store).chunks]


def all_events(batch: Batch, ledger: Ledger, store: ObjectStore) -> list[Event]:
    """Return all events of a batch that are known, in order: those in the ledger, and those that left it."""
    events = {event.sequence: event for event in ledger.events.of(batch.batch_id)}
    if ledger.batches.get(batch.batch_id).archived_at is not None:
        for facts in manifest.events_in(manifest_bytes(batch, store)):
            events[facts.sequence] = Event(batch_id=batch.batch_id, **msgspec.structs.asdict(facts))
    return [events[sequence] for sequence in sorted(events)]


def chunk_from(batch_id: str, facts: ChunkFacts) -> Chunk:
    """Return a chunk's row as it was, from the manifest. What only mattered while it ran is not there any more."""
    result = None
    if facts.result_key is not None:
        result = ChunkResult(
            result_key=facts.result_key,
            lines_key=facts.lines_key or "",
            output_bytes=facts.output_bytes,
            error_bytes=facts.error_bytes,
            sha256=facts.sha256 or "",
            completed=facts.completed,
            failed=facts.failed,
            **msgspec.structs.asdict(facts.usage),
            engine_version=facts.engine_version or "",
            model_version=facts.model_version or "",
        )
    return Chunk(
        batch_id=batch_id,
        chunk=facts.chunk,
        model=facts.model,
        input_key=facts.input_key,
        requests=facts.requests,
        first_index=facts.first_index,
        last_index=facts.last_index,
        prompt_tokens=facts.prompt_tokens,
        max_output_tokens=facts.max_output_tokens,
        state=ChunkState(facts.state),
        token=facts.attempt,
        failures=0,
        worker_id=facts.worker,
        run_id=facts.run_id,
        expires_at=None,
        parts=[_part(part.key, part.requests) for part in facts.parts],
        result=result,
        committed_at=None,
        last_error=None,
    )


def _part(key: str, requests: int) -> Part:
    # How its requests ended is counted when it is read.
    return Part(key=key, requests=requests, completed=0, failed=0, input_tokens=0, cached_tokens=0, output_tokens=0)


def _ago(moment: float, batch: Batch) -> str:
    return f"{max(0.0, moment - (batch.ended_at or moment)) / 86_400:.0f} days"


__all__ = [
    "EventFacts",
    "all_chunks",
    "all_events",
    "check_files_kept",
    "chunk_from",
    "event_facts",
    "manifest_bytes",
    "read_manifest",
]
