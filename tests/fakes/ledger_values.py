"""Values to feed a ledger with, where a test is not about what they hold: batches without files behind them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from batch_pipeline import ids
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import (
    Batch,
    BatchStatus,
    Chunk,
    ChunkResult,
    ChunkState,
    Door,
    FinalFiles,
    IntakeResult,
    Lease,
    NewBatch,
    NewChunk,
    OnInvalid,
    Part,
)

MODEL = "model-a"
CHUNK_TOKENS = 300
"""Estimated tokens of a chunk of 10 requests made by `intake_result`."""


def new_batch(
    creation_key: str,
    customer: str = "acme",
    *,
    window_seconds: int = 3600,
    on_invalid: OnInvalid = OnInvalid.SKIP,
) -> NewBatch:
    """A batch to create; its id follows from its creation key."""
    return NewBatch(
        batch_id=ids.batch_id_from(creation_key),
        customer=customer,
        name=creation_key.replace("/", "-"),
        door=Door.DROP,
        endpoint="/v1/chat/completions",
        window_seconds=window_seconds,
        on_invalid=on_invalid,
        creation_key=creation_key,
        input_key=f"inputs/{creation_key}",
        input_bytes=1,
        input_etag="etag",
    )


def intake_result(
    models: Sequence[str] = (MODEL,), *, requests: int = 10, invalid: int = 0, prompt_tokens: int = 20
) -> IntakeResult:
    """What intake found: a chunk of `requests` requests for each entry of `models`, in their order."""
    chunks = [
        NewChunk(
            chunk=number,
            model=model,
            input_key=f"chunks/{number}",
            requests=requests,
            first_index=number * requests,
            last_index=(number + 1) * requests - 1,
            prompt_tokens=prompt_tokens * requests,
            max_output_tokens=10 * requests,
        )
        for number, model in enumerate(models)
    ]
    return IntakeResult(
        total=len(chunks) * requests + invalid,
        invalid=invalid,
        input_sha256=hashlib.sha256(f"{models} {invalid}".encode()).hexdigest(),
        invalid_key="invalid" if invalid else None,
        errors=[],
        chunks=chunks,
    )


def submitted(
    ledger: Ledger,
    creation_key: str,
    models: Sequence[str] = (MODEL,),
    customer: str = "acme",
    *,
    window_seconds: int = 3600,
    prompt_tokens: int = 20,
) -> Batch:
    """A batch in progress."""
    created = ledger.batches.create(new_batch(creation_key, customer, window_seconds=window_seconds))
    return ledger.batches.record_intake(created.batch_id, intake_result(models, prompt_tokens=prompt_tokens))


def grouped(ledger: Ledger, key: str, groups: Sequence[int | None], customer: str = "acme") -> Batch:
    """A batch in progress with a chunk for each entry: the first chunk of those with its long prefix, or none."""
    created = ledger.batches.create(new_batch(key, customer))
    found = intake_result([MODEL] * len(groups))
    chunks = [
        msgspec.structs.replace(chunk, prefix_group=group) for chunk, group in zip(found.chunks, groups, strict=True)
    ]
    return ledger.batches.record_intake(created.batch_id, msgspec.structs.replace(found, chunks=chunks))


def result_of(lease: Lease, *, failed: int = 0, name: str = "") -> ChunkResult:
    """A result for all requests of a lease, at a key that only this attempt uses."""
    attempt = f"{lease.ref.batch_id}/{lease.ref.chunk}/{lease.ref.token}{name}"
    return ChunkResult(
        result_key=f"{attempt}/results.jsonl",
        lines_key=f"{attempt}/lines.parquet",
        output_bytes=100 * (lease.requests - failed),
        error_bytes=50 * failed,
        sha256="0" * 64,
        completed=lease.requests - failed,
        failed=failed,
        input_tokens=20 * lease.requests,
        cached_tokens=5 * lease.requests,
        output_tokens=7 * lease.requests,
        engine_version="fake-1",
        model_version="1",
    )


def part_of(lease: Lease, number: int, *, completed: int = 1, failed: int = 0) -> Part:
    """A checkpoint of some requests of a lease."""
    requests = completed + failed
    return Part(
        key=f"{lease.ref.batch_id}/{lease.ref.chunk}/{lease.ref.token}/part-{number}",
        requests=requests,
        completed=completed,
        failed=failed,
        input_tokens=20 * requests,
        cached_tokens=5 * requests,
        output_tokens=7 * requests,
    )


def counted(batch: Batch, chunks: Sequence[Chunk]) -> FinalFiles:
    """What a merge would count for a batch whose chunks have all stopped: committed results, parts, and the rest."""
    completed = failed = expired = cancelled = given = cached = made = 0
    for chunk in chunks:
        sources = [chunk.result] if chunk.result is not None else chunk.parts
        done = sum(source.completed + source.failed for source in sources)
        completed += sum(source.completed for source in sources)
        failed += sum(source.failed for source in sources)
        given += sum(source.input_tokens for source in sources)
        cached += sum(source.cached_tokens for source in sources)
        made += sum(source.output_tokens for source in sources)
        missing = chunk.requests - done
        if chunk.state == ChunkState.EXPIRED:
            expired += missing
        elif chunk.state == ChunkState.CANCELLED and batch.outcome == BatchStatus.CANCELLED:
            cancelled += missing
        else:
            failed += missing
    return FinalFiles(
        output_key=f"{batch.batch_id}/output.jsonl" if completed else None,
        error_key=f"{batch.batch_id}/errors.jsonl" if batch.total > completed else None,
        manifest_key=f"{batch.batch_id}/manifest.json",
        completed=completed,
        failed=failed,
        expired=expired,
        cancelled=cancelled,
        input_tokens=given,
        cached_tokens=cached,
        output_tokens=made,
    )


def finish(ledger: Ledger, batch_id: str) -> Batch:
    """Do what the merge does with the ledger."""
    return ledger.batches.finish(batch_id, counted(ledger.batches.get(batch_id), ledger.chunks.of(batch_id)))
