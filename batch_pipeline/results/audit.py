"""Audit: from a result back to the upload: which bytes, line, chunk, attempt, worker, engine, model and run."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from batch_pipeline.errors import NotFound
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, Chunk, Event
from batch_pipeline.results import manifest
from batch_pipeline.results.archived import all_chunks, all_events
from batch_pipeline.results.facts import chunk_facts
from batch_pipeline.results.lookup import InputLine, Place, find_input, find_result
from batch_pipeline.results.manifest import ChunkFacts, FileFacts, InputFacts
from batch_pipeline.results.timeline import Attempt, attempts_in
from batch_pipeline.results.versions import chunks_version, results_version, upload_version
from batch_pipeline.store import ObjectMissing, ObjectStore
from batch_pipeline.wire import chunk_files

MAX_REQUESTS = 100
"""Most requests of one custom_id that are followed (all but one of them are invalid)."""


class Bytes(msgspec.Struct, frozen=True, kw_only=True):
    """A range of an object."""

    key: str
    offset: int
    length: int


class RequestTrail(msgspec.Struct, frozen=True, kw_only=True):
    """One request, from its result back to its line in the upload."""

    index: int
    line: int
    """1-based, in the input."""
    custom_id: str | None
    input: Bytes
    result: Bytes | None
    """Its line in the output or error file; null before the end."""
    chunk: ChunkFacts | None
    """Null for a line that is invalid: no chunk has it."""
    source: Bytes | None
    """The line in what a worker wrote: in the result of a commit, or in a checkpoint (there the whole object)."""
    source_is_identical: bool | None
    """Whether the line in the final file has the very bytes that the worker wrote; null where there is no source."""
    note: str | None = None
    """Why the chunk or the source cannot be named, where they have been removed since."""


class AuditTrail(msgspec.Struct, frozen=True, kw_only=True):
    """Where a batch's results come from. With `requests`, `chunks` and `events` are limited to theirs."""

    batch_id: str
    customer: str
    name: str
    door: str
    creation_key: str
    status: str
    intake_run_id: str | None
    merge_run_id: str | None
    input: InputFacts
    output: FileFacts | None
    errors: FileFacts | None
    manifest_key: str | None
    requests: list[RequestTrail]
    chunks: list[ChunkFacts]
    attempts: list[Attempt]
    """At these chunks, in the order in which they began."""
    data_versions: dict[str, str]
    """Of uploads, chunk_results and batch_results, as Dagster shows them in the tag dagster/data_version: the same
    words mean the same bytes. Those that are not known yet are left out.
    """
    events: list[Event]
    """In the order in which they happened."""


def audit(
    batch_id: str,
    *,
    ledger: Ledger,
    store: ObjectStore,
    custom_id: str | None = None,
    index: int | None = None,
) -> AuditTrail:
    """Return where the batch's results come from, or those of one request, named by custom_id or by 0-based index.

    Chunks and events are read from the ledger while it has them, and from the manifest afterwards.
    Reads only. Raises NotFound where there is no such batch or request; NotAllowedInState where its files were removed;
    ProofFailed where chunks and events are in the manifest and it is lost; StoreError. Cost for one request: the input
    up to its line, and a few ranges and tables; without one: no file is read but the manifest.
    """
    batch = ledger.batches.get(batch_id)
    chunks = all_of_batch = all_chunks(batch, ledger, store)
    requests: list[RequestTrail] = []
    events = all_events(batch, ledger, store)
    if custom_id is not None or index is not None:
        found = _in_input(batch, store, custom_id, index)
        requests = [_trail(batch, chunks, line, store) for line in found]
        numbers = {request.chunk.chunk for request in requests if request.chunk is not None}
        chunks = [chunk for chunk in chunks if chunk.chunk in numbers]
        events = [event for event in events if event.chunk is None or event.chunk in numbers]
    says = _manifest(batch, store)
    return AuditTrail(
        batch_id=batch_id,
        customer=batch.customer,
        name=batch.name,
        door=batch.door,
        creation_key=batch.creation_key,
        status=batch.status,
        intake_run_id=batch.intake_run_id,
        merge_run_id=batch.merge_run_id,
        input=InputFacts(
            key=batch.input_key,
            bytes=batch.input_bytes,
            etag=batch.input_etag,
            sha256=batch.input_sha256,
            requests=batch.total,
        ),
        output=None if says is None else says.output,
        errors=None if says is None else says.errors,
        manifest_key=batch.manifest_key,
        requests=requests,
        chunks=_facts(batch, chunks, says),
        attempts=attempts_in(events),
        data_versions=_data_versions(batch, all_of_batch, says),
        events=events,
    )


def _data_versions(batch: Batch, chunks: Sequence[Chunk], says: manifest.Manifest | None) -> dict[str, str]:
    known = {"uploads": upload_version(batch)}
    if batch.finalizing_at is not None or batch.status.is_final:
        known["chunk_results"] = chunks_version(chunks)
    if says is not None:
        known["batch_results"] = results_version(says.output, says.errors)
    return known


def _facts(batch: Batch, chunks: Sequence[Chunk], says: manifest.Manifest | None) -> list[ChunkFacts]:
    """Return the chunks in the manifest's words: in its very own where it alone has them."""
    if batch.archived_at is None or says is None:
        return [chunk_facts(chunk) for chunk in chunks]
    numbers = {chunk.chunk for chunk in chunks}
    return [facts for facts in says.chunks if facts.chunk in numbers]


def _in_input(batch: Batch, store: ObjectStore, custom_id: str | None, index: int | None) -> list[InputLine]:
    found: list[InputLine] = []
    for line in find_input(store, batch.input_key, custom_id=custom_id, index=index):
        found.append(line)
        if len(found) == MAX_REQUESTS:
            break
    if not found:
        what = f"with the custom_id {custom_id!r}" if index is None else f"at line {index + 1}"
        raise NotFound(f"batch {batch.batch_id} has no request {what}")
    return found


def _trail(batch: Batch, chunks: Sequence[Chunk], line: InputLine, store: ObjectStore) -> RequestTrail:
    places = (find_result(store, batch.batch_id, key, line.index) for key in (batch.output_key, batch.error_key) if key)
    result = next((place for place in places if place is not None), None)
    note = None
    if batch.work_removed_at is None:
        chunk = _chunk_of(chunks, line.index, store)
        source = None if chunk is None else _source(chunk, line.index, store)
    else:
        chunk, note = _chunk_by_range(
            chunks, line.index, in_output=result is not None and result.key == batch.output_key
        )
        source = None
    return RequestTrail(
        index=line.index,
        line=line.index + 1,
        custom_id=line.label,
        input=Bytes(key=batch.input_key, offset=line.offset, length=line.length),
        result=_bytes(result),
        chunk=None if chunk is None else chunk_facts(chunk),
        source=_bytes(source),
        source_is_identical=None if source is None or result is None else source.data == result.data,
        note=note,
    )


def _chunk_by_range(chunks: Sequence[Chunk], index: int, *, in_output: bool) -> tuple[Chunk | None, str | None]:
    """Return the chunk that must have had a request, judged by the ranges alone, and what cannot be said any more."""
    removed = "what the workers wrote was removed, as retention.work_hours says"
    found = [chunk for chunk in chunks if chunk.first_index <= index <= chunk.last_index]
    if not found:
        return None, None
    is_whole = len(found) == 1 and found[0].last_index - found[0].first_index + 1 == found[0].requests
    if len(found) == 1 and (in_output or is_whole):
        return found[0], f"{removed}; the manifest has the sha256 of it"
    numbers = ", ".join(str(chunk.chunk) for chunk in found[:10])
    return None, f"{removed}: the request was in one of the chunks {numbers}, or is invalid"


def _chunk_of(chunks: Sequence[Chunk], index: int, store: ObjectStore) -> Chunk | None:
    """Return the chunk that has a request: of those whose ranges include it, the one whose input does."""
    for chunk in chunks:
        if chunk.first_index <= index <= chunk.last_index:
            table = chunk_files.read_chunk_input(store.get(chunk.input_key), ("index",))
            if (table.column(0).to_numpy() == index).any():
                return chunk
    return None


def _source(chunk: Chunk, index: int, store: ObjectStore) -> Place | None:
    """Return the line as a worker wrote it, without its newline, or None where no worker finished the request."""
    result = chunk.result
    if result is None:
        for part in chunk.parts:
            for request in chunk_files.read_part(store.get(part.key)):
                if request.index == index:
                    return Place(part.key, 0, request.line.removesuffix(b"\n"))
        return None
    table = chunk_files.read_lines_table(store.get(result.lines_key))
    rows = np.flatnonzero(table.index == index)
    if not len(rows):
        return None
    length = int(table.length[rows[0]])
    offset = int(table.length[: rows[0]].sum(dtype=np.int64))
    data = store.get_range(result.result_key, offset, length)
    return Place(result.result_key, offset, data.removesuffix(b"\n"))


def _bytes(place: Place | None) -> Bytes | None:
    return None if place is None else Bytes(key=place.key, offset=place.offset, length=len(place.data))


def _manifest(batch: Batch, store: ObjectStore) -> manifest.Manifest | None:
    """Return the manifest, or None before the end; a damaged one is for `verify` to report."""
    if batch.manifest_key is None:
        return None
    try:
        return manifest.decode(store.get(batch.manifest_key))
    except (ObjectMissing, msgspec.DecodeError, UnicodeDecodeError):
        return None
