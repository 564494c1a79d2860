"""The official `anthropic` SDK, unchanged but for base URL and key, creates, follows, cancels, fetches and deletes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import msgspec
import pytest
from anthropic.types.messages import MessageBatch

from batch_pipeline.intake import ops
from batch_pipeline.ledger import Ledger
from batch_pipeline.models import MESSAGES
from batch_pipeline.results import merge, outbox
from batch_pipeline.results.usage import day_of, usage
from batch_pipeline.results.verify import verify
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys
from tests.fakes import engine as fake_engine
from tests.fakes import service
from tests.fakes.workers import attached, make_worker, quick

MODEL = "smollm2-135m"


def params(prompt: str = "one two three", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 16, "messages": [{"role": "user", "content": prompt}], **more}


def request(custom_id: str, prompt: str = "one two three", **more: Any) -> Any:
    return {"custom_id": custom_id, "params": params(prompt, **more)}


BOTH = pytest.mark.parametrize("ledger_url", ["sqlite_url", "postgres_url"], indirect=True)
"""The other tests run on SQLite alone: what they ask of the ledger is asked on both by these, or by its own tests."""


@pytest.fixture
def ledger_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty ledger database: SQLite's, unless a test is marked."""
    url: str = request.getfixturevalue(getattr(request, "param", "sqlite_url"))
    return url


@pytest.fixture
def served(ledger: Ledger, store: ObjectStore, settings: Settings) -> Iterator[service.Running]:
    with service.running(ledger, store, settings) as running:
        yield running


Connect = Callable[[str], anthropic.Anthropic]
Run = Callable[[str], None]


@pytest.fixture
def connect(served: service.Running, ledger: Ledger) -> Iterator[Connect]:
    """Returns the SDK's client of a customer."""
    opened = []

    def connect(customer: str) -> anthropic.Anthropic:
        opened.append(
            anthropic.Anthropic(base_url=served.url, api_key=service.new_key(ledger, customer), max_retries=0)
        )
        return opened[-1]

    yield connect
    for client in opened:
        client.close()


@pytest.fixture
def client(connect: Connect) -> anthropic.Anthropic:
    return connect("acme")


@pytest.fixture
def run(ledger: Ledger, store: ObjectStore, settings: Settings) -> Iterator[Run]:
    """Do what Dagster's runs do for a batch, from validation to its end."""
    with fake_engine.running() as fake:

        def run(shown: str) -> None:
            batch_id = shown.removeprefix("msg")
            ops.validate(batch_id, ledger=ledger, store=store, settings=settings)
            ops.write_chunks(batch_id, ledger=ledger, store=store, settings=settings)
            if ledger.batches.get(batch_id).status == "in_progress":
                make_worker(ledger, store, quick(settings), attached(fake.url)).run()
            merge.merge(batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
            outbox.deliver(batch_id, ledger=ledger, store=store, settings=settings)

        yield run


def counts(batch: MessageBatch) -> tuple[int, int, int, int, int]:
    found = batch.request_counts
    return (found.processing, found.succeeded, found.errored, found.canceled, found.expired)


@BOTH
def test_a_batch_from_its_creation_to_its_results(
    client: anthropic.Anthropic, run: Run, ledger: Ledger, store: ObjectStore
) -> None:
    made = client.messages.batches.create(
        requests=[
            request("a", system="Be brief."),
            request("b", "[[400]] refused by the engine"),
            request("c", max_tokens=0),
            request("d", model="unknown"),
            request("e", temperature=0.5, stop_sequences=["x"], metadata={"user_id": "u"}),
        ]
    )
    assert made.id.startswith("msgbatch_")
    assert (made.type, made.processing_status, counts(made)) == ("message_batch", "in_progress", (5, 0, 0, 0, 0))
    assert made.ended_at is made.results_url is made.cancel_initiated_at is made.archived_at is None
    assert (made.expires_at - made.created_at).total_seconds() == 86_400
    with pytest.raises(anthropic.AnthropicError, match="results_url"):
        client.messages.batches.results(made.id)

    run(made.id)
    ended = client.messages.batches.retrieve(made.id)
    assert (ended.processing_status, counts(ended)) == ("ended", (0, 2, 3, 0, 0))
    assert ended.ended_at is not None
    assert ended.results_url is not None
    assert ended.results_url.startswith(str(client.base_url))
    results = {result.custom_id: result.result for result in client.messages.batches.results(made.id)}
    assert {custom_id: result.type for custom_id, result in results.items()} == {
        "a": "succeeded",
        "b": "errored",
        "c": "errored",
        "d": "errored",
        "e": "succeeded",
    }
    message = results["a"].message
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "end_turn")
    assert message.content[0].text.startswith("The answer is")
    assert message.usage.output_tokens > 0
    errors = {custom_id: results[custom_id].error.error for custom_id in "bcd"}
    assert [errors[custom_id].type for custom_id in "bcd"] == [
        "invalid_request_error",
        "invalid_request_error",
        "not_found_error",
    ]
    assert "asked for by the prompt" in errors["b"].message
    assert "params.max_tokens" in errors["c"].message
    batch_id = made.id.removeprefix("msg")
    assert verify(batch_id, ledger=ledger, store=store).holds
    day = day_of(ledger.batches.get(batch_id).ended_at or 0.0)  # by now there may be another
    [billed] = usage(ledger, store, first=day, last=day)
    spent = [results[custom_id].message.usage for custom_id in "ae"]
    assert billed.cached_tokens == sum(entry.cache_read_input_tokens for entry in spent)
    assert billed.input_tokens == billed.cached_tokens + sum(entry.input_tokens for entry in spent)
    assert billed.output_tokens == sum(entry.output_tokens for entry in spent)
    assert billed.is_whole


def test_a_batch_without_a_valid_request_ends_with_an_error_for_each(client: anthropic.Anthropic, run: Run) -> None:
    made = client.messages.batches.create(requests=[request("a", max_tokens=-1), request("b", model="unknown")])
    run(made.id)
    ended = client.messages.batches.retrieve(made.id)
    assert (ended.processing_status, counts(ended)) == ("ended", (0, 0, 2, 0, 0))
    assert [result.result.type for result in client.messages.batches.results(made.id)] == ["errored"] * 2


def test_cancel_ends_what_was_not_finished_as_canceled(client: anthropic.Anthropic, run: Run) -> None:
    made = client.messages.batches.create(requests=[request("a"), request("b")])
    canceled = client.messages.batches.cancel(made.id)
    assert (canceled.processing_status, counts(canceled)) == ("canceling", (2, 0, 0, 0, 0))
    assert canceled.cancel_initiated_at is not None
    assert client.messages.batches.cancel(made.id).cancel_initiated_at == canceled.cancel_initiated_at
    run(made.id)
    ended = client.messages.batches.retrieve(made.id)
    assert (ended.processing_status, counts(ended)) == ("ended", (0, 0, 0, 2, 0))
    assert [result.result.type for result in client.messages.batches.results(made.id)] == ["canceled"] * 2
    with pytest.raises(anthropic.BadRequestError, match="has ended") as refused:
        client.messages.batches.cancel(made.id)
    said = refused.value.response.json()
    assert (
        refused.value.body
        == said
        == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": said["error"]["message"]},
            "request_id": refused.value.request_id,
        }
    )


def test_what_the_deadline_cut_off_is_expired(
    client: anthropic.Anthropic, run: Run, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = client.messages.batches.create(requests=[request("a"), request("b")])
    with ledger._database.write() as tx:
        tx.connection.exec_driver_sql("UPDATE batches SET deadline_at = created_at - 1")
    ledger.batches.expire_due()
    run(made.id)
    ended = client.messages.batches.retrieve(made.id)
    assert (ended.processing_status, counts(ended)) == ("ended", (0, 0, 0, 0, 2))
    assert [result.result.type for result in client.messages.batches.results(made.id)] == ["expired"] * 2


@BOTH
def test_delete_takes_the_batch_and_its_files_but_not_its_bill(
    client: anthropic.Anthropic, run: Run, ledger: Ledger, store: ObjectStore
) -> None:
    made = client.messages.batches.create(requests=[request("a")])
    with pytest.raises(anthropic.BadRequestError, match="has not ended"):
        client.messages.batches.delete(made.id)
    run(made.id)
    gone = client.messages.batches.delete(made.id)
    assert (gone.id, gone.type) == (made.id, "message_batch_deleted")
    for ask in (client.messages.batches.retrieve, client.messages.batches.delete, client.messages.batches.cancel):
        with pytest.raises(anthropic.NotFoundError):
            ask(made.id)
    assert client.messages.batches.list().data == []
    batch_id = made.id.removeprefix("msg")
    assert list(store.list(keys.batch(batch_id))) == []
    assert list(store.list(keys.outbox_folder("acme", batch_id))) == []
    assert ledger.batches.get(batch_id).completed == 1
    assert len(ledger.usage.of(batch_id)) == 1


@BOTH
def test_lists_go_page_by_page_in_both_directions(client: anthropic.Anthropic, connect: Connect) -> None:
    made = [client.messages.batches.create(requests=[request("a")]).id for _ in range(5)][::-1]
    connect("other").messages.batches.create(requests=[request("a")])
    assert [batch.id for batch in client.messages.batches.list(limit=2)] == made
    first = client.messages.batches.list(limit=2)
    assert ([batch.id for batch in first.data], first.has_more) == (made[:2], True)
    assert (first.first_id, first.last_id) == (made[0], made[1])
    last = client.messages.batches.list(limit=2, after_id=made[3])
    assert ([batch.id for batch in last.data], last.has_more) == (made[4:], False)
    before = client.messages.batches.list(limit=2, before_id=made[4])
    assert ([batch.id for batch in before.data], before.has_more) == (made[2:4], True)
    newest = client.messages.batches.list(limit=2, before_id=made[1])
    assert ([batch.id for batch in newest.data], newest.has_more) == (made[:1], False)
    with pytest.raises(anthropic.BadRequestError, match="limit"):
        client.messages.batches.list(limit=1001)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.list(after_id="msgbatch_" + "0" * 32)


def test_a_customer_sees_nothing_of_another(connect: Connect, run: Run) -> None:
    mine, other = connect("acme"), connect("bolt")
    made = mine.messages.batches.create(requests=[request("a")])
    run(made.id)
    url = str(mine.messages.batches.retrieve(made.id).results_url)
    asks: list[Callable[[], Any]] = [
        lambda: other.messages.batches.retrieve(made.id),
        lambda: other.messages.batches.cancel(made.id),
        lambda: other.messages.batches.delete(made.id),
        lambda: other.messages.batches.results(made.id),
        lambda: other.messages.batches.list(after_id=made.id),
        lambda: other.messages.batches.list(before_id=made.id),
        lambda: other.get(url, cast_to=httpx.Response),
    ]
    for ask in asks:
        with pytest.raises(anthropic.NotFoundError) as refused:
            ask()
        assert refused.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert other.messages.batches.list().data == []
    assert mine.messages.batches.retrieve(made.id).processing_status == "ended"


def test_ids_that_are_none_are_not_found(client: anthropic.Anthropic) -> None:
    for shown in (
        "x",
        "msgbatch_",
        "batch_" + "0" * 32,
        "msgbatch_" + "0" * 32,
        "msgbatch_" + "A" * 32,
        "msgbatch_%00",
    ):
        with pytest.raises(anthropic.NotFoundError):
            client.messages.batches.retrieve(shown)


def test_creations_that_cannot_be_are_refused_and_leave_nothing(
    client: anthropic.Anthropic, ledger: Ledger, store: ObjectStore
) -> None:
    bad: list[tuple[list[Any], str]] = [
        ([], "at least 1 item"),
        ([request("a b")], r"requests\.0\.custom_id: String should match"),
        ([request("a"), request("a")], r"requests\.1\.custom_id: it is that of requests\.0"),
        ([{"custom_id": "a"}], r"requests\.0\.params: Field required"),
    ]
    for requests, words in bad:
        with pytest.raises(anthropic.BadRequestError, match=words) as refused:
            client.messages.batches.create(requests=requests)
        assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    ledger.customers.set("acme", limits={"max_requests": 2})
    with pytest.raises(anthropic.BadRequestError, match="at most 2 items"):
        client.messages.batches.create(requests=[request(f"r{number}") for number in range(3)])
    ledger.customers.set("acme", limits={"max_requests": None, "max_file_bytes": 1000})
    with pytest.raises(anthropic.APIStatusError, match="more than the 1000 bytes") as too_large:
        client.messages.batches.create(requests=[request("a", "x" * 2000)])
    assert too_large.value.status_code == 413
    ledger.customers.set("acme", limits={"max_file_bytes": None, "max_open_batches": 1})
    client.messages.batches.create(requests=[request("a")])
    with pytest.raises(anthropic.RateLimitError, match="1"):
        client.messages.batches.create(requests=[request("a")])
    assert len(client.messages.batches.list().data) == 1
    assert len(list(store.list(keys.BATCHES))) == 1


def test_doors_answer_in_anthropics_words_without_a_key_or_a_version(
    served: service.Running, ledger: Ledger, client: anthropic.Anthropic
) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=served.url, api_key="bp-wrong", max_retries=0).messages.batches.list()
    key = service.new_key(ledger)
    url = f"{served.url}/v1/messages/batches"
    answer = httpx.get(url, headers={"x-api-key": key})
    assert (answer.status_code, answer.json()["type"]) == (400, "error")
    assert answer.json()["error"] == {
        "type": "invalid_request_error",
        "message": "anthropic-version: header is required",
    }
    # Whoever has no key is told that first.
    assert httpx.get(url).status_code == 401
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    for body in (b"", b"{", b"[]", b'{"requests": 1}', b"\xff\xfe", b"null"):
        refused = httpx.post(url, content=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error"), body
    assert httpx.get(url, headers={**headers, "anthropic-beta": "x"}).status_code == 200
    assert client.messages.batches.with_raw_response.list().headers["request-id"].startswith("req_")


@BOTH
def test_the_same_creation_twice_with_one_key_is_one_batch(client: anthropic.Anthropic, store: ObjectStore) -> None:
    headers = {"Idempotency-Key": "once"}
    made = [client.messages.batches.create(requests=[request("a")], extra_headers=headers).id for _ in range(3)]
    assert len(set(made)) == 1
    assert len(list(store.list(keys.BATCHES))) == 1
    # Also one of the same size.
    for other in ("another", "b"):
        with pytest.raises(anthropic.BadRequestError, match="idempotency key"):
            client.messages.batches.create(requests=[request(other)], extra_headers=headers)


def test_many_requests_are_taken_whole_while_others_poll(
    client: anthropic.Anthropic, ledger: Ledger, store: ObjectStore, served: service.Running
) -> None:
    prompt = "word " * 60

    def body() -> Iterator[bytes]:
        yield b'{"requests":['
        for number in range(20_000):
            yield (b"," if number else b"") + json.dumps(request(f"r{number}", prompt)).encode()
        yield b"]}"

    headers = {"x-api-key": service.new_key(ledger), "anthropic-version": "2023-06-01"}
    answers: list[httpx.Response] = []
    poster = threading.Thread(
        target=lambda: answers.append(
            httpx.post(f"{served.url}/v1/messages/batches", content=body(), headers=headers, timeout=120)
        )
    )
    poster.start()
    while poster.is_alive():
        assert client.messages.batches.list().data is not None
    assert answers[0].status_code == 200, answers[0].text
    made = answers[0].json()
    assert made["request_counts"]["processing"] == 20_000
    lines = store.get(keys.input_file(made["id"].removeprefix("msg"))).splitlines()
    assert len(lines) == 20_000
    assert json.loads(lines[-1]) == {
        "custom_id": "r19999",
        "method": "POST",
        "url": MESSAGES,
        "body": params(prompt),
    }


def test_a_body_that_breaks_off_leaves_no_batch(served: service.Running, ledger: Ledger, store: ObjectStore) -> None:
    def broken() -> Iterator[bytes]:
        yield b'{"requests":[' + json.dumps(request("a")).encode()
        raise ConnectionResetError

    headers = {"x-api-key": service.new_key(ledger), "anthropic-version": "2023-06-01"}
    with pytest.raises(ConnectionResetError):
        httpx.post(f"{served.url}/v1/messages/batches", content=broken(), headers=headers)
    listed = httpx.get(f"{served.url}/v1/messages/batches", headers=headers).json()
    assert (listed["data"], listed["has_more"], listed["first_id"]) == ([], False, None)
    assert list(store.list(keys.BATCHES)) == []


def test_batches_of_other_doors_are_shown_where_they_are_messages(
    client: anthropic.Anthropic, ledger: Ledger, store: ObjectStore
) -> None:
    from tests.fakes import answered

    chat = answered.create(ledger, store, [answered.input_line(0)])
    made = client.messages.batches.create(requests=[request("a")])
    assert [batch.id for batch in client.messages.batches.list().data] == [made.id]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(f"msg{chat.batch_id}")
    shown = ledger.moments.page("acme", after=None, limit=10)
    assert {moment.batch.batch_id for moment in shown} == {chat.batch_id, made.id.removeprefix("msg")}


def test_openapi_document_says_what_a_creation_takes(served: service.Running) -> None:
    document = httpx.get(f"{served.url}/openapi.json").json()
    create = document["paths"]["/v1/messages/batches"]["post"]
    assert create["requestBody"]["content"]["application/json"]["schema"]["required"] == ["requests"]
    assert set(document["paths"]) >= {
        "/v1/messages/batches/{message_batch_id}",
        "/v1/messages/batches/{message_batch_id}/cancel",
        "/v1/messages/batches/{message_batch_id}/results",
    }
    assert msgspec.json.encode(document)
