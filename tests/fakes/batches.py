"""Batches for tests of what comes after intake: their chunks are written and recorded directly."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import pyarrow as pa

from batch_pipeline import ids
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.batches import Batches
from batch_pipeline.ledger.database import Database, Transaction
from batch_pipeline.ledger.records import Batch, Door, IntakeResult, NewBatch, NewChunk, OnInvalid
from batch_pipeline.store import ObjectStore, keys
from batch_pipeline.wire import chunk_files
from batch_pipeline.wire.chunk_files import ChunkRequest

CHAT = "/v1/chat/completions"
MODEL = "smollm2-135m"


def chat_request(index: int, prompt: str, max_tokens: int = 16, **sampling: object) -> ChunkRequest:
    """Return a request with the custom_id `request-INDEX`."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, **sampling}
    return ChunkRequest(index, f"request-{index}", json.dumps(body).encode(), len(prompt.split()), max_tokens)


def chunk_input(requests: Iterable[ChunkRequest]) -> bytes:
    """Return input.parquet with one row for each request, in the order given."""
    rows = [msgspec.structs.asdict(request) for request in requests]
    return chunk_files.write_chunk_input(pa.Table.from_pylist(rows, schema=chunk_files.INPUT_SCHEMA))


def make_batch(
    ledger: Ledger,
    store: ObjectStore,
    chunks: Sequence[Sequence[ChunkRequest]],
    *,
    customer: str = "acme",
    name: str = "batch",
    window_seconds: int = 86_400,
    model: str = MODEL,
) -> Batch:
    """Return a batch in progress with these chunks of requests, its input written as well."""
    batch_id = ids.new_batch_id()
    lines = sorted((request for chunk in chunks for request in chunk), key=lambda request: request.index)
    data = b"".join(
        b'{"custom_id":"%s","method":"POST","url":"%s","body":%s}\n'
        % (request.custom_id.encode(), CHAT.encode(), request.body)
        for request in lines
    )
    etag = store.put(keys.input_file(batch_id), data)
    recorded = []
    for number, requests in enumerate(chunks):
        store.put(keys.chunk_input(batch_id, number), chunk_input(requests))
        recorded.append(
            NewChunk(
                chunk=number,
                model=model,
                input_key=keys.chunk_input(batch_id, number),
                requests=len(requests),
                first_index=min(request.index for request in requests),
                last_index=max(request.index for request in requests),
                prompt_tokens=sum(request.prompt_tokens for request in requests),
                max_output_tokens=sum(request.max_tokens for request in requests),
            )
        )
    new = NewBatch(
        batch_id=batch_id,
        customer=customer,
        name=name,
        door=Door.DROP,
        endpoint=CHAT,
        window_seconds=window_seconds,
        on_invalid=OnInvalid.SKIP,
        creation_key=f"test:{batch_id}",
        input_key=keys.input_file(batch_id),
        input_bytes=len(data),
        input_etag=etag,
    )
    result = IntakeResult(
        total=len(lines),
        invalid=0,
        input_sha256=hashlib.sha256(data).hexdigest(),
        invalid_key=None,
        errors=[],
        chunks=recorded,
    )
    with ledger.batches._database.write() as tx:
        # At once: of a batch without its intake a sensor that looks at this moment would request the intake.
        batches = Batches(_Within(tx), ledger.batches._limits)
        batches.create(new)
        return batches.record_intake(batch_id, result)


class _Within(Database):
    """A database whose every transaction is part of one that is under way."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        yield self._tx
