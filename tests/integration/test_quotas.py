"""What a customer may have at once is counted in the transaction that changes a status, and freed in it as well."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from batch_pipeline.errors import CustomerError, LimitReached
from batch_pipeline.intake import drop, ops, options, submission
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, BatchStatus, Door
from batch_pipeline.results import merge, outbox
from batch_pipeline.results.verify import verify
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys
from batch_pipeline.wire import codes
from tests.fakes.ledger_values import MODEL, finish, intake_result, new_batch, result_of, submitted

SMALL = "smollm2-135m"


def recorded(ledger: Ledger, name: str, customer: str = "acme") -> Batch:
    """A batch of 100 prompt tokens."""
    created = ledger.batches.create(new_batch(name, customer))
    return ledger.batches.record_intake(created.batch_id, intake_result(requests=10, prompt_tokens=10))


def test_a_cancelled_batch_frees_its_quota_at_once(ledger: Ledger) -> None:
    ledger.customers.add("acme", limits={"max_enqueued_tokens": 150})
    first = recorded(ledger, "first")
    refused = recorded(ledger, "second")
    assert (first.status, refused.outcome) == (BatchStatus.IN_PROGRESS, BatchStatus.FAILED)
    [lease] = ledger.chunks.lease("w", MODEL, 1)
    ledger.batches.cancel(first.batch_id)
    assert ledger.quotas.enqueued("acme") == {}
    # Although a worker still has a chunk of it.
    assert ledger.batches.get(first.batch_id).status is BatchStatus.CANCELLING
    assert recorded(ledger, "third").status is BatchStatus.IN_PROGRESS
    ledger.batches.cancel(first.batch_id)
    ledger.chunks.release(lease.ref, "stopped")
    assert ledger.quotas.enqueued("acme") == {MODEL: 100}
    assert ledger.quotas.kept() == ledger.quotas.recount()


def test_a_batch_over_the_quota_fails_with_the_figures(ledger: Ledger) -> None:
    ledger.customers.add("acme", limits={"max_enqueued_tokens": 150})
    recorded(ledger, "first")
    refused = recorded(ledger, "second")
    assert (refused.status, refused.outcome) == (BatchStatus.VALIDATING, BatchStatus.FAILED)
    [error] = refused.errors
    assert error.code == "token_limit_exceeded"
    assert all(figure in error.message for figure in ("150", "100", MODEL, "acme"))
    assert [chunk.state for chunk in ledger.chunks.of(refused.batch_id)] == ["cancelled"]
    assert finish(ledger, refused.batch_id).status is BatchStatus.FAILED
    assert ledger.quotas.enqueued("acme") == {MODEL: 100}


def test_another_customer_and_another_model_have_quotas_of_their_own(ledger: Ledger) -> None:
    for customer in ("acme", "globex"):
        ledger.customers.add(customer, limits={"max_enqueued_tokens": 300})
        batch = submitted(ledger, customer, [MODEL, "model-b"], customer)
        assert batch.status is BatchStatus.IN_PROGRESS
    expected = {("acme", MODEL): 200, ("acme", "model-b"): 200, ("globex", MODEL): 200, ("globex", "model-b"): 200}
    assert ledger.quotas.kept() == expected


def test_quota_is_freed_when_the_last_chunk_stops_and_at_the_deadline(ledger: Ledger) -> None:
    done, late = recorded(ledger, "done"), recorded(ledger, "late", "globex")
    for lease in ledger.chunks.lease("w", MODEL, 2):
        if lease.ref.batch_id == done.batch_id:
            ledger.chunks.commit(lease.ref, result_of(lease))
    assert ledger.batches.get(done.batch_id).status is BatchStatus.FINALIZING
    assert ledger.quotas.kept() == {("globex", MODEL): 100}
    ledger.batches.cancel(late.batch_id)
    assert ledger.quotas.kept() == ledger.quotas.recount() == {}


def test_a_batch_cancelled_before_its_intake_takes_nothing(ledger: Ledger) -> None:
    created = ledger.batches.create(new_batch("early"))
    ledger.batches.cancel(created.batch_id)
    ledger.batches.record_intake(created.batch_id, intake_result())
    assert ledger.quotas.kept() == {}


def test_open_batches_are_limited_and_a_repeated_creation_is_not_counted(ledger: Ledger) -> None:
    ledger.customers.add("acme", limits={"max_open_batches": 1})
    first = ledger.batches.create(new_batch("first"))
    with pytest.raises(LimitReached, match="acme has 1 batches that wait or run, and may have 1"):
        ledger.batches.create(new_batch("second"))
    assert ledger.batches.create(new_batch("first")) == first
    assert ledger.batches.create(new_batch("other", "globex")).customer == "globex"
    ledger.batches.record_intake(first.batch_id, intake_result([]))
    finish(ledger, first.batch_id)
    assert ledger.batches.create(new_batch("second")).status is BatchStatus.VALIDATING


def test_of_many_that_want_the_last_places_exactly_those_get_them(ledger: Ledger) -> None:
    ledger.customers.add("acme", limits={"max_open_batches": 3, "max_enqueued_tokens": 250})

    def create(number: int) -> str | None:
        try:
            return ledger.batches.create(new_batch(f"batch-{number}")).batch_id
        except LimitReached:
            return None

    def record(batch_id: str) -> BatchStatus | None:
        return ledger.batches.record_intake(batch_id, intake_result(prompt_tokens=10)).outcome

    with ThreadPoolExecutor(8) as pool:
        created = [batch_id for batch_id in pool.map(create, range(12)) if batch_id is not None]
        assert len(created) == 3
        assert sorted(map(str, pool.map(record, created))) == ["None", "None", "failed"]
    assert ledger.quotas.kept() == ledger.quotas.recount() == {("acme", MODEL): 200}


def lines(count: int, model: str = SMALL) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": "one two three"}], "max_tokens": 4}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    return b"".join(json.dumps({"custom_id": f"r{n}", **line}).encode() + b"\n" for n in range(count))


def take(ledger: Ledger, store: ObjectStore, settings: Settings, name: str, data: bytes) -> str | None:
    store.put(keys.inbox("acme", name), data)
    [taken] = drop.take_drops(ledger=ledger, store=store, settings=settings, limit=10)
    return taken.batch_id


def shown(store: ObjectStore, name: str) -> dict[str, object]:
    status: dict[str, object] = json.loads(store.get(keys.outbox("acme", name, outbox.STATUS)))
    return status


def test_the_drop_folder_says_in_its_status_which_limit_was_reached(
    ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    ledger.customers.add("acme", limits={"max_open_batches": 1, "max_file_bytes": 5000, "max_enqueued_tokens": 1})
    batch_id = take(ledger, store, settings, "first", lines(2))
    assert batch_id is not None
    assert take(ledger, store, settings, "second", lines(2)) is None
    assert "acme has 1 batches that wait or run" in json.dumps(shown(store, "second"))
    assert codes.BATCH_LIMIT_EXCEEDED in json.dumps(shown(store, "second"))
    assert take(ledger, store, settings, "large", lines(100)) is None
    assert "at most 5000 are taken" in json.dumps(shown(store, "large"))

    ops.validate(batch_id, ledger=ledger, store=store, settings=settings)
    ops.write_chunks(batch_id, ledger=ledger, store=store, settings=settings)
    merge.merge(batch_id, ledger=ledger, store=store, settings=settings, run_id="run")
    outbox.publish_status(batch_id, ledger=ledger, store=store, settings=settings)
    status = shown(store, "first")
    assert status["status"] == "failed"
    assert "may have 1 tokens enqueued, 0 are, and this batch has" in json.dumps(status)
    errors = store.get(keys.outbox("acme", "first", outbox.ERRORS)).splitlines()
    assert [json.loads(line)["error"]["code"] for line in errors] == [codes.TOKEN_LIMIT_EXCEEDED] * 2
    assert verify(batch_id, ledger=ledger, store=store).holds


def test_a_customers_own_limits_count_for_what_is_submitted_and_validated(
    ledger: Ledger, store: ObjectStore, settings: Settings, tmp_path: Path
) -> None:
    ledger.customers.add("acme", limits={"max_requests": 3, "max_file_bytes": 3000})

    def submit(count: int) -> Batch:
        file = tmp_path / "file.jsonl"
        file.write_bytes(lines(count))
        return submission.submit(
            file,
            customer="acme",
            name="file",
            door=Door.CLI,
            options=options.choose(settings.intake),
            ledger=ledger,
            store=store,
            settings=settings,
        ).batch

    with pytest.raises(CustomerError, match="at most 3000 are taken"):
        submit(100)
    batch = submit(4)
    ops.validate(batch.batch_id, ledger=ledger, store=store, settings=settings)
    ops.write_chunks(batch.batch_id, ledger=ledger, store=store, settings=settings)
    found = ledger.batches.get(batch.batch_id)
    assert found.outcome is BatchStatus.FAILED
    assert [error.code for error in found.errors] == [codes.TOO_MANY_REQUESTS]
    assert "3" in found.errors[0].message


def test_a_submission_over_the_limit_leaves_no_bytes_behind(
    ledger: Ledger, store: ObjectStore, settings: Settings, tmp_path: Path
) -> None:
    ledger.customers.add("acme", limits={"max_open_batches": 1})
    ledger.batches.create(new_batch("first"))
    file = tmp_path / "file.jsonl"
    file.write_bytes(lines(1))
    chosen = options.choose(settings.intake)
    with pytest.raises(LimitReached):
        submission.submit(
            file,
            customer="acme",
            name="file",
            door=Door.CLI,
            options=chosen,
            ledger=ledger,
            store=store,
            settings=settings,
        )
    assert list(store.list(keys.BATCHES)) == []


def test_limits_that_cannot_be_are_refused(ledger: Ledger) -> None:
    with pytest.raises(CustomerError, match="max_requests must be at least 1"):
        ledger.customers.add("acme", limits={"max_requests": 0})
    with pytest.raises(CustomerError, match="is no limit"):
        ledger.customers.add("acme", limits={"max_dreams": 1})
    ledger.customers.add("acme", weight=2.0, limits={"max_requests": 5})
    changed = ledger.customers.set("acme", limits={"max_requests": None, "max_open_batches": 7})
    assert (changed.weight, changed.own_limits) == (2.0, {"max_open_batches": 7})
    assert changed.limits == msgspec.structs.replace(ledger.customers.defaults, max_open_batches=7)
