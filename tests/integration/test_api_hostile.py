"""What a hostile or a clumsy client of the HTTP service gets: a clear answer at a bounded cost."""

from __future__ import annotations

import json
import socket
from typing import Any

import anthropic
import httpx
import openai
import pytest

from batch_pipeline.api import openai_uploads, requests, serving
from batch_pipeline.ledger import Ledger
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from tests.fakes import service
from tests.fakes.openai_client import CHAT, MODEL, Run, create, line, upload

_HELLO = {"role": "user", "content": "hello there"}


@pytest.fixture
def ledger_url(sqlite_url: str) -> str:
    """What is asked here does not depend on the database."""
    return sqlite_url


def test_results_are_not_given_out_once_their_file_was_deleted(
    client: openai.OpenAI, run: Run, served: service.Running
) -> None:
    batch = create(client, line("a") + b"{bad\n")
    run(batch.id)
    headers = {"Authorization": f"Bearer {client.api_key}"}
    address = f"{served.url}/v1/batches/{batch.id}/results"
    assert len(httpx.get(address, headers=headers).content.splitlines()) == 2
    client.files.delete(str(client.batches.retrieve(batch.id).output_file_id))
    answer = httpx.get(address, headers=headers)
    (left,) = answer.content.splitlines()
    assert b"invalid_json_line" in left
    assert answer.headers["X-Results-Complete"] == "false"


def test_a_cancelled_batch_makes_room_for_another_at_once(client: openai.OpenAI, ledger: Ledger) -> None:
    ledger.customers.set("acme", limits={"max_open_batches": 1})
    first = create(client, line("a"))
    with pytest.raises(openai.RateLimitError, match="1 batches that wait or run, and may have 1"):
        create(client, line("b"))
    assert client.batches.cancel(first.id).status == "cancelling"
    assert create(client, line("b")).status == "validating"


@pytest.mark.parametrize(
    "other", [{"name": "other"}, {"output_expires_after": {"anchor": "created_at", "seconds": 3600}}]
)
def test_a_key_of_a_creation_is_good_for_the_same_creation_only(
    client: openai.OpenAI, other: dict[str, object]
) -> None:
    file = upload(client, line("a"))
    wanted = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    headers = {"Idempotency-Key": "k"}
    first = client.post("/batches", body=wanted, cast_to=dict[str, object], options={"headers": headers})
    again = client.post("/batches", body=wanted, cast_to=dict[str, object], options={"headers": headers})
    assert first["id"] == again["id"]
    with pytest.raises(openai.BadRequestError, match="with another"):
        client.post("/batches", body={**wanted, **other}, cast_to=dict[str, object], options={"headers": headers})


def test_an_empty_endpoint_is_none(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        create(client, line("a"), endpoint="")


@pytest.mark.parametrize(
    ("body", "said"),
    [(b"{", "the body is not valid JSON"), (b"", "the body is missing"), (b"[]", "the body must be a JSON object")],
)
def test_a_body_that_is_none_is_told_in_plain_words(
    client: openai.OpenAI, served: service.Running, body: bytes, said: str
) -> None:
    headers = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
    answer = httpx.post(f"{served.url}/v1/batches", headers=headers, content=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_a_boundary_that_is_too_long_is_refused(client: openai.OpenAI, served: service.Running) -> None:
    headers = {
        "Authorization": f"Bearer {client.api_key}",
        "Content-Type": f"multipart/form-data; boundary={'z' * 257}",
    }
    answer = httpx.post(f"{served.url}/v1/files", headers=headers, content=b"x")
    assert answer.status_code == 400
    assert "boundary" in answer.json()["error"]["message"]


def test_the_head_of_a_request_is_bounded(served: service.Running) -> None:
    """Nobody needs a key to send one."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: here\r\nX-Long: ")
        sent = 0
        try:
            while sent < 64 * 1024 * 1024:
                connection.sendall(b"x" * 65536)
                sent += 65536
            answer = connection.recv(1000)
        except OSError:
            answer = b""
    assert sent < 32 * 1024 * 1024
    assert not answer.startswith(b"HTTP/1.1 200")


def test_a_head_of_many_headers_is_refused_also_where_it_comes_at_once(served: service.Running) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    headers = b"".join(b"X-%d: %s\r\n" % (number, b"x" * 100) for number in range(1000))
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: here\r\n" + headers + b"\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")


def test_headers_behind_a_body_are_bounded(served: service.Running) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"POST /v1/batches HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")
        sent = 0
        try:
            while sent < 64 * 1024 * 1024:
                connection.sendall(b"X-Trailer: x\r\n" * 5000)
                sent += 70_000
        except OSError:
            pass
    assert sent < 32 * 1024 * 1024


def test_a_head_that_does_not_end_is_given_up(
    ledger: Ledger, store: ObjectStore, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that goes on arriving, and also behind a request that was answered."""
    with service.running(ledger, store, settings) as served:
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n")
            assert connection.recv(10_000).startswith(b"HTTP/1.1 200")
            # Only now: the first head may take its time.
            monkeypatch.setattr(serving, "HEAD_SECONDS", 0.5)
            connection.settimeout(0.1)
            assert _is_closed_while_it_sends(connection)
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.settimeout(0.1)
            assert _is_closed_while_it_sends(connection)


def test_a_body_that_never_ends_is_given_up_though_it_goes_on_arriving(
    ledger: Ledger, store: ObjectStore, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody needs a key to begin one: it is read before the key is looked at."""
    monkeypatch.setattr(requests, "WHOLE_BODY_SECONDS", 0.5)
    with service.running(ledger, store, settings) as served:
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(b"POST /v1/batches HTTP/1.1\r\nHost: here\r\nContent-Length: 1000000\r\n\r\n")
            connection.settimeout(0.1)
            assert _answer_while_it_sends(connection).startswith(b"HTTP/1.1 408")


def test_a_body_that_goes_on_behind_its_answer_is_given_up(
    ledger: Ledger, store: ObjectStore, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "UNREAD_SECONDS", 0.5)
    with service.running(ledger, store, settings) as served:
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(b"POST /v1/files HTTP/1.1\r\nHost: here\r\nContent-Length: 1000000\r\n\r\n")
            assert connection.recv(10_000).startswith(b"HTTP/1.1 401")
            connection.settimeout(0.1)
            assert _is_closed_while_it_sends(connection)


def _answer_while_it_sends(connection: socket.socket) -> bytes:
    for _ in range(300):
        connection.sendall(b" ")
        try:
            return connection.recv(1000)
        except TimeoutError:
            continue
    return b""


def _is_closed_while_it_sends(connection: socket.socket) -> bool:
    for _ in range(300):
        try:
            connection.sendall(b"G")
            if connection.recv(1000) == b"":
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def test_a_part_is_given_only_of_the_file_that_was_meant(client: openai.OpenAI, served: service.Running) -> None:
    file = upload(client, line("a"))
    headers = {"Authorization": f"Bearer {client.api_key}", "Range": "bytes=2-5"}
    address = f"{served.url}/v1/files/{file.id}/content"
    part = httpx.get(address, headers=headers)
    assert (part.status_code, part.content) == (206, line("a")[2:6])
    same = httpx.get(address, headers={**headers, "If-Range": part.headers["ETag"]})
    assert (same.status_code, same.content) == (206, line("a")[2:6])
    other = httpx.get(address, headers={**headers, "If-Range": '"other"'})
    assert (other.status_code, other.content) == (200, line("a"))
    far = httpx.get(address, headers={**headers, "Range": f"bytes=2-{10**30}"})
    assert (far.status_code, far.content) == (206, line("a")[2:])


@pytest.mark.parametrize(
    ("param", "given"),
    [
        ("endpoint", {"endpoint": "/v1/other"}),
        ("completion_window", {"completion_window": "soon"}),
        ("metadata", {"metadata": {"k" * 65: "v"}}),
        ("name", {"extra_body": {"name": "../up"}}),
    ],
)
def test_a_mistake_names_the_parameter(client: openai.OpenAI, param: str, given: dict[str, object]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, line("a"), **given)
    assert refused.value.param == param


def test_the_documentation_needs_nothing_from_elsewhere(served: service.Running) -> None:
    page = httpx.get(f"{served.url}/docs")
    assert page.status_code == 200
    assert "https://" not in page.text
    for script in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"):
        assert f"docs/scripts/{script}" in page.text
        assert httpx.get(f"{served.url}/docs/scripts/{script}").status_code == 200
    assert httpx.get(f"{served.url}/docs/scripts/../../app.py").status_code == 404


def test_a_completed_upload_that_is_cancelled_is_told_what_it_is(client: openai.OpenAI) -> None:
    begun = client.uploads.create(
        bytes=len(line("a")), filename="a.jsonl", mime_type="application/jsonl", purpose="batch"
    )
    part = client.uploads.parts.create(begun.id, data=line("a"))
    client.uploads.complete(begun.id, part_ids=[part.id])
    with pytest.raises(openai.BadRequestError, match="it is a file now"):
        client.uploads.cancel(begun.id)


def test_a_retry_of_a_batch_with_all_the_metadata_it_may_have_is_made(client: openai.OpenAI, run: Run) -> None:
    pairs = {f"key{number}": "value" for number in range(16)}
    batch = create(client, line("a", prompt="[[400]]"), metadata=pairs)
    run(batch.id)
    for _ in range(2):  # also of a retry
        made = client.post(f"/batches/{batch.id}/retry", cast_to=openai.types.Batch)
        assert made.metadata == {**pairs, "retry_of": batch.id}
        run(made.id)
        batch = made


def test_retries_over_the_limit_say_so_and_take_no_file_from_one_another(
    client: openai.OpenAI, run: Run, ledger: Ledger
) -> None:
    batch = create(client, line("a", prompt="[[400]]"))
    run(batch.id)
    ledger.customers.set("acme", limits={"max_open_batches": 1})
    blocking = create(client, line("b"))
    headers = {"Idempotency-Key": "again"}
    for _ in range(2):
        with pytest.raises(openai.RateLimitError):
            client.post(f"/batches/{batch.id}/retry", cast_to=openai.types.Batch, options={"headers": headers})
    client.batches.cancel(blocking.id)
    made = [
        client.post(f"/batches/{batch.id}/retry", cast_to=openai.types.Batch, options={"headers": headers}).id
        for _ in range(2)
    ]
    assert made[0] == made[1]


def test_an_upload_whose_parts_go_while_it_is_completed_is_what_it_has_become(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = client.uploads.create(
        bytes=len(line("a")), filename="a.jsonl", mime_type="application/jsonl", purpose="batch"
    )
    part = client.uploads.parts.create(begun.id, data=line("a"))
    untouched = openai_uploads._complete

    def cancelled_meanwhile(*given: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(openai_uploads, "_complete", untouched)
            assert client.uploads.cancel(begun.id).status == "cancelled"
        return untouched(*given)

    monkeypatch.setattr(openai_uploads, "_complete", cancelled_meanwhile)
    with pytest.raises(openai.BadRequestError, match="cancelled: begin a new one"):
        client.uploads.complete(begun.id, part_ids=[part.id])


def test_a_key_of_another_kind_of_batch_makes_no_message_batch(client: openai.OpenAI, served: service.Running) -> None:
    entry: Any = {"custom_id": "a", "params": {"model": MODEL, "max_tokens": 4, "messages": [_HELLO]}}
    headers = {"Idempotency-Key": "k"}
    sent = json.dumps(entry).encode()
    begun = client.uploads.create(bytes=len(sent), filename="a.jsonl", mime_type="application/jsonl", purpose="batch")
    part = client.uploads.parts.create(begun.id, data=sent)
    file = client.uploads.complete(begun.id, part_ids=[part.id]).file
    assert file is not None
    client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/messages",
        completion_window="24h",
        extra_headers=headers,
    )
    with (
        anthropic.Anthropic(base_url=served.url, api_key=client.api_key, max_retries=0) as messages,
        pytest.raises(anthropic.BadRequestError, match="another list of requests"),
    ):
        messages.messages.batches.create(requests=[entry], extra_headers=headers)


def test_the_anthropic_door_speaks_of_its_own_ids_and_of_deletions(
    client: openai.OpenAI, served: service.Running, run: Run
) -> None:
    with anthropic.Anthropic(base_url=served.url, api_key=client.api_key, max_retries=0) as messages:
        batches = messages.messages.batches
        entry: Any = {"custom_id": "a", "params": {"model": MODEL, "max_tokens": 4, "messages": [_HELLO]}}
        made = batches.create(requests=[entry])
        batch_id = made.id.removeprefix("msg")
        run(batch_id)
        with pytest.raises(anthropic.BadRequestError, match=f"{made.id} has ended"):
            batches.cancel(made.id)
        assert len(list(batches.results(made.id))) == 1
        # A file that was deleted by the other door is not given out by this one.
        client.files.delete(str(client.batches.retrieve(batch_id).output_file_id))
        with pytest.raises(anthropic.BadRequestError, match="not whole"):
            list(batches.results(made.id))
        batches.delete(made.id)
        with pytest.raises(openai.BadRequestError, match="was deleted by its customer"):
            client.post(f"/batches/{batch_id}/retry", cast_to=dict[str, object])
