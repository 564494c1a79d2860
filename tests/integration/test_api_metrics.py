"""/metrics: true figures, labels whose number nobody outside can raise, and an answer while the ledger is away."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.exc import OperationalError

from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import WorkerState
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from tests.fakes import service
from tests.fakes.clock import SteppedClock
from tests.fakes.ledger_values import MODEL, finish, result_of, submitted

Figures = dict[tuple[str, tuple[tuple[str, str], ...]], float]


BOTH = pytest.mark.parametrize("ledger_url", ["sqlite_url", "postgres_url"], indirect=True)
"""The other tests run on SQLite alone: what they ask of the ledger is asked on both by these, or by its own tests."""


@pytest.fixture
def ledger_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty ledger database: SQLite's, unless a test is marked."""
    url: str = request.getfixturevalue(getattr(request, "param", "sqlite_url"))
    return url


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def ledger(ledger_url: str, clock: SteppedClock) -> Iterator[Ledger]:
    opened = Ledger.open(ledger_url, clock=clock)
    yield opened
    opened.close()


@pytest.fixture
def client(ledger: Ledger, store: ObjectStore, settings: Settings) -> Iterator[httpx.Client]:
    with service.running(ledger, store, settings) as running, httpx.Client(base_url=running.url) as opened:
        yield opened


def figures(client: httpx.Client) -> Figures:
    answer = client.get("/metrics")
    assert answer.status_code == 200
    families = text_string_to_metric_families(answer.text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def of(found: Figures, name: str, **labels: str) -> float:
    return found[f"batch_pipeline_{name}", tuple(sorted(labels.items()))]


@BOTH
def test_figures_are_those_of_the_ledger(client: httpx.Client, ledger: Ledger, clock: SteppedClock) -> None:
    before = figures(client)
    assert of(before, "ledger_up") == 1
    assert of(before, "requests_ended_total", result="completed") == 0

    ledger.workers.register("w", MODEL, None, "here")
    ledger.workers.set_state("w", WorkerState.READY)
    done = submitted(ledger, "done", [MODEL])
    (lease,) = ledger.chunks.lease("w", MODEL, 1, [done.batch_id])
    result = result_of(lease, failed=2)
    ledger.chunks.commit(lease.ref, result)
    batch = finish(ledger, done.batch_id)
    waiting = submitted(ledger, "waiting", [MODEL] * 3)
    ledger.chunks.lease("w", MODEL, 1, [waiting.batch_id])
    found = figures(client)
    assert of(found, "batches_ended_total", status="completed") == 1
    assert of(found, "requests_ended_total", result="completed") == batch.completed
    assert of(found, "requests_ended_total", result="failed") == 2
    assert of(found, "tokens_total", kind="output") == batch.output_tokens
    assert of(found, "batches_open", status="in_progress") == 1
    assert of(found, "batches_open", status="validating") == 0
    assert of(found, "chunks", model=MODEL, state="pending") == 2
    assert of(found, "chunks", model=MODEL, state="leased") == 1
    [lane] = ledger.batches.lanes(waiting.batch_id)
    assert of(found, "backlog_tokens", model=MODEL) == lane.pending_tokens
    assert of(found, "workers", model=MODEL, state="ready") == 1
    assert (of(found, "leases_overdue"), of(found, "leases_expired_total")) == (0, 0)

    clock.advance(61)
    assert of(figures(client), "leases_overdue") == 1
    ledger.chunks.expire_leases()
    found = figures(client)
    assert (of(found, "leases_overdue"), of(found, "leases_expired_total")) == (0, 1)
    clock.advance(300)
    assert ("batch_pipeline_workers", (("model", MODEL), ("state", "ready"))) not in figures(client)


def test_requests_are_counted_by_route_and_nothing_that_is_sent_becomes_a_label(client: httpx.Client) -> None:
    client.get("/healthz")
    for number in range(20):
        client.get(f"/v1/nothing-{number}")
        client.request(f"METHOD{number}", "/healthz")
    found = figures(client)
    assert of(found, "api_requests_total", method="GET", route="/healthz", status="200") == 1
    assert of(found, "api_requests_total", method="GET", route="none", status="404") == 20
    labelled = {labels for name, labels in found if name == "batch_pipeline_api_requests_total"}
    assert len(labelled) <= 5
    assert "nothing-" not in str(labelled)
    assert "METHOD" not in str(labelled)
    assert of(found, "api_seconds_count", route="none") == 20


def test_ledger_that_is_away_is_a_figure(client: httpx.Client, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> None:
        raise OperationalError("SELECT", {}, Exception("gone"))

    monkeypatch.setattr(ledger.gauges, "read", away)
    found = figures(client)
    assert of(found, "ledger_up") == 0
    assert not [name for name, _ in found if name.startswith("batch_pipeline_batches")]


def test_metrics_ask_for_their_key_where_there_is_one(sqlite_url: str, store: ObjectStore, settings: Settings) -> None:
    ledger = Ledger.open(sqlite_url)
    api = msgspec.structs.replace(settings.api, metrics_key="of-prometheus")
    with service.running(ledger, store, msgspec.structs.replace(settings, api=api)) as running:
        url = f"{running.url}/metrics"
        answers = [
            httpx.get(url, headers=headers).status_code
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": f"Bearer {service.new_key(ledger)}"},
                {"Authorization": "Bearer of-prometheus"},
            )
        ]
    assert answers == [401, 401, 401, 200]
    ledger.close()
