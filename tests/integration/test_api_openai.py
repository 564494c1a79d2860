"""The official `openai` SDK, unchanged but for base URL and key, uploads, submits, follows, cancels and fetches."""

from __future__ import annotations

import hashlib
import io
import json
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch
from openai.types.responses import Response

from batch_pipeline.intake import drop
from batch_pipeline.ledger import Ledger, schema
from batch_pipeline.results import merge, outbox
from batch_pipeline.results.verify import verify
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys
from tests.fakes import engine as fake_engine
from tests.fakes import service
from tests.fakes.openai_client import CHAT, MODEL, Run, create, line, upload, validate
from tests.fakes.workers import attached, make_worker, quick

one_ledger = pytest.mark.parametrize("ledger_url", ["sqlite"], indirect=True)
"""Of tests that are about bytes and words: which database there is does not matter to them."""
postgres = pytest.mark.parametrize("ledger_url", ["postgres"], indirect=True)


def test_a_batch_goes_from_upload_to_results(
    client: openai.OpenAI, run: Run, ledger: Ledger, store: ObjectStore
) -> None:
    data = line("a") + b"{bad\n" + line("b") + line("c", "[[400]] no")
    file = upload(client, data)
    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(data), "requests.jsonl", "batch")
    assert client.files.wait_for_processing(file.id).status == "processed"
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"team": "search"}
    )
    assert (batch.object, batch.status, batch.input_file_id) == ("batch", "validating", file.id)
    assert (batch.completion_window, batch.metadata) == ("24h", {"team": "search"})
    assert batch.expires_at == batch.created_at + 86_400
    assert batch.output_file_id is batch.errors is batch.completed_at is batch.in_progress_at is None
    assert "waiting for validation" in batch.model_extra["reason"]

    run(batch.id)
    done = client.batches.retrieve(batch.id)
    assert (done.status, done.model) == ("completed", MODEL)
    assert done.completed_at is not None
    assert done.in_progress_at is not None
    assert done.finalizing_at is not None
    assert done.model_extra["reason"] is None
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (4, 2, 2)
    assert done.errors is not None
    assert done.errors.data is not None
    assert [(error.code, error.line) for error in done.errors.data] == [("invalid_json_line", 2)]
    assert done.usage is not None
    assert done.usage.output_tokens > 0
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens

    output = [json.loads(entry) for entry in client.files.content(done.output_file_id).text.splitlines()]
    assert [entry["custom_id"] for entry in output] == ["a", "b"]
    assert all(entry["error"] is None and entry["response"]["status_code"] == 200 for entry in output)
    assert all(entry["id"].startswith("batch_req_") and entry["response"]["request_id"] for entry in output)
    bad, refused = [json.loads(entry) for entry in client.files.content(done.error_file_id).text.splitlines()]
    assert (bad["response"], bad["error"]["code"], bad["error"]["line"]) == (None, "invalid_json_line", 2)
    assert (refused["custom_id"], refused["error"], refused["response"]["status_code"]) == ("c", None, 400)
    assert set(refused["response"]["body"]["error"]) >= {"message", "type", "param", "code"}
    shown = client.files.retrieve(done.output_file_id)
    assert (shown.purpose, shown.bytes) == ("batch_output", len(client.files.content(shown.id).content))
    assert verify(batch.id, ledger=ledger, store=store).holds


@one_ledger
def test_a_batch_of_responses_goes_from_upload_to_results(
    client: openai.OpenAI, run: Run, ledger: Ledger, store: ObjectStore
) -> None:
    def asked(custom_id: str, given: object, **more: object) -> bytes:
        body = {"model": MODEL, "input": given, **more}
        entry = {"custom_id": custom_id, "method": "POST", "url": "/v1/responses", "body": body}
        return json.dumps(entry).encode() + b"\n"

    parts = [{"role": "user", "content": [{"type": "input_text", "text": "one two"}]}]
    data = (
        asked("text", "one two three", store=True)
        + asked("items", parts, instructions="Be brief.", max_output_tokens=100)
        + asked("cut", "one", max_output_tokens=2)
        + asked("refused", "[[400]] no")
        + asked("broken", "[[failed]]")
        + asked("stateful", "one", previous_response_id="resp_1")
    )
    batch = create(client, data, endpoint="/v1/responses")
    run(batch.id)
    done = client.batches.retrieve(batch.id)
    assert (done.status, done.endpoint, done.model) == ("completed", "/v1/responses", MODEL)
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (3, 3)
    output = [json.loads(entry) for entry in client.files.content(done.output_file_id).text.splitlines()]
    answers = {entry["custom_id"]: Response.model_validate(entry["response"]["body"]) for entry in output}
    assert {name: answer.status for name, answer in answers.items()} == {
        "text": "completed",
        "items": "completed",
        "cut": "incomplete",
    }
    assert all(answer.output_text.startswith("The answer is") for answer in answers.values())
    assert done.usage is not None
    usages = [answer.usage for answer in answers.values()]
    assert done.usage.input_tokens == sum(usage.input_tokens for usage in usages if usage)
    assert done.usage.output_tokens == sum(usage.output_tokens for usage in usages if usage) > 0
    cached = sum(usage.input_tokens_details.cached_tokens for usage in usages if usage)
    assert done.usage.input_tokens_details.cached_tokens == cached > 0
    errors = [json.loads(entry) for entry in client.files.content(done.error_file_id).text.splitlines()]
    said = {entry["custom_id"]: entry for entry in errors}
    assert said["refused"]["response"]["status_code"] == 400
    assert said["broken"]["error"]["code"] == "engine_error"
    assert '200 with a response that is "failed"' in said["broken"]["error"]["message"]
    assert "previous_response_id" in said["stateful"]["error"]["message"]
    assert verify(batch.id, ledger=ledger, store=store).holds


def test_a_batch_of_which_all_requests_fail_completes_without_an_output_file(client: openai.OpenAI, run: Run) -> None:
    batch = create(client, line("a", "[[400]]") + line("b", "[[400]]"))
    run(batch.id)
    done = client.batches.retrieve(batch.id)
    assert (done.status, done.output_file_id) == ("completed", None)
    assert len(client.files.content(done.error_file_id).text.splitlines()) == 2


@one_ledger
def test_bad_content_is_found_in_validating_and_not_at_creation(client: openai.OpenAI, run: Run) -> None:
    for data, code in (
        (b"", "empty_batch"),
        (b"{bad\n", "invalid_json_line"),
        (line("a", model="unknown"), "model_not_found"),
        (line("a").replace(b"/chat/completions", b"/completions"), "url_mismatch"),
    ):
        batch = create(client, data)
        assert batch.status == "validating"
        run(batch.id)
        failed = client.batches.retrieve(batch.id)
        assert (failed.status, failed.output_file_id) == ("failed", None)
        assert failed.failed_at is not None
        assert failed.errors is not None
        assert failed.errors.data is not None
        assert code in [error.code for error in failed.errors.data]


@one_ledger
def test_a_strict_batch_fails_for_one_bad_line(client: openai.OpenAI, run: Run) -> None:
    batch = create(client, line("a") + b"{bad\n", extra_body={"on_invalid": "fail"})
    run(batch.id)
    assert client.batches.retrieve(batch.id).status == "failed"


def test_cancel_keeps_what_is_finished_and_after_the_end_is_an_error(
    client: openai.OpenAI, run: Run, ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    batch = create(client, line("a") + line("b"))
    assert client.batches.cancel(batch.id).status == "cancelling"
    again = client.batches.cancel(batch.id)
    assert again.status == "cancelling"
    assert again.cancelling_at is not None
    run(batch.id)
    ended = client.batches.retrieve(batch.id)
    assert (ended.status, ended.output_file_id) == ("cancelled", None)
    assert ended.cancelled_at is not None
    codes = [json.loads(entry)["error"]["code"] for entry in client.files.content(ended.error_file_id).iter_lines()]
    assert codes == ["batch_cancelled"] * 2
    with pytest.raises(openai.BadRequestError, match="cancelled already"):
        client.batches.cancel(batch.id)


def test_cancels_and_polls_that_race_agree_on_one_story(
    client: openai.OpenAI, ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    batch = create(client, b"".join(line(str(number)) for number in range(200)))
    validate(batch.id, ledger, store, settings)
    order = ["in_progress", "cancelling", "finalizing", "cancelled", "completed"]
    stories: list[list[int]] = []

    def poll(number: int) -> None:
        story: list[int] = []
        stories.append(story)
        while not story or story[-1] < order.index("finalizing"):
            if number == 0 and ledger.batches.lanes(batch.id)[0].completed:
                client.batches.cancel(batch.id)
            story.append(order.index(client.batches.retrieve(batch.id).status))

    with fake_engine.running("--delay", "0.05") as fake, ThreadPoolExecutor(6) as pool:
        polls = [pool.submit(poll, number) for number in range(6)]
        make_worker(ledger, store, quick(settings, model={"max_in_flight": 8}), attached(fake.url)).run()
        for each in polls:
            each.result()
    merge.merge(batch.id, ledger=ledger, store=store, settings=settings, run_id="merge")
    assert all(story == sorted(story) for story in stories)
    done = client.batches.retrieve(batch.id)
    assert done.status in ("cancelled", "completed")
    texts = [client.files.content(each).text for each in (done.output_file_id, done.error_file_id) if each]
    labels = [json.loads(entry)["custom_id"] for text in texts for entry in text.splitlines()]
    assert sorted(labels, key=int) == [str(number) for number in range(200)]


def test_a_poll_never_sees_completed_before_the_files(client: openai.OpenAI, run: Run) -> None:
    batch = create(client, line("a"))
    seen: list[Batch] = []
    ended = threading.Event()

    def poll() -> None:
        while not ended.is_set():
            seen.append(client.batches.retrieve(batch.id))

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        run(batch.id)
    finally:
        ended.set()
        poller.join()
    assert client.batches.retrieve(batch.id).status == "completed"
    assert all(entry.output_file_id for entry in seen if entry.status == "completed")
    for entry in seen:
        if entry.output_file_id:
            assert client.files.content(entry.output_file_id).content


def test_the_same_creation_twice_with_one_key_is_one_batch(client: openai.OpenAI) -> None:
    file = upload(client, line("a"))

    def create(_number: int) -> str:
        return client.batches.create(
            input_file_id=file.id,
            endpoint=CHAT,
            completion_window="24h",
            extra_headers={"Idempotency-Key": "order-17"},
        ).id

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(create, range(8)))) == 1
    client.files.delete(file.id)
    first = create(0)
    assert [batch.id for batch in client.batches.list()] == [first]
    with pytest.raises(openai.BadRequestError, match="another completion window"):
        client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="48h", extra_headers={"Idempotency-Key": "order-17"}
        )


@one_ledger
def test_names_in_camel_case_are_taken(served: service.Running, client: openai.OpenAI) -> None:
    body = {
        "inputFileId": upload(client, line("a")).id,
        "endpoint": CHAT,
        "completionWindow": "90m",
        "outputExpiresAfter": {"anchor": "created_at", "seconds": 3600},
    }
    answer = httpx.post(f"{served.url}/v1/batches", json=body, headers={"x-api-key": client.api_key})
    assert (answer.status_code, answer.json()["completion_window"]) == (200, "90m")


@one_ledger
def test_a_window_is_given_back_as_it_was_asked_for(client: openai.OpenAI) -> None:
    for window in ("1h", "24h", "168h", "7d", "5400s"):
        assert create(client, line("a"), completion_window=window).completion_window == window


UNGRANTABLE: list[tuple[dict[str, Any], str]] = [
    ({"completion_window": "30m"}, "completion window"),
    ({"completion_window": "soon"}, "completion window"),
    ({"completion_window": "8d"}, "completion window"),
    ({"endpoint": "/v1/moderations"}, "endpoint"),
    ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
    ({"metadata": {"k" * 65: "x"}}, "metadata"),
    ({"metadata": {"k": "v" * 513}}, "metadata"),
    ({"metadata": {"k": "a\x00b"}}, "metadata"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after.seconds"),
    ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
    ({"extra_body": {"on_invalid": "perhaps"}}, "on_invalid"),
    ({"extra_body": {"name": "../x"}}, "name"),
    ({"extra_body": {"input_file_id": None}}, "input_file_id"),
    ({"extra_headers": {"Idempotency-Key": "x" * 257}}, "Idempotency-Key"),
]


@one_ledger
def test_a_creation_that_cannot_be_granted_says_why(client: openai.OpenAI) -> None:
    for changes, said in UNGRANTABLE:
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            create(client, line("a"), **changes)
        assert refused.value.body is not None
        assert set(refused.value.body) == {"message", "type", "param", "code"}
    assert list(client.batches.list()) == []


def test_output_files_expire_when_their_owner_has_asked_for_it(client: openai.OpenAI, run: Run, ledger: Ledger) -> None:
    batch = create(client, line("a"), output_expires_after={"anchor": "created_at", "seconds": 3600})
    run(batch.id)
    done = client.batches.retrieve(batch.id)
    shown = client.files.retrieve(done.output_file_id)
    assert shown.expires_at == shown.created_at + 3600
    with ledger._database.write() as tx:
        tx.connection.execute(schema.files.update().values(expires_at=tx.now))
    with pytest.raises(openai.NotFoundError):
        client.files.content(done.output_file_id)
    assert list(client.files.list()) == []


def test_lists_are_paged_through_without_loss(client: openai.OpenAI) -> None:
    files = [upload(client, line(str(number)), f"{number}.jsonl").id for number in range(5)]
    batches = [client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h").id for file in files]
    assert [batch.id for batch in client.batches.list(limit=2)] == batches[::-1]
    page = client.batches.list(limit=2)
    assert (page.has_more, [batch.id for batch in page.data]) == (True, batches[:2:-1])
    assert [file.id for file in client.files.list(limit=2)] == files[::-1]
    assert [file.id for file in client.files.list(limit=2, order="asc", after=files[1])] == files[2:]
    assert list(client.files.list(purpose="batch_output")) == []
    assert client.batches.list(after=batches[0]).data == []
    for limit in (0, 101):
        with pytest.raises(openai.BadRequestError, match="limit"):
            client.batches.list(limit=limit)
    with pytest.raises(openai.BadRequestError, match="Idempotency-Key"):
        client.batches.list(extra_query={"idempotency_key": "x\x00y"})
    for broken in ("batch_unknown", "x\x00y", "ü"):
        with pytest.raises(openai.NotFoundError):
            client.batches.list(after=broken)


def test_a_batch_runs_on_the_bytes_that_were_there_when_it_was_created(
    client: openai.OpenAI, run: Run, store: ObjectStore
) -> None:
    file = upload(client, line("a"))
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    deleted = client.files.delete(file.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (file.id, True, "file")
    assert list(store.list(keys.FILES)) == []
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    run(batch.id)
    done = client.batches.retrieve(batch.id)
    assert (done.status, done.input_file_id) == ("completed", file.id)


@one_ledger
def test_large_files_go_through_in_parts_and_come_back_the_same(
    client: openai.OpenAI, store: ObjectStore, served: service.Running
) -> None:
    data = secrets.token_bytes(1024) * 20_000
    file = client.files.create(
        file=("large.jsonl", io.BytesIO(data)),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert file.bytes == len(data)
    assert file.expires_at == file.created_at + 7200
    assert hashlib.sha256(client.files.content(file.id).content).digest() == hashlib.sha256(data).digest()
    url, key = f"{served.url}/v1/files/{file.id}/content", {"x-api-key": client.api_key}

    def part(wanted: str) -> httpx.Response:
        return httpx.get(url, headers={**key, "Range": wanted})

    middle = part("bytes=1000-1999")
    assert (middle.status_code, middle.content) == (206, data[1000:2000])
    assert middle.headers["content-range"] == f"bytes 1000-1999/{len(data)}"
    assert part("bytes=-10").content == data[-10:]
    assert part(f"bytes={len(data) - 5}-").content == data[-5:]
    assert part(f"bytes={len(data) - 5}-{len(data) + 5}").content == data[-5:]
    assert part("bytes=0-1,5-6").status_code == 200
    beyond = part(f"bytes={len(data)}-")
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{len(data)}")


@one_ledger
def test_an_upload_that_cannot_be_taken_leaves_nothing_behind(
    client: openai.OpenAI, served: service.Running, ledger: Ledger, store: ObjectStore
) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a.jsonl", line("a")), purpose="assistants")
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        client.files.create(
            file=("a.jsonl", line("a")), purpose="batch", expires_after={"anchor": "created_at", "seconds": 1}
        )
    ledger.customers.set("acme", limits={"max_file_bytes": 3_000_000})
    with pytest.raises(openai.APIStatusError, match="more than 3000000 bytes") as refused:
        upload(client, b"x" * 5_000_000)
    assert refused.value.status_code == 413
    boundary = {"Content-Type": "multipart/form-data; boundary=b", "x-api-key": client.api_key}
    begun = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nhalf'
    for body in (begun, b"nonsense", b"--b--\r\n", b""):
        answer = httpx.post(f"{served.url}/v1/files", content=body, headers=boundary)
        assert answer.status_code == 400, body
    answer = httpx.post(f"{served.url}/v1/files", content=b"{}", headers={"x-api-key": client.api_key})
    assert (answer.status_code, "multipart" in answer.json()["error"]["message"]) == (400, True)
    assert list(client.files.list()) == []
    assert list(store.list(keys.FILES)) == []
    assert list(store.uploads(keys.FILES)) == []


@one_ledger
def test_a_file_may_have_any_name(client: openai.OpenAI) -> None:
    for name, shown in (
        ("Anfragen für März.jsonl", "Anfragen für März.jsonl"),
        ("请求.jsonl", "请求.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("C:\\files\\a.jsonl", "a.jsonl"),
        ("x" * 400, "x" * 255),
    ):
        assert upload(client, line("a"), name).filename == shown


@one_ledger
def test_a_file_may_come_in_parts(client: openai.OpenAI, store: ObjectStore) -> None:
    parts = [b"a" * (5 * 1024 * 1024 + 1), b"b" * 1000, b"c" * (6 * 1024 * 1024)]
    data = b"".join(parts)
    begun = client.uploads.create(bytes=len(data), filename="big.jsonl", mime_type="application/jsonl", purpose="batch")
    assert (begun.status, begun.bytes, begun.file) == ("pending", len(data), None)
    given = [client.uploads.parts.create(begun.id, data=part) for part in reversed(parts)]
    assert {part.upload_id for part in given} == {begun.id}
    ordered = [part.id for part in reversed(given)]
    for wrong in (ordered[:2], [*ordered[:2], ordered[1]], [*ordered[:2], "part_none"]):
        with pytest.raises(openai.BadRequestError):
            client.uploads.complete(begun.id, part_ids=wrong)
    with pytest.raises(openai.BadRequestError, match="md5"):
        client.uploads.complete(begun.id, part_ids=ordered, md5="0" * 32)
    done = client.uploads.complete(begun.id, part_ids=ordered)
    assert (done.status, done.file is not None) == ("completed", True)
    assert done.file is not None
    assert client.files.content(done.file.id).content == data
    again = client.uploads.complete(begun.id, part_ids=ordered)
    assert again.file is not None
    assert again.file.id == done.file.id
    assert list(store.list(keys.UPLOADS)) == []
    assert [file.id for file in client.files.list()] == [done.file.id]
    with pytest.raises(openai.BadRequestError, match="completed"):
        client.uploads.parts.create(begun.id, data=b"x")


@one_ledger
def test_parts_are_compared_with_an_md5_and_a_cancelled_upload_is_gone(
    client: openai.OpenAI, store: ObjectStore
) -> None:
    one = client.uploads.create(bytes=3, filename="a.jsonl", mime_type="text/plain", purpose="batch")
    part = client.uploads.parts.create(one.id, data=b"abc")
    md5 = hashlib.md5(b"abc", usedforsecurity=False).hexdigest()
    assert client.uploads.complete(one.id, part_ids=[part.id], md5=md5).status == "completed"
    other = client.uploads.create(bytes=3, filename="a.jsonl", mime_type="text/plain", purpose="batch")
    client.uploads.parts.create(other.id, data=b"abc")
    assert client.uploads.cancel(other.id).status == client.uploads.cancel(other.id).status == "cancelled"
    assert list(store.list(keys.UPLOADS)) == []
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.uploads.complete(other.id, part_ids=[part.id])


def test_a_dropped_batch_is_a_batch_of_the_api_with_all_its_files(
    client: openai.OpenAI, run: Run, ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    store.put(keys.inbox("acme", "nightly"), line("a"))
    drop.take_drops(ledger=ledger, store=store, settings=settings, limit=1)
    [batch] = client.batches.list()
    run(batch.id)
    done = client.batches.retrieve(batch.id)
    assert client.files.content(done.input_file_id).content == line("a")
    assert json.loads(client.files.content(done.output_file_id).text)["custom_id"] == "a"
    assert {file.id for file in client.files.list()} == {done.input_file_id, done.output_file_id}
    # Its bytes belong to the batch: what is deleted is only not shown any more.
    client.files.delete(done.output_file_id)
    assert verify(batch.id, ledger=ledger, store=store).holds


def test_the_files_of_a_batch_of_the_api_are_delivered_to_the_outbox(
    client: openai.OpenAI, run: Run, ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    batch = create(client, line("a"), extra_body={"name": "morning"})
    other = create(client, line("b"))
    run(batch.id)
    for each in (batch, other):
        outbox.publish_status(each.id, ledger=ledger, store=store, settings=settings)
    done = client.batches.retrieve(batch.id)
    delivered = store.get(keys.outbox("acme", "morning", "output.jsonl"))
    assert client.files.content(done.output_file_id).content == delivered
    assert json.loads(store.get(keys.outbox("acme", other.id, "status.json")))["id"] == other.id


def test_limits_are_told_with_their_figures(client: openai.OpenAI, run: Run, ledger: Ledger) -> None:
    ledger.customers.set("acme", limits={"max_open_batches": 1, "max_enqueued_tokens": 1})
    batch = create(client, line("a"))
    with pytest.raises(openai.RateLimitError, match="acme has 1 batches that wait or run, and may have 1"):
        create(client, line("a"))
    run(batch.id)
    failed = client.batches.retrieve(batch.id)
    assert failed.status == "failed"
    assert failed.errors is not None
    assert failed.errors.data is not None
    assert [error.code for error in failed.errors.data] == ["token_limit_exceeded"]


@postgres
def test_two_hundred_uploads_and_polls_at_once_lose_nothing(client: openai.OpenAI) -> None:
    def one(number: int) -> tuple[str, str]:
        batch = create(client, line(f"request-{number}"))
        client.batches.retrieve(batch.id)
        return batch.id, client.files.content(batch.input_file_id).text

    with ThreadPoolExecutor(200) as pool:
        made = list(pool.map(one, range(200)))
    assert [json.loads(text)["custom_id"] for _, text in made] == [f"request-{number}" for number in range(200)]
    assert {batch.id for batch in client.batches.list(limit=100)} == {batch_id for batch_id, _ in made}
