"""`/metrics` for Prometheus: what the ledger has, and what this process was asked.

Labels are statuses, states, models of the catalogue, and routes as they are written in the code: their number is
bounded, and nothing that a customer sends, and no customer's name, becomes one. What the ledger has is read when it is
asked for.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Iterator
from itertools import accumulate

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batch_pipeline.api.problems import RequestRefused
from batch_pipeline.api.services import Shared
from batch_pipeline.ledger import Ledger, tallies
from batch_pipeline.ledger.gauges import Gauges
from batch_pipeline.ledger.records import BatchStatus
from batch_pipeline.scheduling.accuracy import ERROR_BOUNDS, Milestone

router = APIRouter(tags=["operators"])
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_NO_ROUTE = "none"
_SECONDS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0)
_RESULTS = ("completed", "failed", "expired", "cancelled", "invalid")
_TOKENS = ("input", "cached", "output")
_log = logging.getLogger(__name__)


class LedgerCollector(Collector):
    """What the ledger has, at the moment at which it is asked."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def describe(self) -> Iterable[Metric]:
        """Return nothing: what there is, is known only once the ledger is read."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the ledger's figures; where it is away only that it is."""
        up = "Whether the ledger can be read."
        try:
            gauges = self._ledger.gauges.read()
        except SQLAlchemyError as error:
            _log.warning("metrics: the ledger cannot be read: %s", error)
            yield GaugeMetricFamily("batch_pipeline_ledger_up", up, value=0)
            return
        yield GaugeMetricFamily("batch_pipeline_ledger_up", up, value=1)
        yield from _now(gauges)
        yield from _since_the_beginning(gauges.totals)


def _now(gauges: Gauges) -> Iterator[Metric]:
    opened = GaugeMetricFamily("batch_pipeline_batches_open", "Batches without a final status.", labels=["status"])
    for status in BatchStatus:
        if not status.is_final:
            opened.add_metric([str(status)], gauges.open_batches.get(status, 0))
    yield opened
    in_chunks = GaugeMetricFamily(
        "batch_pipeline_chunks",
        "Chunks of open batches; stopped: cancelled, expired or given up.",
        labels=["model", "state"],
    )
    for (model, state), count in sorted(gauges.chunks.items()):
        in_chunks.add_metric([model, state], count)
    yield in_chunks
    backlog = GaugeMetricFamily(
        "batch_pipeline_backlog_tokens", "Estimated tokens, prompts and answers, of chunks that wait.", labels=["model"]
    )
    for model, tokens in sorted(gauges.backlog_tokens.items()):
        backlog.add_metric([model], tokens)
    yield backlog
    seen = GaugeMetricFamily(
        "batch_pipeline_workers", "Workers heard of in the last five minutes.", labels=["model", "state"]
    )
    for (model, state), count in sorted(gauges.workers.items()):
        seen.add_metric([model, state], count)
    yield seen
    yield GaugeMetricFamily(
        "batch_pipeline_leases_overdue", "Leases that have run out and were not taken away yet.", gauges.overdue_leases
    )
    yield GaugeMetricFamily(
        "batch_pipeline_webhooks_waiting", "Webhook events that are still to be sent.", gauges.waiting_webhooks
    )


def _estimate_errors(totals: dict[str, int]) -> Metric:
    errors = HistogramMetricFamily(
        "batch_pipeline_estimate_error",
        "Of completed batches: by which share of the time that was left the estimate of their finish was off.",
        labels=["made"],
    )
    for milestone in Milestone:
        counts = [totals.get(f"{tallies.ESTIMATES}{milestone}.{n}", 0) for n in range(len(ERROR_BOUNDS) + 1)]
        up_to = zip([*map(str, ERROR_BOUNDS), "+Inf"], accumulate(counts), strict=True)
        errors.add_metric([str(milestone)], [(bound, count) for bound, count in up_to], sum_value=None)
    return errors


def _since_the_beginning(totals: dict[str, int]) -> Iterator[Metric]:
    ended = CounterMetricFamily("batch_pipeline_batches_ended", "Batches with a final status.", labels=["status"])
    for status in BatchStatus:
        if status.is_final:
            ended.add_metric([str(status)], totals.get(f"{tallies.ENDED}{status}", 0))
    yield ended
    results = CounterMetricFamily(
        "batch_pipeline_requests_ended", "Requests of batches that have ended, by how they ended.", labels=["result"]
    )
    for result in _RESULTS:
        results.add_metric([result], totals.get(f"{tallies.REQUESTS}{result}", 0))
    yield results
    tokens = CounterMetricFamily(
        "batch_pipeline_tokens", "Tokens of answered requests of batches that have ended.", labels=["kind"]
    )
    for kind in _TOKENS:
        tokens.add_metric([kind], totals.get(f"{tallies.TOKENS}{kind}", 0))
    yield tokens
    yield CounterMetricFamily(
        "batch_pipeline_leases_expired",
        "Leases that ran out because their worker was not heard of.",
        totals.get(tallies.LEASES_EXPIRED, 0),
    )
    yield _estimate_errors(totals)


class Counting:
    """ASGI middleware, outermost: counts what was asked by route and status, and how long it took."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._requests = Counter(
            "batch_pipeline_api_requests", "Requests answered.", ["method", "route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "batch_pipeline_api_seconds",
            "Time to the end of the answer.",
            ["route"],
            registry=registry,
            buckets=_SECONDS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500
        began = time.monotonic()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            route = getattr(scope.get("route"), "path", _NO_ROUTE)
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._requests.labels(method, route, str(status)).inc()
            self._seconds.labels(route).observe(time.monotonic() - began)


def install(app: FastAPI, ledger: Ledger) -> None:
    """Count the application's requests, and serve them with the ledger's figures at /metrics."""
    registry = CollectorRegistry()
    registry.register(LedgerCollector(ledger))
    ProcessCollector(registry=registry)
    app.state.metrics = registry
    app.add_middleware(Counting, registry=registry)
    app.include_router(router)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def metrics(request: Request, services: Shared) -> Response:
    """Return the figures in Prometheus's format. Where `api.metrics_key` is set, it is asked for as a bearer."""
    wanted = services.settings.api.metrics_key
    if wanted is not None:
        given = request.headers.get("authorization", "")
        if not secrets.compare_digest(given.encode(), f"Bearer {wanted}".encode()):
            challenge = {"WWW-Authenticate": "Bearer"}
            raise RequestRefused(401, "invalid_api_key", "Send api.metrics_key as a bearer.", headers=challenge)
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(request.app.state.metrics), headers={"Content-Type": content_type})
