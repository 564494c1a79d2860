"""Identical requests share one call of the engine where the customer asks: every one has its own line, one is paid."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batch_pipeline.errors import CustomerError
from batch_pipeline.intake import ops, options, submission
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import BatchStatus, Door
from batch_pipeline.results import merge
from batch_pipeline.results.archived import read_manifest
from batch_pipeline.results.verify import verify
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys
from tests.fakes import engine as fake_engine
from tests.fakes.intake_files import file_of, request_line
from tests.fakes.small_model import write_model
from tests.fakes.waiting import wait_until
from tests.fakes.workers import attached, make_worker, quick, start_process

GREEDY, SEEDED, SAMPLED = {"temperature": 0}, {"temperature": 0.7, "seed": 5}, {"temperature": 0.7}
TIMES = 6


@pytest.fixture
def small(settings: Settings, tmp_path: Path) -> Settings:
    """Settings whose model is small for intake too, with chunks of at most 20 requests."""
    model = msgspec.structs.replace(next(iter(settings.models.values())), source=str(write_model(tmp_path / "model")))
    cut = msgspec.structs.replace(settings.intake, scratch_dir=str(tmp_path / "scratch"), chunk_requests=20)
    return msgspec.structs.replace(settings, models=dict.fromkeys(settings.models, model), intake=cut)


def lines() -> list[bytes]:
    """Each of eight greedy, eight seeded and four sampled requests six times, in turns; one greedy one is refused."""
    kinds = [(f"question {number}", (GREEDY, SEEDED)[number % 2]) for number in range(15)]
    kinds += [("[[400]] a bad one", GREEDY)]
    kinds += [(f"question {number}", SAMPLED) for number in range(4)]
    asked = [
        {"messages": [{"role": "user", "content": text}], **sampling} for _ in range(TIMES) for text, sampling in kinds
    ]
    return [request_line(number, **body) for number, body in enumerate(asked)]


def submitted(ledger: Ledger, store: ObjectStore, settings: Settings, folder: Path, share: str | None) -> str:
    """Return the id of a batch of these lines whose intake is done."""
    file = folder / "asked.jsonl"
    file.write_bytes(file_of(lines()))
    chosen = options.choose(settings.intake, share_identical=share)
    batch = submission.submit(
        file,
        customer="acme",
        name="asked",
        door=Door.CLI,
        options=chosen,
        ledger=ledger,
        store=store,
        settings=settings,
    ).batch
    ops.validate(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id="intake")
    ops.write_chunks(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id="intake")
    return batch.batch_id


def results(batch_id: str, ledger: Ledger, store: ObjectStore, settings: Settings) -> list[dict[str, Any]]:
    """Merge the batch, see it proved, and return the lines of both files."""
    merge.merge(batch_id, ledger=ledger, store=store, settings=settings, run_id="merge")
    proof = verify(batch_id, ledger=ledger, store=store)
    assert proof.holds, proof.problems
    files = [store.get(keys.final(batch_id, name)) for name in ("output.jsonl", "errors.jsonl")]
    return [json.loads(line) for file in files for line in file.splitlines()]


def test_each_has_its_line_the_engine_is_called_once_and_one_is_paid(
    sqlite_url: str, store: ObjectStore, small: Settings, tmp_path: Path
) -> None:
    ledger = Ledger.open(sqlite_url)
    batch_id = submitted(ledger, store, small, tmp_path, "yes")
    with fake_engine.running() as fake:
        make_worker(ledger, store, quick(small), attached(fake.url)).run()
        calls = fake.stats().calls
    found = results(batch_id, ledger, store, small)

    asked = {request["custom_id"]: request["body"] for request in map(json.loads, lines())}
    assert sorted(line["custom_id"] for line in found) == sorted(asked)
    by_id = {line["id"]: line for line in found}
    groups = defaultdict(set)
    for line in found:
        ran = by_id[line.get("shared_with", line["id"])]
        assert "shared_with" not in ran
        assert asked[ran["custom_id"]] == asked[line["custom_id"]]
        assert (ran["response"], ran["error"]) == (line["response"], line["error"])
        groups[json.dumps(asked[line["custom_id"]])].add(ran["id"])
    # A group that lies across the cut between two chunks is run once in each.
    assert sum(map(len, groups.values())) == calls
    assert calls <= 16 + 4 * TIMES + 6
    by_chance = [ran for body, ran in groups.items() if "seed" not in body and '"temperature": 0.7' in body]
    assert [len(ran) for ran in by_chance] == [TIMES] * 4

    batch = ledger.batches.get(batch_id)
    assert (batch.status, batch.completed, batch.failed) == (BatchStatus.COMPLETED, 19 * TIMES, TIMES)
    manifest = read_manifest(batch, store)
    assert manifest.shared_requests == sum("shared_with" in line for line in found) == 20 * TIMES - calls
    paid = [line["response"]["body"].get("usage") for line in found if "shared_with" not in line]
    assert batch.output_tokens == sum(usage["completion_tokens"] for usage in paid if usage)


def test_without_asking_every_request_is_run(
    sqlite_url: str, store: ObjectStore, small: Settings, tmp_path: Path
) -> None:
    ledger = Ledger.open(sqlite_url)
    batch_id = submitted(ledger, store, small, tmp_path, None)
    with fake_engine.running() as fake:
        make_worker(ledger, store, quick(small), attached(fake.url)).run()
        assert fake.stats().calls == 20 * TIMES
    assert not any("shared_with" in line for line in results(batch_id, ledger, store, small))
    assert read_manifest(ledger.batches.get(batch_id), store).shared_requests == 0


def test_a_killed_worker_costs_what_was_in_flight_and_nobody_has_two_results(
    sqlite_url: str, store: ObjectStore, small: Settings, tmp_path: Path, settings_file: Path
) -> None:
    ledger = Ledger.open(sqlite_url, lease_seconds=3.0)
    batch_id = submitted(ledger, store, small, tmp_path, "yes")
    short = {"lease_seconds": 3.0, "model": {"max_in_flight": 4}}
    with fake_engine.running("--delay", "0.05") as fake:
        # From the start: were it told half-way, the worker might be through before it hears of it.
        fake.control(hold_after=12)
        with start_process(settings_file, sqlite_url, fake.url, **short) as process:
            wait_until(lambda: fake.stats().in_flight == 4 and fake.stats().answered == 12, "the others are held")
            wait_until(lambda: saved(ledger, batch_id) > 12, "shared answers are saved")
            process.kill()
        wait_until(lambda: fake.stats().in_flight == 0, "the engine has noticed")
        fake.control()
        second = make_worker(
            ledger,
            store,
            quick(small, **short, warm_seconds=60.0),
            attached(fake.url),
            on_batch_drained=lambda _batch: ledger.workers.ask_to_leave(second.worker_id),
        )
        second.run()
        calls = fake.stats().calls
    found = results(batch_id, ledger, store, small)
    ran = sum("shared_with" not in line for line in found)
    assert len(found) == 20 * TIMES
    # What had been answered and was not in a checkpoint yet ran again too.
    assert ran + 4 <= calls < 20 * TIMES


def saved(ledger: Ledger, batch_id: str) -> int:
    """How many requests of a batch's chunks the checkpoints hold, or its commits."""
    chunks = ledger.chunks.of(batch_id)
    return sum(part.requests for chunk in chunks for part in chunk.parts) + sum(
        chunk.requests for chunk in chunks if chunk.result is not None
    )


def test_another_word_than_yes_or_no_is_refused(settings: Settings) -> None:
    with pytest.raises(CustomerError, match="share-identical: 'maybe' is not accepted; it may be yes or no"):
        options.choose(settings.intake, share_identical="maybe")
    with pytest.raises(CustomerError, match="yes or no"):
        options.choose(settings.intake, metadata={"share-identical": "1"})
