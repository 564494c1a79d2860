"""The real vLLM: the fake engine speaks as it does, a worker runs on it, and nothing of it outlives a killed worker."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import psutil
import pytest

from batch_pipeline.embedded.model import make_smollm2, make_tiny
from batch_pipeline.engine import Answer, EngineClient, VllmServer
from batch_pipeline.engine.live import LiveProbe
from batch_pipeline.engine.metrics import read_load
from batch_pipeline.intake import ops
from batch_pipeline.ledger import Ledger
from batch_pipeline.models import Model, Shared
from batch_pipeline.results.merge import merge
from batch_pipeline.scheduling.governor import Load
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from tests.fakes import engine as fake_engine
from tests.fakes import service
from tests.fakes.batches import chat_request, make_batch
from tests.fakes.waiting import wait_until
from tests.fakes.workers import MODEL, REPOSITORY, attached, lines_of, make_worker, quick, start_process

# Four starts of the engine: minutes each on a busy machine.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES = "/v1/responses"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
ONCE = {"model": MODEL, "prompt": "Hello", "max_tokens": 4}
# Four tokens whatever the model says: a response that ends by itself has other fields.
ASKED = {"model": MODEL, "input": "Say hello.", "max_output_tokens": 4, "temperature": 0, "ignore_eos": True}
PARTS = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Say hello."}]}
GOOD = [
    (CHAT, HELLO),
    (CHAT, {**HELLO, "n": 2}),
    (TEXT, ONCE),
    (MESSAGES, HELLO),
    (MESSAGES, {**HELLO, "system": "Be brief.", "cache_salt": "salt", "stop_sequences": ["zzz"], "top_k": 3}),
    (RESPONSES, ASKED),
    (RESPONSES, {**ASKED, "max_output_tokens": 60, "ignore_eos": False, "store": False}),
    (RESPONSES, {**ASKED, "instructions": "Be brief.", "cache_salt": "salt", "metadata": {"a": "b"}}),
    (RESPONSES, {**ASKED, "input": [PARTS]}),
]
BAD: list[tuple[str, Any]] = [
    (CHAT, {**HELLO, "model": "another"}),
    (CHAT, {"model": MODEL}),
    (CHAT, []),
    (CHAT, {**HELLO, "messages": "no list"}),
    (CHAT, {**HELLO, "temperature": -1}),
    (CHAT, {**HELLO, "max_tokens": 0}),
    (CHAT, {**HELLO, "max_tokens": 5000}),
    (TEXT, {"model": MODEL}),
    ("/v1/embeddings", {"model": MODEL, "input": "x"}),
    (MESSAGES, {**HELLO, "model": "another"}),
    (MESSAGES, {**HELLO, "messages": "no list"}),
    (MESSAGES, {"model": MODEL, "messages": HELLO["messages"]}),
    (MESSAGES, {**HELLO, "max_tokens": 0}),
    (MESSAGES, {**HELLO, "max_tokens": 5000}),
    (MESSAGES, {**HELLO, "temperature": -1}),
    (RESPONSES, {**ASKED, "model": "another"}),
    (RESPONSES, {"model": MODEL}),
    (RESPONSES, {**ASKED, "input": 5}),
    (RESPONSES, {**ASKED, "input": []}),
    (RESPONSES, {**ASKED, "max_output_tokens": 0}),
    (RESPONSES, {**ASKED, "max_output_tokens": 5000}),
    (RESPONSES, {**ASKED, "temperature": -1}),
    (RESPONSES, []),
]


def ask(url: str, questions: list[tuple[str, Any]]) -> list[Answer]:
    """Return an engine's answers to these, one after the other."""

    async def all_of_them() -> list[Answer]:
        async with EngineClient(url) as client:
            return [await client.complete(endpoint, json.dumps(body).encode(), 300.0) for endpoint, body in questions]

    return asyncio.run(all_of_them())


def shape(value: Any) -> Any:
    """Return which fields an answer has, at every depth, without their values."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    return [shape(inner) for inner in value] if isinstance(value, list) else None


@pytest.fixture(scope="module")
def real_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """vLLM with SmolLM2, started once for this module."""
    folder = make_smollm2(REPOSITORY / "var" / "models")
    with vllm(folder, tmp_path_factory.mktemp("engine"), "--scheduling-policy", "priority") as url:
        yield url


@contextmanager
def vllm(folder: Path, logs: Path, *arguments: str) -> Iterator[str]:
    """Run vLLM with a model; its loop runs in a thread of its own. Yields its URL."""
    model = Model(
        source=str(folder),
        context_length=fake_engine.CONTEXT,
        engine_arguments=["--dtype", "float32", "--enforce-eager", *arguments],
        engine_environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    server = VllmServer(MODEL, model, logs / "engine.log")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def wait_for(work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result()

    try:
        wait_for(server.start())
        wait_for(server.wait_ready())
        yield server.url
    finally:
        wait_for(server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_the_fake_answers_in_the_form_of_the_real_engine(real_url: str) -> None:
    with fake_engine.running() as fake:
        pretended = ask(fake.url, GOOD)
    for question, real, answer in zip(GOOD, ask(real_url, GOOD), pretended, strict=True):
        assert (real.status, answer.status) == (200, 200), question
        assert shape(json.loads(answer.body)) == shape(json.loads(real.body)), question
        assert real.request_id.startswith(re.split("[-_]", answer.request_id)[0])
        assert min(real.input_tokens, real.output_tokens, answer.input_tokens, answer.output_tokens) > 0


def test_the_fake_refuses_what_the_real_engine_refuses(real_url: str) -> None:
    with fake_engine.running() as fake:
        pretended = ask(fake.url, BAD)
    for question, real, answer in zip(BAD, ask(real_url, BAD), pretended, strict=True):
        assert 400 <= real.status < 500, question
        assert answer.status == real.status, question
        assert shape(json.loads(answer.body)) == shape(json.loads(real.body)), question


def test_the_real_engine_loses_or_breaks_at_the_items_that_intake_refuses(real_url: str) -> None:
    def answered(*content: dict[str, Any]) -> tuple[str, Any]:
        message = {"type": "message", "role": "assistant", "content": list(content)}
        return RESPONSES, {**ASKED, "input": [PARTS, message, PARTS]}

    hello, more = ({"type": "output_text", "text": text} for text in ("Hello", "and many more words than that"))
    one, two, refusal = ask(
        real_url, [answered(hello), answered(hello, more), answered({"type": "refusal", "refusal": "no"})]
    )
    assert (one.status, two.status) == (200, 200)
    assert one.input_tokens == two.input_tokens
    assert refusal.status == 500


def test_the_real_engine_tells_its_load_and_takes_live_probes_and_priorities_as_the_fake_does(real_url: str) -> None:
    async def asked(url: str) -> tuple[Load, Load]:
        async with EngineClient(url) as client:
            # The fake takes its time for this one, so that nobody misses it.
            body = json.dumps({**ONCE, "prompt": "[[slow:2]]", "max_tokens": 60, "ignore_eos": True}).encode()
            running = asyncio.create_task(client.complete(TEXT, body, 300.0, 100))
            seen = await read_load(url)
            while not seen.running and not running.done():
                seen = await read_load(url)
            assert (await running).status == 200
        for endpoint in (TEXT, CHAT, MESSAGES, RESPONSES):
            probe = LiveProbe(url, MODEL, [endpoint], asyncio.get_running_loop().time)
            assert 0 < await probe.seconds() < float("inf"), endpoint
            assert await probe.takes_priority(100) is True, endpoint
            await probe.close()
        idle = await read_load(url)
        while idle.running:
            idle = await read_load(url)
        return seen, idle

    seen, idle = asyncio.run(asked(real_url))
    assert (seen.running, seen.waiting, seen.preemptions) == (1, 0, 0)
    assert 0 < seen.kv_cache_usage < 0.1
    assert (idle.waiting, idle.kv_cache_usage) == (0, 0.0)
    with fake_engine.running("--delay", "0.2") as fake:
        pretended, _ = asyncio.run(asked(fake.url))
    assert (pretended.running, pretended.waiting, pretended.preemptions) == (1, 0, 0)


def test_a_worker_runs_a_batch_on_the_real_engine(
    real_url: str, sqlite_url: str, store: ObjectStore, settings: Settings
) -> None:
    ledger = Ledger.open(sqlite_url)
    questions = ["What is the capital of France?", "What colour is the sky?", "How many legs has a dog?", "Say yes."]
    requests = [chat_request(index, question, 12, temperature=0) for index, question in enumerate(questions * 2)]
    requests[5] = chat_request(5, "too much", 5000)
    batch = make_batch(ledger, store, [requests[:4], requests[4:]])
    # As on an engine that live traffic uses too: with a priority, and under the governor.
    shared = Shared(live_traffic=True, live_ttft_budget_seconds=60.0)
    configured = quick(settings, model={"engine_url": real_url, "shared": shared})
    report = make_worker(ledger, store, configured, attached(real_url)).run()
    assert (report.chunks, report.requests) == (2, 8)
    lines = lines_of(ledger, store, batch.batch_id)
    assert {index: line["response"]["status_code"] for index, line in lines.items()} == {
        index: 400 if index == 5 else 200 for index in range(8)
    }
    assert "5000" in lines[5]["response"]["body"]["error"]["message"]
    assert "Paris" in lines[0]["response"]["body"]["choices"][0]["message"]["content"]
    (chunk, _) = ledger.chunks.of(batch.batch_id)
    assert chunk.result is not None
    assert chunk.result.engine_version == "0.32.0"


def test_a_message_batch_of_the_anthropic_sdk_runs_on_the_real_engine(
    real_url: str, sqlite_url: str, store: ObjectStore, settings: Settings
) -> None:
    ledger = Ledger.open(sqlite_url)

    def request(custom_id: str, question: str, max_tokens: int = 12) -> Any:
        messages = [{"role": "user", "content": [{"type": "text", "text": question}]}]
        params = {"model": MODEL, "max_tokens": max_tokens, "temperature": 0, "messages": messages}
        return {"custom_id": custom_id, "params": params}

    with (
        service.running(ledger, store, settings) as running,
        anthropic.Anthropic(base_url=running.url, api_key=service.new_key(ledger)) as client,
    ):
        made = client.messages.batches.create(
            requests=[request("paris", "What is the capital of France?"), request("long", "Say yes.", 5000)]
        )
        batch_id = made.id.removeprefix("msg")
        ops.validate(batch_id, ledger=ledger, store=store, settings=settings)
        ops.write_chunks(batch_id, ledger=ledger, store=store, settings=settings)
        make_worker(ledger, store, quick(settings), attached(real_url)).run()
        merge(batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
        results = {result.custom_id: result.result for result in client.messages.batches.results(made.id)}
    assert (results["paris"].type, results["long"].type) == ("succeeded", "errored")
    message = results["paris"].message
    assert "Paris" in message.content[0].text
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert ledger.batches.get(batch_id).output_tokens == message.usage.output_tokens > 0


def test_embeddings_of_the_openai_sdk_run_on_the_real_engine(
    sqlite_url: str, store: ObjectStore, settings: Settings, tmp_path: Path
) -> None:
    ledger = Ledger.open(sqlite_url)
    endpoint = "/v1/embeddings"
    inputs: list[Any] = ["Hello", ["Hello", "More words"], [1, 2, 3], ""]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": endpoint, "body": {"model": MODEL, "input": given}}
        for number, given in enumerate(inputs)
    ]
    configured = quick(settings, model={"endpoints": [endpoint]})
    with (
        vllm(make_tiny(REPOSITORY / "var" / "models"), tmp_path, "--runner", "pooling", "--convert", "embed") as url,
        service.running(ledger, store, configured) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key=service.new_key(ledger)) as client,
    ):
        file = client.files.create(file=b"".join(json.dumps(line).encode() + b"\n" for line in lines), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
        batch_id = made.id
        ops.validate(batch_id, ledger=ledger, store=store, settings=configured)
        ops.write_chunks(batch_id, ledger=ledger, store=store, settings=configured)
        make_worker(ledger, store, configured, attached(url)).run()
        merge(batch_id, ledger=ledger, store=store, settings=configured, run_id=None)
        ended = client.batches.retrieve(made.id)
        assert ended.output_file_id is not None
        answers = [json.loads(line) for line in client.files.content(ended.output_file_id).text.splitlines()]
    vectors = {answer["custom_id"]: answer["response"]["body"]["data"] for answer in answers}
    assert {custom_id: len(data) for custom_id, data in vectors.items()} == {"0": 1, "1": 2, "2": 1}
    assert vectors["0"][0]["embedding"] == pytest.approx(vectors["1"][0]["embedding"], abs=1e-4)
    assert (ended.request_counts.completed, ended.request_counts.failed) == (3, 1)
    assert ended.usage.output_tokens == 0 < ended.usage.input_tokens


def test_a_killed_engine_core_is_started_again_and_nothing_outlives_a_killed_worker(
    sqlite_url: str, store: ObjectStore, settings_file: Path
) -> None:
    ledger = Ledger.open(sqlite_url)
    tiny = make_tiny(REPOSITORY / "var" / "models")
    requests = [chat_request(index, f"say {index}", 200) for index in range(40)]
    batch = make_batch(ledger, store, [requests])
    model = {
        "source": str(tiny),
        "max_in_flight": 8,
        "engine_arguments": ["--dtype", "float32", "--enforce-eager"],
        "engine_environment": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    }
    with start_process(settings_file, sqlite_url, "vllm", model=model, warm_seconds=600.0) as process:
        try:
            worker = psutil.Process(process.pid)
            wait_until(lambda: saved(ledger, batch.batch_id) >= 8, "some requests are saved", 800)
            (core,) = [child for child in worker.children(recursive=True) if "EngineCore" in " ".join(child.cmdline())]
            core.kill()
            wait_until(lambda: len(lines_of(ledger, store, batch.batch_id)) == 40, "the batch is done", 800)
            family = worker.children(recursive=True)
            assert len(family) >= 3, "the guard, the server and the core"
        finally:
            process.kill()
    gone, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    assert len(gone) == len(family)
    lines = lines_of(ledger, store, batch.batch_id)
    assert all(line["error"] is None and line["response"]["status_code"] == 200 for line in lines.values())
    assert sum(chunk.token for chunk in ledger.chunks.of(batch.batch_id)) == 1, "the worker never let go of it"


def saved(ledger: Ledger, batch_id: str) -> int:
    """How many requests of a batch's chunks the checkpoints hold."""
    return sum(part.requests for chunk in ledger.chunks.of(batch_id) for part in chunk.parts)
