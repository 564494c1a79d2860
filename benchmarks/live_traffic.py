"""What live traffic feels of batch work on the same engine, and what batch work keeps: the real vLLM, on this machine.

    python -m benchmarks.live_traffic [--seconds 45] [--in-flight 32] [--model var/models/smollm2-135m]

One engine, started with `--scheduling-policy priority`, in one run: live requests alone, with a flood of batch
requests, with a flood whose requests have a lower priority, with the governor, and alone once more (what the machine
itself does). The batch requests come from the real worker each time, from a real store and ledger. Live requests are
sent every so often whether or not the one before has been answered, each with another prompt, and their answers are
streamed.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import msgspec

from batch_pipeline import settings as configuration
from batch_pipeline.embedded import seaweedfs
from batch_pipeline.engine import AttachedEngine, VllmServer
from batch_pipeline.engine.metrics import read_load
from batch_pipeline.ledger import Ledger
from batch_pipeline.models import Model, Shared
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from batch_pipeline.wire.chunk_files import ChunkRequest
from batch_pipeline.worker import Worker
from batch_pipeline.worker.runner import Runner
from tests.fakes.batches import MODEL, make_batch

BATCH_OUTPUT, LIVE_OUTPUT = 32, 8
"""Tokens of each answer; batch prompts have some 80 tokens, live ones some 30."""
CHUNK, CHUNKS = 200, 8
RAMP_SECONDS = 30.0
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not")


class Phase(msgspec.Struct, frozen=True):
    """What was measured in one window."""

    name: str
    ttft_seconds: list[float]
    in_flight: list[int]
    """Batch requests in the engine, looked at twice a second."""
    tokens_a_second: float
    """Of the batch requests that were answered: prompt and answer."""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=45.0, help="of each window")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two live requests")
    parser.add_argument("--in-flight", type=int, default=32, help="the model's max_in_flight")
    parser.add_argument("--kv-cache-gib", default="1")
    parser.add_argument("--model", type=Path, default=Path("var/models/smollm2-135m"))
    parser.add_argument("--budget", type=float, help="seconds; default: three times the median of live requests alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, seaweedfs.s3_server(Path(folder) / "s3") as reachable:
        print_table(*asyncio.run(measure(options, Path(folder), reachable)), options)


async def measure(
    options: argparse.Namespace, folder: Path, reachable: configuration.Store
) -> tuple[list[Phase], float]:
    """Return the phases and the budget that the governor had."""
    model = Model(
        source=str(options.model.resolve()),
        context_length=2048,
        max_in_flight=options.in_flight,
        engine_arguments=["--dtype", "float32", "--enforce-eager", "--scheduling-policy", "priority"],
        engine_environment={"VLLM_CPU_KVCACHE_SPACE": options.kv_cache_gib},
    )
    engine = VllmServer(MODEL, model, folder / "engine.log")
    await engine.start()
    try:
        await engine.wait_ready()
        await live(engine.url, 5.0, options.every)  # the first requests are slower than all others
        alone = Phase("live requests alone", await live(engine.url, options.seconds, options.every), [], 0.0)
        budget = options.budget or math.ceil(30 * statistics.median(alone.ttft_seconds)) / 10
        attached = msgspec.structs.replace(model, engine_url=engine.url)
        unlimited = Shared(
            live_traffic=True, live_ttft_budget_seconds=1e6, kv_cache_mark=1.0, least_in_flight=options.in_flight
        )
        governed = Shared(live_traffic=True, live_ttft_budget_seconds=budget)
        phases = [alone]
        for name, shared in (
            ("with a flood", Shared()),
            ("with a flood at lower priority", unlimited),
            ("with the governor", governed),
        ):
            settings = Settings(
                store=reachable,
                worker=msgspec.structs.replace(configuration.Worker(), grace_seconds=0.1, heartbeat_seconds=1.0),
                models={MODEL: msgspec.structs.replace(attached, shared=shared)},
            )
            phases.append(await with_batch(name, settings, engine.url, folder, options))
            print(msgspec.json.encode(phases[-1]).decode(), file=sys.stderr, flush=True)
        again = await live(engine.url, options.seconds, options.every)
        phases.append(Phase("live requests alone, once more", again, [], 0.0))
        return phases, budget
    finally:
        await engine.stop()


async def with_batch(name: str, settings: Settings, url: str, folder: Path, options: argparse.Namespace) -> Phase:
    """Measure live requests while a worker runs a batch on the same engine."""
    ledger = Ledger.open(f"sqlite:///{folder}/{name}.sqlite")
    store = ObjectStore.open(settings.store)
    requests = [request(index) for index in range(CHUNK * CHUNKS)]
    make_batch(ledger, store, [requests[start : start + CHUNK] for start in range(0, len(requests), CHUNK)])
    engine = AttachedEngine(MODEL, url, 60.0)
    worker = Worker(ledger=ledger, store=store, settings=settings, model=MODEL, engine=engine)
    runner = worker._runner
    with running(worker, ledger):
        await asyncio.sleep(RAMP_SECONDS)
        looks: list[int] = []
        looking = asyncio.create_task(look(runner, looks))
        began, had = time.monotonic(), runner.tokens
        ttft = await live(url, options.seconds, options.every)
        rate = (runner.tokens - had) / (time.monotonic() - began)
        looking.cancel()
    ledger.close()
    while (await read_load(url)).running:
        await asyncio.sleep(0.5)
    return Phase(name, ttft, looks, rate)


async def look(runner: Runner, looks: list[int]) -> None:
    """Note how many batch requests are in flight, until cancelled."""
    while True:
        looks.append(runner.in_flight)
        await asyncio.sleep(0.5)


@contextmanager
def running(worker: Worker, ledger: Ledger) -> Iterator[None]:
    """Run a worker in a thread, and ask it to leave at the end."""
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        ledger.workers.ask_to_leave(worker.worker_id)
        thread.join()


async def live(url: str, seconds: float, every: float) -> list[float]:
    """Send live requests at a steady pace for so long, and return their times to first token in seconds."""
    async with aiohttp.ClientSession() as session:
        sent = []
        for number in range(max(1, round(seconds / every))):
            sent.append(asyncio.create_task(first_token(session, url, number)))
            await asyncio.sleep(every)
        return await asyncio.gather(*sent)


async def first_token(session: aiohttp.ClientSession, url: str, number: int) -> float:
    """Return the seconds from sending a request to the first token of its answer, and read that to its end."""
    body = {
        "model": MODEL,
        "prompt": prompt(random.Random(), 30),
        "max_tokens": LIVE_OUTPUT,
        "ignore_eos": True,
        "stream": True,
        "user": str(number),
    }
    began = time.monotonic()
    first = 0.0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data:") and not first:
                first = time.monotonic() - began
    return first


def request(index: int) -> ChunkRequest:
    """Return a batch request."""
    chosen = random.Random(index)
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt(chosen, 50)}],
        "max_tokens": BATCH_OUTPUT,
        "ignore_eos": True,
    }
    return ChunkRequest(index, f"request-{index}", msgspec.json.encode(body), 80, BATCH_OUTPUT)


def prompt(chosen: random.Random, words: int) -> str:
    """Return so many random words, each about a token."""
    return " ".join(chosen.choice(WORDS) for _ in range(words))


def print_table(phases: list[Phase], budget: float, options: argparse.Namespace) -> None:
    """Print one line for each phase."""
    print(
        f"{options.model.name} on {platform.machine()}, windows of {options.seconds:.0f} s, a live request each "
        f"{options.every:g} s, at most {options.in_flight} batch requests in flight, budget {budget:g} s\n"
    )
    print(
        "| | live requests | time to first token: median / p95 / longest | batch requests in flight | batch tokens/s |"
    )
    print("| --- | --- | --- | --- | --- |")
    flood = phases[1].tokens_a_second
    for phase in phases:
        times = sorted(phase.ttft_seconds)
        p95 = times[math.ceil(0.95 * len(times)) - 1]
        looks = kept = "-"
        if phase.in_flight:
            looks = f"{statistics.mean(phase.in_flight):.0f} ({min(phase.in_flight)} to {max(phase.in_flight)})"
            kept = f"{phase.tokens_a_second:.0f} ({phase.tokens_a_second / flood:.0%})" if flood else "-"
        print(
            f"| {phase.name} | {len(times)} | {statistics.median(times):.2f} / {p95:.2f} / {times[-1]:.2f} s "
            f"| {looks} | {kept} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
