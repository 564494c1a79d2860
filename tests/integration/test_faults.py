"""Faults on the whole way, from the file to the files that the customer gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from batch_pipeline.intake import drop, ops
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, BatchStatus
from batch_pipeline.results import outbox
from batch_pipeline.results.merge import merge
from batch_pipeline.results.verify import verify
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectMissing, ObjectStore, keys
from tests.fakes import engine as fake_engine
from tests.fakes.batches import chat_request, make_batch
from tests.fakes.clock import SteppedClock
from tests.fakes.intake_files import file_of, intake_settings, request_line
from tests.fakes.small_model import write_model
from tests.fakes.waiting import wait_until
from tests.fakes.workers import attached, in_thread, make_worker, quick


def lines(store: ObjectStore, key: str | None) -> list[dict[str, Any]]:
    """The lines of a result file; none where there is no file."""
    try:
        return [json.loads(line) for line in store.get(key or "none").splitlines()]
    except ObjectMissing:
        return []


def ended(batch: Batch, ledger: Ledger, store: ObjectStore, settings: Settings) -> Batch:
    """Merge a batch whose chunks have stopped, and return it with its proof given."""
    merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id="merge")
    assert verify(batch.batch_id, ledger=ledger, store=store).problems == []
    return ledger.batches.get(batch.batch_id)


def test_4_a_cancel_in_the_middle_returns_each_request_once_and_keeps_what_is_finished(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    requests = [chat_request(index, f"[[slow:600]] {index}" if index >= 5 else f"say {index}") for index in range(25)]
    batch = make_batch(ledger, store, [requests[:10], requests[10:]])
    with (
        fake_engine.running() as fake,
        in_thread(make_worker(ledger, store, quick(settings), attached(fake.url))),
    ):
        wait_until(lambda: fake.stats().answered == 5 and fake.stats().in_flight == 16, "the slow ones run")
        ledger.batches.cancel(batch.batch_id)
    batch = ended(batch, ledger, store, settings)
    assert batch.status is BatchStatus.CANCELLED
    output, errors = lines(store, batch.output_key), lines(store, batch.error_key)
    assert [line["custom_id"] for line in output] == [f"request-{index}" for index in range(5)]
    assert [line["custom_id"] for line in errors] == [f"request-{index}" for index in range(5, 25)]
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}


def test_6_at_the_deadline_what_is_finished_comes_back_and_the_rest_is_expired_and_not_billed(
    sqlite_url: str, store: ObjectStore, settings: Settings
) -> None:
    """Also with the worker gone: it is the clock of the ledger that ends the batch."""
    clock = SteppedClock()
    ledger = Ledger.open(sqlite_url, clock=clock)
    requests = [chat_request(index, f"[[hang]] {index}" if index >= 20 else f"say {index}") for index in range(40)]
    batch = make_batch(ledger, store, [requests[:20], requests[20:]], window_seconds=3600)
    with fake_engine.running() as fake:
        # One chunk after the other: of two that are loaded at once either may be there first, and fill the engine.
        worker = make_worker(ledger, store, quick(settings, leases=1), attached(fake.url))
        with in_thread(worker):
            wait_until(lambda: fake.stats().answered == 20 and fake.stats().in_flight == 16, "the rest hangs")
            ledger.workers.ask_to_leave(worker.worker_id)
    clock.advance(3601)
    assert ledger.batches.expire_due() == [batch.batch_id]
    batch = ended(batch, ledger, store, settings)
    assert batch.status is BatchStatus.EXPIRED
    assert (batch.completed, batch.expired) == (20, 20)
    output, errors = lines(store, batch.output_key), lines(store, batch.error_key)
    assert len(output) == 20
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    assert batch.output_tokens == sum(line["response"]["body"]["usage"]["completion_tokens"] for line in output)
    ledger.close()


def test_18_a_batch_runs_on_the_bytes_that_were_there_when_its_file_was_taken(
    sqlite_url: str, store: ObjectStore, settings: Settings, tmp_path: Path
) -> None:
    """The customer overwrites the object while the batch runs, and deletes it."""
    ledger = Ledger.open(sqlite_url)
    small = intake_settings(settings, write_model(tmp_path / "model"), tmp_path / "scratch")
    inbox = keys.inbox("acme", "questions")
    store.put(inbox, file_of([request_line(number) for number in range(3)]))
    parts: dict[str, Any] = {"ledger": ledger, "store": store, "settings": small}
    drop.take_drops(**parts, limit=50)
    (batch,) = ledger.batches.recent()
    store.put(inbox, file_of([request_line(number) for number in range(100, 105)]))
    ops.validate(batch.batch_id, **parts, run_id="intake")
    store.delete(inbox)
    ops.write_chunks(batch.batch_id, **parts, run_id="intake")
    with fake_engine.running() as fake:
        worker = msgspec.structs.replace(small, models={**settings.models, **small.models})
        make_worker(ledger, store, quick(worker), attached(fake.url)).run()
    batch = ended(batch, ledger, store, small)
    outbox.deliver(batch.batch_id, **parts)
    delivered = lines(store, keys.outbox("acme", "questions", "output.jsonl"))
    assert [line["custom_id"] for line in delivered] == ["request-0", "request-1", "request-2"]
    ledger.close()
