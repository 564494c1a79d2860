"""The service knows whose request it is, bounds what a key may ask, and says what is wrong in the SDK's own shape."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from batch_pipeline.ledger import Ledger
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys
from tests.fakes import service
from tests.fakes.waiting import wait_until


@pytest.fixture
def client(ledger: Ledger, store: ObjectStore, settings: Settings) -> Iterator[httpx.Client]:
    with service.running(ledger, store, settings) as running, httpx.Client(base_url=running.url) as opened:
        yield opened


def test_health_asks_for_no_key_and_every_answer_has_an_id(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json()) == (200, {"ready": True, "missing": []})
    assert ready.headers["x-request-id"] == ready.headers["request-id"]
    assert ready.headers["x-request-id"] != client.get("/readyz").headers["x-request-id"]


def test_a_part_that_is_away_is_named_and_nothing_else_is(
    sqlite_url: str, store: ObjectStore, settings: Settings
) -> None:
    ledger = Ledger.open(sqlite_url)
    nowhere = msgspec.structs.replace(settings.store, endpoint_url="http://127.0.0.1:9")
    with service.running(ledger, ObjectStore.open(nowhere), settings) as running:
        answer = httpx.get(f"{running.url}/readyz", timeout=60)
        headers = {"x-api-key": service.new_key(ledger)}
        form = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
        upload = httpx.post(f"{running.url}/v1/files", headers=headers, timeout=60, **form)
    assert (answer.status_code, answer.json()) == (503, {"ready": False, "missing": ["object store"]})
    assert (upload.status_code, upload.headers["retry-after"]) == (503, "5")
    error = upload.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "service_unavailable")
    assert upload.headers["x-request-id"] in error["message"]
    assert "127.0.0.1" not in upload.text
    ledger.close()


def test_without_a_good_key_nothing_is_told(client: httpx.Client) -> None:
    wrong = ({}, {"Authorization": "Bearer bp-wrong"}, {"x-api-key": "bp-wrong"}, {"Authorization": "Basic eDp5"})
    for headers in wrong:
        answer = client.get("/v1/batches", headers=headers)
        assert answer.status_code == 401
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["code"] in ("missing_api_key", "invalid_api_key")


def test_a_revoked_key_opens_nothing(client: httpx.Client, ledger: Ledger) -> None:
    ledger.customers.add("acme")
    made = ledger.customers.add_key("acme")
    headers = {"x-api-key": made.secret}
    assert client.get("/v1/batches", headers=headers).status_code == 200
    ledger.customers.revoke_key("acme", made.key.key_id)
    assert client.get("/v1/batches", headers=headers).status_code == 401


def test_a_key_that_asks_too_often_is_told_when_it_may_again(client: httpx.Client, ledger: Ledger) -> None:
    key = service.new_key(ledger)
    ledger.customers.set("acme", limits={"requests_per_minute": 2})
    answers = [client.get("/v1/batches", headers={"x-api-key": key}) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert "2 requests a minute" in answers[2].json()["error"]["message"]
    assert client.get("/v1/batches", headers={"x-api-key": service.new_key(ledger)}).status_code == 200


def test_errors_have_the_shape_of_the_door_that_was_asked(client: httpx.Client) -> None:
    openai = client.get("/v1/nothing")
    assert openai.status_code == 404
    assert set(openai.json()["error"]) == {"message", "type", "param", "code"}
    anthropic = client.get("/v1/messages/nothing")
    assert anthropic.json()["type"] == "error"
    assert anthropic.json()["error"]["type"] == "not_found_error"
    assert anthropic.json()["request_id"] == anthropic.headers["request-id"]


def test_a_body_that_is_too_large_is_refused(client: httpx.Client, ledger: Ledger) -> None:
    body = json.dumps({"input_file_id": "x" * 2_000_000, "endpoint": "/v1/completions", "completion_window": "24h"})
    answer = client.post("/v1/batches", content=body, headers={"x-api-key": service.new_key(ledger)})
    assert answer.status_code == 413
    assert "1048576" in answer.json()["error"]["message"]


HALF = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 2_000_000


def begin_upload(client: httpx.Client, key: str) -> socket.socket:
    """Send the half of a file, and no more."""
    connection = socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=30)
    head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\nContent-Length: 9000000\r\n"
    connection.sendall(f"{head}Content-Type: multipart/form-data; boundary=b\r\n\r\n".encode() + HALF)
    return connection


def test_an_upload_that_its_client_leaves_is_forgotten(
    client: httpx.Client, ledger: Ledger, store: ObjectStore
) -> None:
    connection = begin_upload(client, service.new_key(ledger))
    wait_until(lambda: any(store.uploads(keys.FILES)), "the upload has begun")
    connection.close()
    wait_until(lambda: not any(store.uploads(keys.FILES)), "the upload is forgotten")
    assert list(store.list(keys.FILES)) == []


def test_a_client_that_sends_nothing_is_given_up(sqlite_url: str, store: ObjectStore, settings: Settings) -> None:
    ledger = Ledger.open(sqlite_url)
    impatient = msgspec.structs.replace(settings, api=msgspec.structs.replace(settings.api, idle_seconds=0.5))
    with (
        service.running(ledger, store, impatient) as running,
        httpx.Client(base_url=running.url) as client,
        begin_upload(client, service.new_key(ledger)) as connection,
    ):
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")
    assert list(store.uploads(keys.FILES)) == []
    ledger.close()
