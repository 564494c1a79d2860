"""Many requests on the whole way, with an instant fake engine: each step in a process of its own, in bounded memory."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from batch_pipeline import settings as configuration
from batch_pipeline.intake import options, submission
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import BatchStatus, Door
from batch_pipeline.results.verify import verify
from batch_pipeline.store import ObjectStore
from tests.fakes import engine as fake_engine
from tests.fakes import steps
from tests.fakes.workers import Life, start_process

REQUESTS, BAD_EVERY = 100_000, 1000
BAD = REQUESTS // BAD_EVERY
PREFIXES = 50
MEBIBYTE = 2**20


@pytest.mark.volume
def test_a_hundred_thousand_requests_go_all_the_way_in_bounded_memory(
    sqlite_url: str, store: ObjectStore, settings_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger.open(sqlite_url)
    batch_id = _submit(tmp_path, ledger, store, configuration.load(settings_file, environment={}))

    intake_bytes = steps.run("intake", settings_file, sqlite_url, batch_id)
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
        assert fake.stats().calls == REQUESTS - BAD
    life = msgspec.json.decode(output, type=Life)
    merge_bytes = steps.run("merge", settings_file, sqlite_url, batch_id)

    with capsys.disabled():
        print(
            f"\n{REQUESTS} requests: worker {life.report.seconds:.0f} s, {REQUESTS / life.cpu_seconds:.0f} a CPU s; "
            f"at most {intake_bytes / MEBIBYTE:.0f} MiB in intake, {life.max_rss_bytes / MEBIBYTE:.0f} in the worker, "
            f"{merge_bytes / MEBIBYTE:.0f} in the merge"
        )
    batch = ledger.batches.get(batch_id)
    assert batch.status is BatchStatus.COMPLETED
    assert (batch.total, batch.completed, batch.invalid) == (REQUESTS, REQUESTS - BAD, BAD)
    assert verify(batch_id, ledger=ledger, store=store).holds
    # Intake's own process and the largest of those that check lines beside it.
    assert intake_bytes < 1024 * MEBIBYTE
    assert life.max_rss_bytes < 512 * MEBIBYTE
    assert merge_bytes < 1024 * MEBIBYTE


def _submit(folder: Path, ledger: Ledger, store: ObjectStore, settings: configuration.Settings) -> str:
    file = folder / "many.jsonl"
    with file.open("wb") as lines:
        for number in range(REQUESTS):
            lines.write(b"{bad\n" if number % BAD_EVERY == 0 else _line(number))
    submitted = submission.submit(
        file,
        customer="acme",
        name="many",
        door=Door.CLI,
        options=options.choose(settings.intake),
        ledger=ledger,
        store=store,
        settings=settings,
    )
    file.unlink()
    return submitted.batch.batch_id


def _line(number: int) -> bytes:
    """A request of about 600 bytes; the system prompts repeat in a shuffled order."""
    prefix = f"You are assistant {number * 7919 % PREFIXES}. " + "Answer in one word, and be kind. " * 8
    request = {
        "custom_id": f"request-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "smollm2-135m",
            "messages": [
                {"role": "system", "content": prefix},
                {"role": "user", "content": f"Question {number}: " + "and so on " * 5},
            ],
            "max_tokens": 16,
        },
    }
    return json.dumps(request).encode() + b"\n"
