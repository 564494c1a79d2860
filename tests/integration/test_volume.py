"""Many requests through one worker, with an instant fake engine: what it costs and how much it holds."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import BatchStatus
from batch_pipeline.store import ObjectStore
from tests.fakes import engine as fake_engine
from tests.fakes.batches import chat_request, make_batch
from tests.fakes.workers import Life, start_process

REQUESTS, CHUNKS = 100_000, 100


@pytest.mark.volume
def test_a_hundred_thousand_requests_pass_one_worker_in_bounded_memory(
    sqlite_url: str, store: ObjectStore, settings_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger.open(sqlite_url)
    rows = REQUESTS // CHUNKS
    chunks = [
        [chat_request(number * rows + row, f"say {number} {row} " + "and so on " * 40) for row in range(rows)]
        for number in range(CHUNKS)
    ]
    batch = make_batch(ledger, store, chunks)
    del chunks
    with fake_engine.running() as fake:
        with start_process(
            settings_file,
            sqlite_url,
            fake.url,
            model={"max_in_flight": 64},
            heartbeat_seconds=5.0,
            checkpoint_seconds=5.0,
        ) as process:
            output, _ = process.communicate()
        assert fake.stats().calls == REQUESTS
    life = msgspec.json.decode(output, type=Life)
    with capsys.disabled():
        print(
            f"\n{REQUESTS} requests: {life.report.seconds:.0f} s, {REQUESTS / life.report.seconds:.0f} a second, "
            f"{REQUESTS / life.cpu_seconds:.0f} a CPU second, {life.max_rss_bytes / 2**20:.0f} MiB at most"
        )
    assert (life.report.chunks, life.report.requests) == (CHUNKS, REQUESTS)
    assert life.max_rss_bytes < 512 * 2**20
    (lane,) = ledger.batches.lanes(batch.batch_id)
    assert (lane.completed, lane.failed, lane.committed) == (REQUESTS, 0, CHUNKS)
    assert ledger.batches.get(batch.batch_id).status is BatchStatus.FINALIZING
