"""Batches with real files behind them, without intake and without an engine: each answer follows from its index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

import msgspec

from batch_pipeline import ids
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import (
    Batch,
    ChunkResult,
    Door,
    IntakeResult,
    Lease,
    NewBatch,
    NewChunk,
    OnInvalid,
    Part,
)
from batch_pipeline.store import ObjectStore, keys
from batch_pipeline.wire import chunk_files, codes
from batch_pipeline.wire.chunk_files import ChunkRequest, FinishedRequest
from batch_pipeline.wire.lines import EngineResponse, LineError, ResultLine, encode_result
from tests.fakes.batches import chunk_input

CHAT = "/v1/chat/completions"
MODEL = "smollm2-135m"
WORKER = "worker-of-the-test"
RUN = "run-of-the-test"


def label(index: int) -> str:
    """The custom_id of a request: of varying length, and not only of ASCII."""
    return f"request-{index}-é" + "x" * (index % 7)


def input_line(index: int, filler: int = 0) -> bytes:
    """A request line without its newline."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"question {index}" + "?" * filler}]}
    request = {"custom_id": label(index), "method": "POST", "url": CHAT, "body": body}
    return json.dumps(request, ensure_ascii=False).encode()


def answer(batch_id: str, index: int, filler: int = 0) -> FinishedRequest:
    """What the engine answers to a request: text of varying length, and its usage."""
    usage = {
        "prompt_tokens": 10 + index % 5,
        "completion_tokens": 3,
        "total_tokens": 13 + index % 5,
        "prompt_tokens_details": {"cached_tokens": index % 3},
    }
    body = {"id": f"chatcmpl-{index}", "choices": [{"text": "answer " * (index % 4) + "!" * filler}], "usage": usage}
    response = EngineResponse(200, f"chatcmpl-{index}", msgspec.Raw(json.dumps(body).encode()))
    line = encode_result(ResultLine(ids.request_id(batch_id, index), label(index), response, None))
    return FinishedRequest(index, False, line, 10 + index % 5, index % 3, 3)


def refusal(batch_id: str, index: int) -> FinishedRequest:
    """What the engine answers to a request that it does not accept."""
    body = {"error": {"message": f"no {index}", "type": "BadRequestError", "param": None, "code": 400}}
    response = EngineResponse(400, f"chatcmpl-{index}", msgspec.Raw(json.dumps(body).encode()))
    line = encode_result(ResultLine(ids.request_id(batch_id, index), label(index), response, None))
    return FinishedRequest(index, True, line, 0, 0, 0)


def create(
    ledger: Ledger,
    store: ObjectStore,
    lines: Sequence[bytes],
    *,
    name: str = "questions",
    customer: str = "acme",
    creation_key: str | None = None,
    on_invalid: OnInvalid = OnInvalid.SKIP,
    window_seconds: int = 86_400,
) -> Batch:
    """A batch of these lines (without newlines) whose bytes have been taken; intake has not begun."""
    batch_id = ids.new_batch_id() if creation_key is None else ids.batch_id_from(creation_key)
    data = b"".join(line + b"\n" for line in lines)
    etag = store.put(keys.input_file(batch_id), data)
    return ledger.batches.create(
        NewBatch(
            batch_id=batch_id,
            customer=customer,
            name=name,
            door=Door.DROP,
            endpoint=CHAT,
            window_seconds=window_seconds,
            on_invalid=on_invalid,
            creation_key=creation_key or batch_id,
            input_key=keys.input_file(batch_id),
            input_bytes=len(data),
            input_etag=etag,
            metadata={"project": "tests"},
        )
    )


def take_in(
    ledger: Ledger,
    store: ObjectStore,
    batch_id: str,
    chunks: Sequence[Sequence[int]],
    *,
    invalid: Iterable[int] = (),
    models: Sequence[str] = (MODEL,),
) -> Batch:
    """Do what intake does with a file: `chunks` are the indexes of each in run order, `invalid` those of bad lines."""
    bad = sorted(invalid)
    if bad:
        store.put(keys.invalid_lines(batch_id), b"".join(_invalid_line(batch_id, index) for index in bad))
    new = [
        _write_chunk(store, batch_id, number, indexes, models[number % len(models)])
        for number, indexes in enumerate(chunks)
    ]
    result = IntakeResult(
        total=sum(chunk.requests for chunk in new) + len(bad),
        invalid=len(bad),
        input_sha256=hashlib.sha256(store.get(keys.input_file(batch_id))).hexdigest(),
        invalid_key=keys.invalid_lines(batch_id) if bad else None,
        errors=[],
        chunks=new,
    )
    return ledger.batches.record_intake(batch_id, result, run_id="intake-run")


def lease_all(ledger: Ledger, models: Sequence[str] = (MODEL,)) -> dict[int, Lease]:
    """Every chunk that can be leased, by number (of a ledger with one open batch)."""
    return {
        lease.ref.chunk: lease
        for model in models
        for lease in ledger.chunks.lease(WORKER, model, limit=100_000, run_id=RUN)
    }


def in_progress(
    ledger: Ledger,
    store: ObjectStore,
    chunks: Sequence[Sequence[int]],
    *,
    invalid: Sequence[int] = (),
    name: str = "questions",
    on_invalid: OnInvalid = OnInvalid.SKIP,
    window_seconds: int = 86_400,
) -> tuple[Batch, dict[int, Lease]]:
    """A batch whose chunks are all leased; lines that are neither in a chunk nor invalid are blank."""
    valid = {index for chunk in chunks for index in chunk}
    count = max([*valid, *invalid], default=-1) + 1
    lines = [
        input_line(index) if index in valid else b"{broken" if index in invalid else b"  " for index in range(count)
    ]
    batch = create(ledger, store, lines, name=name, on_invalid=on_invalid, window_seconds=window_seconds)
    batch = take_in(ledger, store, batch.batch_id, chunks, invalid=invalid)
    return batch, lease_all(ledger)


def commit(ledger: Ledger, store: ObjectStore, lease: Lease, finished: Sequence[FinishedRequest]) -> ChunkResult:
    """Do what a worker does with a chunk whose requests are all finished."""
    result = write_result(store, lease, finished)
    ledger.chunks.commit(lease.ref, result)
    return result


def commit_all(
    ledger: Ledger,
    store: ObjectStore,
    leases: dict[int, Lease],
    chunks: Sequence[Sequence[int]],
    *,
    refused: Sequence[int] = (),
) -> None:
    """Commit every chunk: the requests in `refused` with the engine's refusal, the others with its answer."""
    for number, lease in leases.items():
        batch_id = lease.ref.batch_id
        finished = [
            refusal(batch_id, index) if index in refused else answer(batch_id, index) for index in chunks[number]
        ]
        commit(ledger, store, lease, finished)


def write_result(store: ObjectStore, lease: Lease, finished: Sequence[FinishedRequest]) -> ChunkResult:
    """Write the objects of a commit, and return what would be committed."""
    made = chunk_files.encode_result_object(finished)
    prefix = keys.attempt(*lease.ref, ids.new_nonce())
    store.put(f"{prefix}results.jsonl", made.data)
    store.put(f"{prefix}lines.parquet", made.lines)
    return ChunkResult(
        result_key=f"{prefix}results.jsonl",
        lines_key=f"{prefix}lines.parquet",
        output_bytes=made.output_bytes,
        error_bytes=made.error_bytes,
        sha256=made.sha256,
        completed=made.counts.completed,
        failed=made.counts.failed,
        input_tokens=made.counts.input_tokens,
        cached_tokens=made.counts.cached_tokens,
        output_tokens=made.counts.output_tokens,
        engine_version="fake-engine-1",
        model_version="1",
    )


def checkpoint(ledger: Ledger, store: ObjectStore, lease: Lease, finished: Sequence[FinishedRequest]) -> None:
    """Do what a worker does every few seconds with what has finished since."""
    key = f"{keys.attempt(*lease.ref, ids.new_nonce())}part-0000.parquet"
    store.put(key, chunk_files.write_part(finished))
    counts = chunk_files.count(finished)
    ledger.chunks.checkpoint(
        lease.ref,
        Part(
            key=key,
            requests=len(finished),
            completed=counts.completed,
            failed=counts.failed,
            input_tokens=counts.input_tokens,
            cached_tokens=counts.cached_tokens,
            output_tokens=counts.output_tokens,
        ),
    )


def _invalid_line(batch_id: str, index: int) -> bytes:
    error = LineError(codes.INVALID_JSON_LINE, "Not JSON: mend the line.", index + 1)
    return encode_result(ResultLine(ids.request_id(batch_id, index), None, None, error))


def _write_chunk(store: ObjectStore, batch_id: str, number: int, indexes: Sequence[int], model: str) -> NewChunk:
    key = keys.chunk_input(batch_id, number)
    store.put(key, chunk_input(ChunkRequest(index, label(index), b"{}", 10, 5) for index in indexes))
    return NewChunk(
        chunk=number,
        model=model,
        input_key=key,
        requests=len(indexes),
        first_index=min(indexes),
        last_index=max(indexes),
        prompt_tokens=10 * len(indexes),
        max_output_tokens=5 * len(indexes),
    )
