"""What live traffic leaves: by the schedule, and by the answers of a Prometheus server."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest

from batch_pipeline.errors import OperatorError
from batch_pipeline.live import LiveHours, live_gpus, problem_of
from batch_pipeline.live_load import LiveLoad, query
from batch_pipeline.settings import Live, Settings, check


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


DAY = LiveHours(hours="08:00-20:00", gpus=6, days=["mon", "tue", "wed", "thu", "fri"])
NIGHT = LiveHours(hours="22:00-06:00", gpus=2, days=["fri"])


@pytest.mark.parametrize(
    ("moment", "gpus"),
    [
        ("2026-11-30T07:59:59", 0),  # a Monday
        ("2026-11-30T08:00:00", 6),
        ("2026-11-30T19:59:59", 6),
        ("2026-11-30T20:00:00", 0),
        ("2026-12-05T12:00:00", 0),  # a Saturday
        ("2026-12-04T23:00:00", 2),  # Friday night
        ("2026-12-05T05:59:00", 2),  # goes on into Saturday
        ("2026-12-05T06:00:00", 0),
        ("2026-12-05T23:00:00", 0),
    ],
)
def test_the_schedule_goes_by_utc_hours_and_days(moment: str, gpus: int) -> None:
    assert live_gpus([DAY, NIGHT], at(moment)) == gpus


def test_where_entries_overlap_the_most_of_them_counts() -> None:
    assert live_gpus([DAY, LiveHours(hours="00:00-24:00", gpus=1)], at("2026-11-30T12:00:00")) == 6
    assert live_gpus([DAY, LiveHours(hours="00:00-24:00", gpus=1)], at("2026-11-30T21:00:00")) == 1


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (LiveHours(hours="8-20", gpus=1), "hours must be written"),
        (LiveHours(hours="08:00-24:30", gpus=1), "hours must be written"),
        (LiveHours(hours="08:00-20:00", gpus=-1), "0 or more"),
        (LiveHours(hours="08:00-20:00", gpus=1, days=["monday"]), "'monday'"),
    ],
)
def test_a_mistake_in_the_schedule_is_one_clear_line(entry: LiveHours, said: str) -> None:
    assert said in str(problem_of(entry))
    assert any("live.schedule[0]" in problem for problem in check(Settings(live=Live(schedule=[entry]))))


def test_the_server_and_its_query_belong_together() -> None:
    assert any("belong together" in problem for problem in check(Settings(live=Live(prometheus_url="http://p:9090"))))


@pytest.fixture
def prometheus() -> Iterator[Callable[[int, object], str]]:
    """Returns the URL of a server that gives an answer to every query."""
    answers: list[tuple[int, object]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers[-1]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def answering(status: int, body: object) -> str:
        answers.append((status, body))
        return f"http://127.0.0.1:{server.server_port}"

    yield answering
    server.shutdown()
    thread.join()
    server.server_close()


def vector(*values: str) -> dict[str, object]:
    result = [{"metric": {}, "value": [1.5, value]} for value in values]
    return {"status": "success", "data": {"resultType": "vector", "result": result}}


def test_a_query_gives_a_number(prometheus: Callable[[int, object], str]) -> None:
    assert query(prometheus(200, vector("1.5", "2")), "q") == 3.5
    scalar = {"status": "success", "data": {"resultType": "scalar", "result": [1.5, "4"]}}
    assert query(prometheus(200, scalar), "q") == 4.0


def test_a_query_without_a_sample_is_unknown_and_not_nothing(prometheus: Callable[[int, object], str]) -> None:
    """As when an exporter or a label is gone: batch would take the GPUs of live traffic."""
    with pytest.raises(OperatorError, match=r"gives no sample.* write `\.\.\. or vector\(0\)`"):
        query(prometheus(200, vector()), "q")
    live = LiveLoad(Live(prometheus_url=prometheus(200, vector()), prometheus_query="q", gpus_when_unknown=8))
    gpus, trouble = live.gpus(at("2026-11-30T21:00:00"))
    assert gpus == 8
    assert "or vector(0)" in str(trouble)
    prometheus(200, vector("0"))
    assert live.gpus(at("2026-11-30T21:00:05")) == (0, None)


@pytest.mark.parametrize(
    ("kind", "result"),
    [("matrix", []), ("matrix", [{"metric": {}, "values": [[1.5, "3"]]}]), ("string", [1.5, "3"])],
)
def test_only_a_scalar_or_an_instant_vector_is_a_number_of_gpus(
    prometheus: Callable[[int, object], str], kind: str, result: object
) -> None:
    body = {"status": "success", "data": {"resultType": kind, "result": result}}
    with pytest.raises(OperatorError, match=f"gives a {kind}, .* a scalar or an instant vector"):
        query(prometheus(200, body), "q")


@pytest.mark.parametrize(
    ("status", "body"),
    [(500, {}), (200, []), (200, vector("NaN")), (200, vector("x")), (200, {"data": {"resultType": "string"}})],
)
def test_an_answer_that_is_none_is_said(prometheus: Callable[[int, object], str], status: int, body: object) -> None:
    with pytest.raises(OperatorError, match="prometheus"):
        query(prometheus(status, body), "q")


def test_the_last_answer_stands_in_for_a_missing_one_and_then_what_the_operator_says(
    prometheus: Callable[[int, object], str],
) -> None:
    url = prometheus(200, vector("2.2"))
    live = LiveLoad(Live(schedule=[DAY], prometheus_url=url, prometheus_query="q", gpus_when_unknown=8))
    night = at("2026-11-30T21:00:00")
    assert live.gpus(night) == (3, None)
    prometheus(500, {})
    gpus, trouble = live.gpus(night + 599)
    assert gpus == 3
    assert trouble is not None
    assert live.gpus(night + 601)[0] == 8
    prometheus(200, vector("1"))
    assert live.gpus(night + 700) == (1, None)
    assert live.gpus(at("2026-11-30T12:00:00"))[0] == 6


def test_a_clock_set_back_does_not_keep_a_stale_answer(prometheus: Callable[[int, object], str]) -> None:
    url = prometheus(200, vector("2"))
    live = LiveLoad(Live(prometheus_url=url, prometheus_query="q", gpus_when_unknown=8))
    night = at("2026-11-30T21:00:00")
    assert live.gpus(night) == (2, None)
    prometheus(500, {})
    assert live.gpus(night - 599)[0] == 2
    assert live.gpus(night - 86_400)[0] == 8
