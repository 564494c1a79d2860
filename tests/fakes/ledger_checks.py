"""What is true of a ledger at any moment, whoever has been killed or has raced: for tests to check at the end."""

from __future__ import annotations

from collections import Counter

from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import ChunkState


def assert_consistent(ledger: Ledger, batch_id: str) -> None:
    """The sums of the lanes are those of the chunks, a batch that is to stop has nothing pending, and every lease and
    commit has its one event.
    """
    batch = ledger.batches.get(batch_id)
    chunks = ledger.chunks.of(batch_id, limit=1_000_000)
    for lane in ledger.batches.lanes(batch_id):
        of_model = [chunk for chunk in chunks if chunk.model == lane.model]
        counts = Counter(chunk.state for chunk in of_model)
        assert (lane.pending, lane.leased) == (counts[ChunkState.PENDING], counts[ChunkState.LEASED])
        assert (lane.committed, lane.pending + lane.leased + lane.committed + lane.stopped) == (
            counts[ChunkState.COMMITTED],
            len(of_model),
        )
        done = [source for chunk in of_model for source in ([chunk.result] if chunk.result else chunk.parts)]
        assert (lane.completed, lane.failed) == (
            sum(source.completed for source in done),
            sum(source.failed for source in done),
        )
    if batch.outcome is not None:
        assert all(chunk.state != ChunkState.PENDING for chunk in chunks)
    told = Counter((event.chunk, event.event) for event in ledger.events.of(batch_id) if event.chunk is not None)
    for chunk in chunks:
        assert told[chunk.chunk, "leased"] == chunk.token
        assert told[chunk.chunk, "committed"] == (chunk.state == ChunkState.COMMITTED)
