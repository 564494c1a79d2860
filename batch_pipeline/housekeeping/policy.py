"""What may go and what must stay: pure functions of rows, listings and times.

Times are UTC seconds since the epoch: of batches by the database's clock, of objects by the store's.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from batch_pipeline.ledger.records import Batch, Chunk, ChunkState
from batch_pipeline.results.facts import chunk_facts
from batch_pipeline.results.manifest import ChunkFacts, Counts, Manifest, Usage
from batch_pipeline.settings import Retention
from batch_pipeline.store import ObjectInfo, keys


class Step(StrEnum):
    """What housekeeping does."""

    ARCHIVE = "archive"
    """Chunks of a batch leave the ledger."""
    WORK = "work"
    """What the files of a batch were made from leaves the bucket."""
    FILES = "files"
    """Input, files and outbox folder of a batch leave the bucket."""
    LEFTOVERS = "leftovers"
    """What an attempt wrote in vain leaves the bucket while its batch is still open."""
    ORPHAN = "orphan"
    """An upload that never became a batch leaves the bucket."""
    UPLOAD = "upload"
    """A multipart upload that nobody completes is aborted."""
    API_FILE = "api_file"
    """An uploaded file that has expired leaves the ledger and the bucket."""
    API_UPLOAD = "api_upload"
    """An upload in parts whose time is over leaves the ledger, and its parts the bucket."""
    REJECTED = "rejected"
    """A file that could not be taken leaves the bucket."""
    WORKERS = "workers"
    """Workers that are long gone leave the ledger."""


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was removed, or in a dry run would be. `subject` is a batch's id, a key, or a word."""

    step: Step
    subject: str
    objects: int = 0
    bytes: int = 0
    rows: int = 0


class Cutoffs(NamedTuple):
    """What is older than its cutoff may go."""

    archive: float
    work: float
    files: float
    workers: float


def cutoffs(retention: Retention, now: float) -> Cutoffs:
    """Return the cutoffs at a moment of the database's clock."""
    return Cutoffs(
        archive=now - retention.ledger_minutes * 60,
        work=now - retention.work_hours * 3600,
        files=now - retention.files_days * 86_400,
        workers=now - retention.orphans_hours * 3600,
    )


def disagreements(batch: Batch, chunks: Sequence[Chunk], says: Manifest) -> list[str]:
    """Return what the ledger knows of a final batch and the manifest does not say; nothing, where the chunks may go."""
    problems = []
    if (says.batch_id, says.status) != (batch.batch_id, batch.status):
        problems.append(f"the manifest is of {says.batch_id}, {says.status}")
    counts = Counts(**{name: getattr(batch, name) for name in Counts.__struct_fields__})
    usage = Usage(**{name: getattr(batch, name) for name in Usage.__struct_fields__})
    if (says.counts, says.usage) != (counts, usage):
        problems.append("the manifest has other counts than the ledger")
    for what, key, file in (("output", batch.output_key, says.output), ("error", batch.error_key, says.errors)):
        if key != (None if file is None else file.key):
            problems.append(f"the manifest has another {what} file than the ledger")
    if len(chunks) != len(says.chunks):
        problems.append(f"the manifest has {len(says.chunks)} chunks, the ledger {len(chunks)}")
    for chunk, facts in zip(chunks, says.chunks, strict=False):
        if _comparable(chunk_facts(chunk)) != _comparable(facts):
            problems.append(f"the manifest says something else of chunk {chunk.chunk}")
            break
    return problems


def _comparable(facts: ChunkFacts) -> ChunkFacts:
    """Leave out what a merge counts of a stopped chunk's checkpoints: it counts each request once, the ledger all."""
    if facts.result_key is not None:
        return facts
    return msgspec.structs.replace(facts, completed=0, failed=0, usage=Usage())


def work_of(batch: Batch, objects: Iterable[ObjectInfo], rebuilt_before: float) -> list[ObjectInfo]:
    """Return those of a final batch's objects that its files were made from; never one that is given out or audited.

    `rebuilt_before` spares a rebuild that is going on.
    """
    kept = {batch.input_key, batch.invalid_key, batch.output_key, batch.error_key, batch.manifest_key}
    table = keys.request_table(batch.batch_id)
    work = (keys.chunks(batch.batch_id),)
    rebuilt = keys.rebuilds(batch.batch_id)
    return [
        info
        for info in objects
        if info.key not in kept
        and (
            info.key == table
            or info.key.startswith(work)
            or (info.key.startswith(rebuilt) and info.modified_at < rebuilt_before)
        )
    ]


def leftovers(chunk: Chunk, objects: Iterable[ObjectInfo], written_before: float) -> list[ObjectInfo]:
    """Return what attempts of a chunk wrote in vain. The row must have been read after the objects were listed.

    An attempt that the row does not show as leased can checkpoint and commit no more: what it wrote counts if the row
    names it, and never otherwise. What is not named like an attempt's is left alone.
    """
    kept = {chunk.input_key, *(part.key for part in chunk.parts)}
    if chunk.result is not None:
        kept |= {chunk.result.result_key, chunk.result.lines_key}
    first_alive = chunk.token if chunk.state == ChunkState.LEASED else chunk.token + 1
    found = []
    for info in objects:
        token = _token_of(chunk, info.key)
        if token is None or token >= first_alive or info.key in kept or info.modified_at >= written_before:
            continue
        found.append(info)
    return found


def _token_of(chunk: Chunk, key: str) -> int | None:
    """Return the fencing token of the attempt that a key belongs to; None where it is no attempt's."""
    prefix = keys.chunk(chunk.batch_id, chunk.chunk)
    attempt, slash, _ = key.removeprefix(prefix).partition("/")
    token, dash, _ = attempt.partition("-")
    if not key.startswith(prefix) or not slash or not dash or not token.isascii() or not token.isdigit():
        return None
    return int(token)


def partitions_to_delete(
    partitions: Sequence[str], ends: Mapping[str, float], retention: Retention, now: float
) -> list[str]:
    """Return the partitions of ended batches that are to go, what ended first first: at most `retention.per_run`.

    `ends` says when batches ended; one that has not is not among them. Those go that ended long ago, and where there
    are still more than `retention.partitions_at_most` as many more as it takes, as far as there are ended ones.
    """
    ended = sorted((key for key in partitions if key in ends), key=ends.__getitem__)
    old = bisect.bisect_left(ended, now - retention.partitions_days * 86_400, key=ends.__getitem__)
    beyond = max(0, len(partitions) - retention.partitions_at_most)
    return ended[: min(max(old, beyond), retention.per_run)]
