"""Alarms reach the operators' own receiver: signed, again until they arrive, and none is lost with who sends it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import httpx
import openai
import pytest

from batch_pipeline import alarms
from batch_pipeline import settings as configuration
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.alarms import AlarmKind
from batch_pipeline.settings import CONFIG_VARIABLE, Alarms
from batch_pipeline.store import ObjectStore
from batch_pipeline.wire import webhooks
from tests.fakes import desk
from tests.fakes.clock import SteppedClock
from tests.fakes.code_location import CodeLocation
from tests.fakes.receiver import Receiver, receiver


class Killed(BaseException):
    """The end of the process at this point."""


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def ledger(ledger_url: str, clock: SteppedClock) -> Iterator[Ledger]:
    opened = Ledger.open(ledger_url, clock=clock)
    yield opened
    opened.close()


def raised(ledger: Ledger, *subjects: str) -> None:
    for subject in subjects:
        ledger.alarms.raise_alarm(AlarmKind.RUN_FAILED, subject, f"{subject} failed")


def told(got: Receiver) -> list[tuple[str, list[str]]]:
    """What came: the id of each message, and what it tells of."""
    return [
        (headers["webhook-id"], [alarm["subject"] for alarm in json.loads(body)["data"]["alarms"]])
        for headers, body in got.got
    ]


def test_a_run_that_fails_is_posted_to_the_operators_signed(
    settings_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secret = webhooks.new_secret()
    monkeypatch.setenv(CONFIG_VARIABLE, str(settings_file))
    monkeypatch.setenv("BATCH_PIPELINE__ALARMS__SECRET", secret)
    with receiver() as operators, dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        monkeypatch.setenv("BATCH_PIPELINE__ALARMS__URL", operators.url)
        location = CodeLocation(configuration.load(), instance)
        ObjectStore.open(location.settings.store).put("inbox/acme/waiting.jsonl", desk.file_of(1))
        (intake,) = location.tick("drop_folder")
        location.execute(intake)
        with pytest.raises(dg.Failure):
            location.launch("batch_results", str(intake.partition_key))
        (run,) = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE]))
        (failure,) = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.RUN_FAILURE)
        assert failure.dagster_event is not None
        location.react("failed_runs", run, failure.dagster_event)
        location.tick("alarms")
        location.tick("alarms")
        ((headers, body),) = operators.got
    openai.OpenAI(api_key="none", webhook_secret=secret).webhooks.verify_signature(body, headers)
    message = json.loads(body)
    (alarm,) = message["data"]["alarms"]
    assert (message["object"], message["type"], message["id"]) == ("event", "alarms.raised", headers["webhook-id"])
    assert alarm["kind"] == "run_failed"
    assert alarm["text"].startswith(f"run {run.run_id} (__ASSET_JOB of {intake.partition_key}) failed: ")
    assert message["text"] == f"run_failed: {alarm['text']}"


@pytest.mark.parametrize("sensor", ["alarms", "gpu_workers"])
def test_the_limit_of_a_pool_that_was_changed_by_hand_is_the_catalogues_again(
    settings_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sensor: str
) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, str(settings_file))
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        location = CodeLocation(configuration.load(), instance)
        [(model, given)] = location.settings.models.items()
        for by_hand in (0, given.pool_limit + 5):
            instance.event_log_storage.set_concurrency_slots(model, by_hand)
            location.tick(sensor)
            (pool,) = instance.event_log_storage.get_pool_limits()
            assert (pool.name, pool.limit) == (model, given.pool_limit)


def test_a_message_is_sent_again_with_growing_pauses_until_it_arrives(ledger: Ledger, clock: SteppedClock) -> None:
    raised(ledger, "run-1", "run-2")
    with receiver(500, 503) as operators:
        settings = Alarms(url=operators.url, first_pause_seconds=10.0)
        assert "2 alarms could not be told: answered 500; again in 10 s" in str(alarms.tell(ledger, settings))
        raised(ledger, "run-3")
        assert alarms.tell(ledger, settings) is None, "its pause is not over"
        clock.advance(10.0)
        assert "answered 503; again in 20 s" in str(alarms.tell(ledger, settings))
        clock.advance(20.0)
        assert alarms.tell(ledger, settings) == "2 alarms told"
        clock.advance(settings.message_seconds)
        assert alarms.tell(ledger, settings) == "1 alarms told"
        first, *again, then = told(operators)
        assert again == [first, first]
        assert first[1] == ["run-1", "run-2"]
        assert (then[1], then[0] == first[0]) == (["run-3"], False)
        assert len({body for _, body in operators.got[:3]}) == 1


@pytest.mark.parametrize("arrives", [False, True], ids=["before it is sent", "before its arrival is noted"])
def test_no_alarm_is_lost_with_the_process_that_sends_it(ledger: Ledger, clock: SteppedClock, *, arrives: bool) -> None:
    raised(ledger, "run-1")
    with receiver() as operators:
        settings = Alarms(url=operators.url)

        def killed(request: httpx.Request) -> httpx.Response:
            if arrives:
                httpx.post(request.url, content=request.content, headers=request.headers)
            raise Killed

        with httpx.Client(transport=httpx.MockTransport(killed)) as client, pytest.raises(Killed):
            alarms.tell(ledger, settings, client=client)
        assert alarms.tell(ledger, settings) is None, "whoever had it may still live"
        clock.advance(settings.timeout_seconds + 31.0)
        assert alarms.tell(ledger, settings) == "1 alarms told"
        came = told(operators)
        assert came[-1][1] == ["run-1"]
        assert came == [came[-1]] * (2 if arrives else 1), "twice under one id, never under two"
        clock.advance(settings.message_seconds)
        assert alarms.tell(ledger, settings) is None


def test_an_alarm_is_sent_nowhere_else_and_its_address_is_in_no_log(ledger: Ledger) -> None:
    raised(ledger, "run-1")
    with receiver(302) as operators:
        said = alarms.tell(ledger, Alarms(url=f"{operators.url}key-of-a-chat", attempts=1))
        assert len(operators.got) == 1
    assert said == "1 alarms could not be told: answered 302; given up"
    raised(ledger, "run-2")
    (alarm,) = [alarm for alarm in ledger.alarms.recent() if alarm.subject == "run-1"]
    assert alarm.error == "answered 302"
