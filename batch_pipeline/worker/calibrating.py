"""A calibration on its own, before there is work: `batch-pipeline calibrate`."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator

import msgspec

from batch_pipeline.engine import Engine, EngineClient
from batch_pipeline.engine.calibration import Search, Step
from batch_pipeline.engine.measuring import Load
from batch_pipeline.errors import NotFound
from batch_pipeline.ledger import Ledger
from batch_pipeline.models import RESPONSES
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from batch_pipeline.wire import chunk_files
from batch_pipeline.worker import outcome
from batch_pipeline.worker.calibrations import Calibration, concluded, record, subject_of

MADE_UP_ENDPOINT = "/v1/completions"
_WORDS = ("time", "person", "year", "way", "thing", "man", "world", "hand", "child", "eye", "woman", "place", "week")


class Workload(msgspec.Struct, frozen=True):
    """Which requests to measure with: bodies without end."""

    endpoint: str
    bodies: Iterator[bytes]


def made_up(model: str, prompt_words: int, answer_tokens: int) -> Workload:
    """Return requests that share nothing, each with an answer of exactly so many tokens."""
    chance = random.Random(5)  # noqa: S311 - words

    def bodies() -> Iterator[bytes]:
        while True:
            prompt = " ".join(chance.choices(_WORDS, k=prompt_words))
            body = {"model": model, "prompt": prompt, "max_tokens": answer_tokens, "ignore_eos": True}
            yield msgspec.json.encode(body)

    return Workload(MADE_UP_ENDPOINT, bodies())


def of_batch(batch_id: str, model: str, ledger: Ledger, store: ObjectStore) -> Workload:
    """Return the requests of a batch's first chunk of a model, again and again: each time with another salt, so that
    the prefix cache has what they share and not what was asked before.

    Raises NotFound where there is no such batch, or it has no chunk of the model any more.
    """
    batch = ledger.batches.get(batch_id)
    chunk = next((chunk for chunk in ledger.chunks.of(batch_id) if chunk.model == model), None)
    if chunk is None:
        raise NotFound(f"batch {batch_id} has no chunk of {model}: name one that waits or runs")
    requests = chunk_files.read_requests(store.get(chunk.input_key))

    def bodies() -> Iterator[bytes]:
        for turn in itertools.count():
            for request in requests:
                body = outcome.salted(request.body, f"calibration {turn}")
                yield outcome.unstored(body) if batch.endpoint == RESPONSES else body

    return Workload(batch.endpoint, bodies())


async def calibrate(
    engine: Engine,
    model: str,
    workload: Workload,
    search: Search,
    *,
    least_seconds: float,
    settings: Settings,
    store: ObjectStore,
    told: Callable[[Step], None],
) -> Calibration:
    """Start the engine, find how many requests at once it does best with, and keep that for workers; `told` hears each
    measure. Killed before its end, nothing is kept.

    Raises EngineError where the engine does not start or refuses a request, NoAnswer, StoreError.
    """
    await engine.start()
    try:
        await engine.wait_ready()
        version = await engine.version()
        async with EngineClient(engine.url, settings.worker.max_answer_bytes) as client:
            load = Load(client, workload.endpoint, workload.bodies, least_seconds=least_seconds, clock=time.monotonic)
            await load.find(search, told)
    finally:
        await engine.stop()
    subject = subject_of(model, settings.models[model], version, settings.worker.machine)
    calibration = concluded(subject, search, time.time())
    record(store, calibration)
    return calibration
