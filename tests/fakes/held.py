"""Chunks in a worker's hands, without a ledger that has leased them."""

from __future__ import annotations

from collections.abc import Sequence

from batch_pipeline.ledger.records import Lease, LeaseRef
from batch_pipeline.wire.chunk_files import ChunkRequest
from batch_pipeline.worker.chunk import HeldChunk

BATCH = "batch_" + "0" * 32


def held_chunk(
    number: int, requests: Sequence[ChunkRequest], *, model: str = "m", deadline_at: float = 1000.0, load: bool = True
) -> HeldChunk:
    """A chunk of these requests under its first lease: loaded, or still loading."""
    lease = Lease(
        ref=LeaseRef(BATCH, number, 1),
        customer="acme",
        endpoint="/v1/chat/completions",
        model=model,
        input_key="k",
        requests=len(requests),
        parts=[],
        expires_at=0.0,
        deadline_at=deadline_at,
        attempts=1,
        tokens=1,
    )
    chunk = HeldChunk(lease, "nonce", valid_until=60.0)
    if load:
        chunk.load(requests, [])
    return chunk
