"""Results while a batch runs, running what has failed again, and two customers who never see each other's."""

from __future__ import annotations

import hashlib
import json
from itertools import product
from typing import Any

import httpx
import msgspec
import openai
import pytest

from batch_pipeline.intake import drop
from batch_pipeline.ledger import Ledger
from batch_pipeline.results import merge
from batch_pipeline.results.verify import verify
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys
from tests.fakes import engine as fake_engine
from tests.fakes import service
from tests.fakes.openai_client import CHAT, Connect, Run, create, line, upload, validate
from tests.fakes.workers import attached, make_worker, quick


def ids_of(text: str) -> list[str]:
    return [json.loads(entry)["custom_id"] for entry in text.splitlines()]


def ask(client: openai.OpenAI, method: str, path: str, **more: Any) -> httpx.Response:
    url = f"{str(client.base_url).rstrip('/')}{path}"
    return httpx.request(method, url, headers={"Authorization": f"Bearer {client.api_key}"}, timeout=60, **more)


def test_results_can_be_read_while_a_batch_runs(
    client: openai.OpenAI, ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    batch = create(client, line("a") + b"{bad\n" + line("b") + line("c", "[[slow:2]] wait"))
    path = f"/batches/{batch.id}/results"
    assert ask(client, "GET", path).text == ""
    one_each = quick(settings, model={"max_in_flight": 1})
    single = with_chunks_of(1, one_each)
    validate(batch.id, ledger, store, single)
    with fake_engine.running() as fake:
        [lease] = ledger.chunks.lease("held", "smollm2-135m", 1)
        make_worker(ledger, store, single, attached(fake.url)).run()
        begun = ask(client, "GET", path)
        assert begun.headers["x-results-complete"] == "false"
        assert ids_of(begun.text) == [None, "b", "c"]
        assert client.batches.retrieve(batch.id).status == "in_progress"
        ledger.chunks.release(lease.ref, "gives way")
        make_worker(ledger, store, single, attached(fake.url)).run()
    merge.merge(batch.id, ledger=ledger, store=store, settings=settings, run_id="merge")
    ended = ask(client, "GET", path)
    assert ended.headers["x-results-complete"] == "true"
    assert sorted(map(str, ids_of(ended.text))) == ["None", "a", "b", "c"]
    assert set(begun.text.splitlines()) < set(ended.text.splitlines())


def with_chunks_of(requests: int, settings: Settings) -> Settings:
    return msgspec.structs.replace(settings, intake=msgspec.structs.replace(settings.intake, chunk_requests=requests))


def test_only_what_has_failed_is_run_again(client: openai.OpenAI, run: Run, ledger: Ledger, store: ObjectStore) -> None:
    data = line("a") + b"{bad\n" + line("b", "[[400]]") + b"\n" + line("c") + line("d", "[[400]]").rstrip()
    old = create(client, data, metadata={"team": "search"})
    run(old.id)
    answer = ask(client, "POST", f"/batches/{old.id}/retry")
    assert answer.status_code == 200
    again = client.batches.retrieve(answer.json()["id"])
    assert (again.status, again.endpoint, again.completion_window) == ("validating", CHAT, "24h")
    assert again.metadata == {"team": "search", "retry_of": old.id}
    sent = client.files.content(again.input_file_id).content
    assert sent == line("b", "[[400]]") + line("d", "[[400]]")
    run(again.id)
    done = client.batches.retrieve(again.id)
    assert done.request_counts is not None
    assert (done.status, done.request_counts.total, done.request_counts.failed) == ("completed", 2, 2)
    assert verify(again.id, ledger=ledger, store=store).holds


def test_a_cancelled_batch_goes_on_as_a_new_one_with_a_window_and_metadata_of_its_own(
    client: openai.OpenAI, run: Run
) -> None:
    old = create(client, line("a") + line("b"))
    client.batches.cancel(old.id)
    run(old.id)
    body = {"completion_window": "2h", "metadata": {"try": "2"}}
    headers = {"Authorization": f"Bearer {client.api_key}", "Idempotency-Key": "again-1"}
    url = f"{client.base_url}batches/{old.id}/retry"
    first, second = (httpx.post(url, json=body, headers=headers, timeout=60).json() for _ in range(2))
    assert first["id"] == second["id"]
    assert (first["completion_window"], first["metadata"]) == ("2h", {"try": "2", "retry_of": old.id})
    run(first["id"])
    done = client.batches.retrieve(first["id"])
    assert ids_of(client.files.content(done.output_file_id).text) == ["a", "b"]


def test_a_retry_that_makes_no_sense_says_so(client: openai.OpenAI, run: Run, ledger: Ledger) -> None:
    batch = create(client, line("a"))
    path = f"/batches/{batch.id}/retry"
    early = ask(client, "POST", path)
    assert (early.status_code, "validating" in early.text) == (400, True)
    run(batch.id)
    nothing = ask(client, "POST", path)
    assert (nothing.status_code, "no request that failed" in nothing.text) == (400, True)
    other = create(client, line("a"))
    client.batches.cancel(other.id)
    run(other.id)
    create(client, line("c"))
    ledger.customers.set("acme", limits={"max_open_batches": 1})
    before = len(list(client.files.list()))
    assert ask(client, "POST", f"/batches/{other.id}/retry").status_code == 429
    assert len(list(client.files.list())) == before


def test_nobody_sees_or_guesses_what_is_anothers(
    connect: Connect, run: Run, ledger: Ledger, store: ObjectStore, settings: Settings
) -> None:
    acme, globex = connect("acme"), connect("globex")
    mine = create(acme, line("a") + line("b", "[[400]]"))
    run(mine.id)
    store.put(keys.inbox("acme", "dropped"), line("secret"))
    drop.take_drops(ledger=ledger, store=store, settings=settings, limit=1)
    done = acme.batches.retrieve(mine.id)
    begun = acme.uploads.create(bytes=1, filename="a", mime_type="text/plain", purpose="batch")
    part = acme.uploads.parts.create(begun.id, data=b"x")
    batches = [batch.id for batch in acme.batches.list()]
    files = [file.id for file in acme.files.list()]
    assert (len(batches), len(files)) == (2, 4)
    assert {done.output_file_id, done.error_file_id, done.input_file_id} <= set(files)

    assert list(globex.batches.list()) == list(globex.files.list()) == []
    attempts = [
        *product(["GET"], [f"/batches/{each}{rest}" for each in batches for rest in ("", "/results")]),
        *product(["POST"], [f"/batches/{each}{rest}" for each in batches for rest in ("/cancel", "/retry")]),
        *product(["GET", "DELETE"], [f"/files/{each}" for each in files]),
        *product(["GET"], [f"/files/{each}/content" for each in files]),
        *product(["GET"], [f"/batches?after={each}" for each in batches]),
        *product(["GET"], [f"/files?after={each}" for each in files]),
        ("POST", f"/uploads/{begun.id}/cancel"),
    ]
    for method, path in attempts:
        answer = ask(globex, method, path)
        assert answer.status_code == 404, (method, path)
        unknown = ask(globex, method, path.translate(str.maketrans("0123456789", "1234567890")))
        assert _without_ids(answer) == _without_ids(unknown), (method, path)
    for wanted in ("bytes=0-0", "bytes=-1", "bytes=999999-"):
        url = f"{globex.base_url}files/{done.output_file_id}/content"
        headers = {"Authorization": f"Bearer {globex.api_key}", "Range": wanted}
        assert httpx.get(url, headers=headers).status_code == 404
    for call in (
        lambda: globex.batches.create(input_file_id=files[0], endpoint=CHAT, completion_window="24h"),
        lambda: globex.uploads.complete(begun.id, part_ids=[part.id]),
        lambda: globex.uploads.parts.create(begun.id, data=b"y"),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    own = globex.uploads.create(bytes=1, filename="a", mime_type="text/plain", purpose="batch")
    with pytest.raises(openai.BadRequestError, match="none of this upload"):
        globex.uploads.complete(own.id, part_ids=[part.id])
    # Nothing of all that has changed anything.
    assert [batch.id for batch in acme.batches.list()] == batches
    assert [file.id for file in acme.files.list()] == files
    assert acme.uploads.complete(begun.id, part_ids=[part.id]).status == "completed"


def _without_ids(answer: httpx.Response) -> list[str]:
    """The words of an answer that are no ids: they must not tell another's from none's."""
    message: str = answer.json()["error"]["message"]
    return [word for word in message.split() if not any(character.isdigit() for character in word)]


def test_one_key_of_idempotency_is_two_batches_for_two_customers(connect: Connect) -> None:
    made = []
    for client in (connect("acme"), connect("globex")):
        file = upload(client, line("a"))
        key = {"Idempotency-Key": "the-same"}
        made.append(
            client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", extra_headers=key).id
        )
    assert len(set(made)) == 2


def test_a_key_of_idempotency_knows_a_file_by_its_bytes(client: openai.OpenAI) -> None:
    def make(content: bytes) -> str:
        file = upload(client, content)
        assert file.model_dump()["sha256"] == hashlib.sha256(content).hexdigest()
        key = {"Idempotency-Key": "once"}
        made = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", extra_headers=key)
        return made.id

    # A script that is run again uploads its file again.
    assert make(line("a")) == make(line("a"))
    with pytest.raises(openai.BadRequestError, match="another file"):
        make(line("b"))
    assert len(client.batches.list().data) == 1


def test_paths_that_are_no_ids_are_not_found(client: openai.OpenAI, served: service.Running) -> None:
    for broken in ("..", "%2e%2e%2f", "a%00b", "x" * 5000, "%F0%9F%92%A9", "batch_' OR 1=1", "%ED%A0%80"):
        for path in (f"/batches/{broken}", f"/files/{broken}", f"/files/{broken}/content", f"/uploads/{broken}/cancel"):
            method = "POST" if path.startswith("/uploads") else "GET"
            assert ask(client, method, path).status_code in (404, 405), path
