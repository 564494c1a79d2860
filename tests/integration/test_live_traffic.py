"""A worker on an engine that live traffic uses too: it goes by what live traffic leaves, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from batch_pipeline.engine.live import LiveProbe
from batch_pipeline.engine.metrics import parse, read_load
from batch_pipeline.errors import EngineError
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import BatchStatus, WorkerState
from batch_pipeline.models import ENDPOINTS, Shared
from batch_pipeline.scheduling.governor import Load
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from tests.fakes import engine as fake_engine
from tests.fakes.batches import chat_request, make_batch
from tests.fakes.engine import MODEL, RunningFake, Stats
from tests.fakes.waiting import wait_until
from tests.fakes.workers import attached, in_thread, lines_of, make_worker, quick


@pytest.fixture
def ledger(sqlite_url: str) -> Iterator[Ledger]:
    """One ledger is enough: nothing here depends on which."""
    opened = Ledger.open(sqlite_url)
    yield opened
    opened.close()


@pytest.fixture
def fake() -> Iterator[RunningFake]:
    """A fake engine whose answers take a tenth of a second."""
    with fake_engine.running("--delay", "0.1", "--spread", "0") as running:
        yield running


def shared(settings: Settings, fake: RunningFake, **changes: Any) -> Settings:
    """Return settings of a worker on a fake engine that live traffic uses too."""
    rules = {"live_traffic": True, "live_ttft_budget_seconds": 0.5, "probe_seconds": 0.02, **changes}
    return quick(settings, model={"engine_url": fake.url, "max_in_flight": 32, "shared": Shared(**rules)})


def test_it_takes_the_whole_engine_while_live_traffic_does_not_suffer(
    ledger: Ledger, store: ObjectStore, settings: Settings, fake: RunningFake
) -> None:
    batch = make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(1000)]])
    generous = shared(settings, fake, live_ttft_budget_seconds=30.0)
    # Each stays for long: the way up takes about thirty measures, and there must be work left at its end.
    fake.control(batch_seconds=1.0)
    with in_thread(make_worker(ledger, store, generous, attached(fake.url))):
        wait_until(lambda: fake.stats().max_batch_in_flight == 32, "it has all that it may")
        assert _detail(ledger) == ""
        fake.control(delay_seconds=0.0)
    assert len(lines_of(ledger, store, batch.batch_id)) == 1000
    assert fake.stats().live_calls > 1


def test_a_stop_acts_at_once_says_why_and_what_was_taken_back_is_no_try_of_its_requests(
    ledger: Ledger, store: ObjectStore, settings: Settings, fake: RunningFake
) -> None:
    # So many, and so slow, that there is work left when this test comes to make it slower.
    fake.control(batch_seconds=0.5)
    batch = make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(300)]])
    # With one try each: whatever counted as a try would end as an error.
    configured = shared(settings, fake)
    once = msgspec.structs.replace(configured.worker, max_request_attempts=1)
    worker = make_worker(ledger, store, msgspec.structs.replace(configured, worker=once), attached(fake.url))
    with in_thread(worker) as ends:
        wait_until(lambda: fake.stats().batch_in_flight >= 2, "batch requests are told from live ones")
        fake.control(batch_seconds=5.0)
        quick_ones = _batch_calls(fake.stats())
        # Those that came before may be answered before the stop, and are not taken back then.
        wait_until(lambda: _batch_calls(fake.stats()) >= quick_ones + 8, "many slow requests are in flight")
        fake.control(live_seconds=1.2)
        wait_until(lambda: "live traffic first: live requests wait" in _detail(ledger), "the ledger says why")
        wait_until(lambda: fake.stats().batch_in_flight <= 1, "all but the oldest were taken back")
        before = fake.stats()
        assert before.abandoned >= 7
        wait_until(lambda: fake.stats().live_calls > before.live_calls + 1, "live requests are slow once more")
        after = fake.stats()
        assert _batch_calls(after) == _batch_calls(before)
        fake.control()
    (report,) = ends
    assert not isinstance(report, BaseException)
    lines = lines_of(ledger, store, batch.batch_id)
    assert sorted(lines) == list(range(300))
    assert all(line["response"]["status_code"] == 200 for line in lines.values())
    assert ledger.batches.get(batch.batch_id).status is BatchStatus.FINALIZING


def _batch_calls(stats: Stats) -> int:
    return stats.calls - stats.live_calls


def _detail(ledger: Ledger) -> str:
    return next((worker.detail or "" for worker in ledger.workers.of_models([MODEL])), "")


def test_live_requests_that_wait_while_the_cache_is_full_stop_it_until_there_is_room(
    ledger: Ledger, store: ObjectStore, settings: Settings, fake: RunningFake
) -> None:
    fake.control(live_running=20, live_waiting=3, kv_cache_usage=0.97)
    make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(20)]])
    with in_thread(make_worker(ledger, store, shared(settings, fake), attached(fake.url))) as ends:
        wait_until(lambda: "97% of its KV cache is in use" in _detail(ledger), "the ledger says why")
        fake.control(live_running=20)
    (report,) = ends
    assert not isinstance(report, BaseException)
    assert report.requests == 20


def test_with_latency_that_grows_with_batch_work_it_settles_below_the_budget(
    ledger: Ledger, store: ObjectStore, settings: Settings, fake: RunningFake
) -> None:
    # Each batch request costs live ones 40 ms: with the 100 ms of the answer itself, ten of them are the budget.
    fake.control(live_seconds_each=0.04)
    make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(150)]])
    make_worker(ledger, store, shared(settings, fake), attached(fake.url)).run()
    assert 2 <= fake.stats().max_batch_in_flight <= 10


def test_metrics_that_cannot_be_read_mean_one_at_a_time_and_the_status_says_so(
    ledger: Ledger, store: ObjectStore, settings: Settings, fake: RunningFake
) -> None:
    fake.control(metrics_status=404)
    make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(60)]])
    with in_thread(make_worker(ledger, store, shared(settings, fake), attached(fake.url))) as ends:
        said = "the metrics of its engine cannot be read: it answers 404 to /metrics: one request at a time"
        wait_until(lambda: _detail(ledger) == said, "the ledger says why")
        assert fake.stats().max_batch_in_flight <= 1
        fake.control()
        wait_until(lambda: not _detail(ledger) or bool(ends), "nothing holds it up any more")
    (seen,) = ledger.workers.of_models([MODEL])
    assert seen.state is WorkerState.STOPPED
    assert fake.stats().max_batch_in_flight > 1


def test_an_engine_that_takes_no_priority_gets_none(
    ledger: Ledger, store: ObjectStore, settings: Settings, fake: RunningFake
) -> None:
    fake.control(takes_priority=False)
    batch = make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(40)]])
    make_worker(ledger, store, shared(settings, fake), attached(fake.url)).run()
    lines = lines_of(ledger, store, batch.batch_id)
    assert all(line["response"]["status_code"] == 200 for line in lines.values())
    assert fake.stats().max_batch_in_flight == 1  # the question whether it takes one


def test_load_of_several_parts_is_added_up_and_of_the_caches_the_fullest_counts() -> None:
    text = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:num_preemptions_total{engine="0",model_name="m"} 1.2e+02
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
"""
    assert parse(text) == Load(running=7, waiting=1, kv_cache_usage=0.5, preemptions=120)


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "num_requests_running, vllm:num_requests_waiting"), ("vllm:num_requests_running many\n", "is 'many'")],
)
def test_metrics_without_the_load_are_an_error_in_words(text: str, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        parse(text)


@pytest.mark.parametrize("endpoint", [name for name in ENDPOINTS if name != "/v1/embeddings"])
def test_a_live_probe_of_each_endpoint_is_answered(fake: RunningFake, endpoint: str) -> None:
    async def ask() -> tuple[float, bool | None, Load]:
        probe = LiveProbe(fake.url, MODEL, [endpoint], asyncio.get_running_loop().time)
        try:
            return await probe.seconds(), await probe.takes_priority(100), await read_load(fake.url)
        finally:
            await probe.close()

    seconds, takes_priority, load = asyncio.run(ask())
    assert seconds >= 0.1
    assert takes_priority is True
    assert load == Load(running=0, waiting=0, kv_cache_usage=0.0, preemptions=0)
