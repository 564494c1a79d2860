"""What vLLM's `/metrics` says about its load, as far as the governor of shared engines needs it.

The names are those of vLLM's V1 engine (vllm/v1/metrics/loggers.py). An engine of several data-parallel parts tells
each part's figures: requests are added up, and of the caches the fullest one counts.
"""

from __future__ import annotations

import re

import aiohttp

from batch_pipeline.engine.probe import fetch, said
from batch_pipeline.errors import EngineError
from batch_pipeline.scheduling.governor import Load

READ_SECONDS = 3.0
"""How long the engine may take to tell its metrics."""
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
_SAMPLE = re.compile(
    rf"^({'|'.join((RUNNING, WAITING, KV_CACHE_USAGE, PREEMPTIONS))})(?:\{{.*\}})? (\S+)", re.MULTILINE
)


async def read_load(url: str) -> Load:
    """Ask the engine at `url`. Raises EngineError, in words for a status, where it does not tell."""
    try:
        status, body = await fetch(f"{url}/metrics", READ_SECONDS)
    except (TimeoutError, aiohttp.ClientError) as error:
        raise EngineError(f"the metrics of its engine cannot be read: {said(error)}") from error
    if status != 200:
        raise EngineError(f"the metrics of its engine cannot be read: it answers {status} to /metrics")
    return parse(body.decode(errors="replace"))


def parse(text: str) -> Load:
    """Return the load from a page in Prometheus' text format. Raises EngineError where a figure is missing."""
    found: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(text):
        try:
            found.setdefault(name, []).append(float(value))
        except ValueError as error:
            raise EngineError(f"the metrics of its engine cannot be read: {name} is {value!r}") from error
    if missing := [name for name in (RUNNING, WAITING, KV_CACHE_USAGE) if name not in found]:
        raise EngineError(f"the metrics of its engine cannot be used: {', '.join(missing)} is not among them")
    return Load(
        running=round(sum(found[RUNNING])),
        waiting=round(sum(found[WAITING])),
        kv_cache_usage=max(found[KV_CACHE_USAGE]),
        preemptions=round(sum(found.get(PREEMPTIONS, []))),
    )
