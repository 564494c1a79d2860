"""What a hostile or a clumsy client of the HTTP service gets: a clear answer at a bounded cost."""

from __future__ import annotations

import socket

import httpx
import openai
import pytest

from batch_pipeline.ledger import Ledger
from tests.fakes import service
from tests.fakes.openai_client import CHAT, Run, create, line, upload


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
    (left,) = httpx.get(address, headers=headers).content.splitlines()
    assert b"invalid_json_line" in left


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
