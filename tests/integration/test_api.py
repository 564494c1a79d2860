"""The service knows whose request it is, bounds what a key may ask, and says what is wrong in the SDK's own shape."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from batch_pipeline.ledger import Ledger
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from tests.fakes import service


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
    assert (answer.status_code, answer.json()) == (503, {"ready": False, "missing": ["object store"]})
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
