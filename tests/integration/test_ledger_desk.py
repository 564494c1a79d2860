"""What the operator's desk asks of the ledger: progress that is due, batches at risk, alarms. SQLite and Postgres."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.alarms import AlarmKind
from batch_pipeline.ledger.desk import STEPS, Due, Settled
from batch_pipeline.ledger.records import BatchStatus
from batch_pipeline.scheduling.accuracy import Milestone, due, error_class, relative_error
from batch_pipeline.scheduling.risk import Outlook, risk_of
from tests.fakes.clock import SteppedClock
from tests.fakes.ledger_values import MODEL, finish, part_of, result_of, submitted


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def stepped(ledger_url: str, clock: SteppedClock) -> Iterator[Ledger]:
    ledger = Ledger.open(ledger_url, clock=clock)
    yield ledger
    ledger.close()


def _due(ledger: Ledger, interval: float = 30.0) -> list[Due]:
    return ledger.desk.to_observe(interval, limit=10)


def test_progress_is_shown_in_steps_and_never_more_often_than_the_interval(
    stepped: Ledger, clock: SteppedClock
) -> None:
    batch_id = submitted(stepped, "a", [MODEL] * 4).batch_id
    assert _due(stepped) == [], "nothing has finished yet"
    leases = stepped.chunks.lease("w", MODEL, 4)
    stepped.chunks.checkpoint(leases[0].ref, part_of(leases[0], 1, completed=1))
    assert _due(stepped) == [], "one of forty is no step"
    stepped.chunks.checkpoint(leases[0].ref, part_of(leases[0], 2, completed=2, failed=1))
    (due,) = _due(stepped)
    assert due == Due(batch_id, 2)
    assert stepped.desk.note_observed(due)
    assert not stepped.desk.note_observed(due), "killed after the note, it is not shown twice"
    for lease in leases[:2]:
        stepped.chunks.commit(lease.ref, result_of(lease))
    assert _due(stepped) == [], "shown a moment ago"
    clock.advance(31.0)
    assert _due(stepped) == [Due(batch_id, STEPS // 2)]


def test_a_batch_that_is_over_or_about_to_be_is_not_observed(stepped: Ledger) -> None:
    over, stopping = (submitted(stepped, name, [MODEL] * 2).batch_id for name in ("over", "stopping"))
    for lease in stepped.chunks.lease("w", MODEL, 3):
        stepped.chunks.commit(lease.ref, result_of(lease))
    stepped.batches.cancel(stopping)
    finish(stepped, over if stepped.batches.get(over).status == BatchStatus.FINALIZING else stopping)
    assert _due(stepped, 0.0) == []


def test_a_batch_at_risk_is_told_once_and_once_more_when_it_has_ended(stepped: Ledger, clock: SteppedClock) -> None:
    batch_id = submitted(stepped, "a", [MODEL] * 2, window_seconds=3600).batch_id
    clock.advance(1700.0)
    (pace,) = stepped.desk.paces()
    assert risk_of(pace, Outlook(), clock.time) is None
    clock.advance(200.0)
    assert (
        risk_of(pace, Outlook(), clock.time) == "no request has finished, and 53% of the time to the deadline is over"
    )
    assert stepped.desk.note_risk(batch_id, at_risk=True)
    assert not stepped.desk.note_risk(batch_id, at_risk=True)
    assert stepped.desk.at_risk_and_over() == []
    for lease in stepped.chunks.lease("w", MODEL, 2):
        stepped.chunks.commit(lease.ref, result_of(lease))
    finish(stepped, batch_id)
    assert stepped.desk.at_risk_and_over() == [Settled(batch_id, in_time=True, status="completed")]
    assert stepped.desk.note_risk(batch_id, at_risk=False)
    assert stepped.desk.at_risk_and_over() == []


def test_every_batch_in_progress_is_looked_at_however_many_there_are(
    stepped: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batch_pipeline.ledger.desk._PAGE", 2)
    late = [submitted(stepped, f"late-{number}", window_seconds=7200).batch_id for number in range(3)]
    soon = [submitted(stepped, f"soon-{number}", window_seconds=3600).batch_id for number in range(2)]
    assert [pace.batch_id for pace in stepped.desk.paces()] == [*sorted(soon), *sorted(late)]
    pace = stepped.desk.pace(late[1])
    assert pace is not None
    assert (pace.batch_id, pace.done, pace.total) == (late[1], 0, 10)
    assert stepped.desk.pace("batch_unknown") is None


def test_estimates_are_kept_once_for_each_milestone_and_judged_when_the_batch_has_ended(
    stepped: Ledger, clock: SteppedClock
) -> None:
    batch_id = submitted(stepped, "a", [MODEL] * 2).batch_id
    begun = clock.time
    stepped.desk.keep_estimate(batch_id, [Milestone.FIRST], begun + 150.0)
    stepped.desk.keep_estimate(batch_id, [Milestone.FIRST], begun + 999.0)
    clock.advance(50.0)
    one, other = stepped.chunks.lease("w", MODEL, 2)
    stepped.chunks.commit(one.ref, result_of(one))
    (pace,) = stepped.desk.paces()
    assert due(pace.done, pace.total, pace.kept) == [Milestone.HALF]
    stepped.desk.keep_estimate(batch_id, [Milestone.HALF], begun + 103.0)
    clock.advance(50.0)
    stepped.chunks.commit(other.ref, result_of(other))
    stepped.desk.keep_estimate(batch_id, [Milestone.HALF], begun)
    kept = stepped.desk.estimates(batch_id)
    assert {made: (round(one.made_at - begun), round(one.finish_at - begun)) for made, one in kept.items()} == {
        Milestone.FIRST: (0, 150),
        Milestone.HALF: (50, 103),
    }
    assert relative_error(kept[Milestone.FIRST], clock.time) == pytest.approx(0.5)
    finish(stepped, batch_id)
    totals = stepped.gauges.read().totals
    judged = {name: count for name, count in totals.items() if name.startswith("estimates.")}
    assert judged == {f"estimates.first.{error_class(0.5)}": 1, f"estimates.half.{error_class(0.06)}": 1}
    assert stepped.desk.estimates("batch_unknown") == {}


def test_the_queue_of_a_model_is_what_waits_and_what_workers_have_left_as_it_will_be_used(
    stepped: Ledger, clock: SteppedClock
) -> None:
    submitted(stepped, "a", [MODEL] * 3, "acme")
    submitted(stepped, "over", [MODEL], "bolt")
    submitted(stepped, "other", ["model-b"], "bolt")
    stepped.workers.register("w", MODEL, None, "here")
    leases = stepped.chunks.lease("w", MODEL, 2)
    for lease in leases:
        if lease.customer == "bolt":
            stepped.chunks.commit(lease.ref, result_of(lease))
        else:
            stepped.chunks.checkpoint(lease.ref, part_of(lease, 1, completed=2))
    queue = stepped.queues.look(MODEL, clock.time, lambda queue: queue)
    (queued,) = queue.queued
    assert (queued.waiting.customer, queued.waiting.pending_chunks, queued.leased_chunks) == ("acme", 2, 1)
    # Nine tenths of what was estimated is used: 600 wait, and of 300 with a worker eight tenths are left.
    assert queued.waiting.pending_tokens == pytest.approx(540.0)
    assert queued.leased_tokens == pytest.approx(216.0)
    assert queue.shares["acme"].served == 300.0
    assert [worker.worker_id for worker in queue.workers] == ["w"]
    clock.advance(4.0)
    assert stepped.queues.look(MODEL, clock.time, lambda queue: queue) is queue
    clock.advance(1.0)
    assert stepped.queues.look(MODEL, clock.time, lambda queue: queue) is not queue


def test_who_asks_about_many_batches_has_the_queue_read_once(stepped: Ledger, clock: SteppedClock) -> None:
    """Though the queue is read a moment after the time that all of them are asked for."""
    submitted(stepped, "a")
    asked_at = clock.time
    clock.advance(0.01)
    queue = stepped.queues.look(MODEL, asked_at, lambda queue: queue)
    assert stepped.queues.look(MODEL, asked_at, lambda queue: queue) is queue


def test_the_same_occurrence_is_one_alarm(stepped: Ledger) -> None:
    raise_alarm = stepped.alarms.raise_alarm
    assert raise_alarm(AlarmKind.RUN_FAILED, "run-1", "it failed")
    assert not raise_alarm(AlarmKind.RUN_FAILED, "run-1", "it failed")
    assert raise_alarm(AlarmKind.MODEL_WITHOUT_WORKERS, "m", "nobody", occurrence="1")
    assert raise_alarm(AlarmKind.MODEL_WITHOUT_WORKERS, "m", "nobody again", occurrence="2")
    assert stepped.alarms.resolve(AlarmKind.MODEL_WITHOUT_WORKERS, "m") == 2
    assert [alarm.subject for alarm in stepped.alarms.recent(only_current=True)] == ["run-1"]


def test_what_an_alarm_tells_of_is_current_again_when_it_comes_back(stepped: Ledger) -> None:
    """As a batch that was at risk, was to be in time, and is at risk again: told once, and shown."""
    assert stepped.alarms.raise_alarm(AlarmKind.BATCH_AT_RISK, "a", "late")
    assert stepped.alarms.resolve(AlarmKind.BATCH_AT_RISK, "a") == 1
    assert not stepped.alarms.raise_alarm(AlarmKind.BATCH_AT_RISK, "a", "late again")
    assert [alarm.subject for alarm in stepped.alarms.recent(only_current=True)] == ["a"]
    assert stepped.alarms.resolve(AlarmKind.BATCH_AT_RISK, "a") == 1


def test_alarms_are_told_together_in_one_message_at_a_time_and_again_until_they_arrive(
    stepped: Ledger, clock: SteppedClock
) -> None:
    def take() -> tuple[str, list[str], int] | None:
        message = stepped.alarms.take(lease_seconds=60.0, pause_seconds=300.0)
        return message and (message.message_id, [alarm.subject for alarm in message.alarms], message.attempt)

    assert take() is None
    for number in range(3):
        stepped.alarms.raise_alarm(AlarmKind.RUN_FAILED, f"run-{number}", "it failed")
        clock.advance(1.0)
    first = take()
    assert first is not None
    message_id = first[0]
    assert first[1:] == (["run-0", "run-1", "run-2"], 1)
    stepped.alarms.raise_alarm(AlarmKind.RUN_FAILED, "run-3", "it failed")
    assert take() is None, "one message at a time"
    stepped.alarms.failed(message_id, "answered 500", pause_seconds=10.0)
    assert take() is None, "its pause is not over"
    clock.advance(11.0)
    assert take() == (message_id, ["run-0", "run-1", "run-2"], 2)
    clock.advance(61.0)
    assert take() == (message_id, ["run-0", "run-1", "run-2"], 3), "its sender died"
    stepped.alarms.delivered(message_id)
    assert take() is None, "the pause between messages"
    clock.advance(301.0)
    then = take()
    assert then is not None
    assert then[1:] == (["run-3"], 1)
    stepped.alarms.failed(then[0], "answered 500", pause_seconds=None)
    clock.advance(1000.0)
    assert take() is None
    assert stepped.alarms.recent(1)[0].error == "answered 500"
    assert stepped.alarms.forget(2000.0) == 0
    assert stepped.alarms.forget(500.0) == 4


def test_run_again_supersedes_what_is_committed_and_refuses_who_still_works_on_it(stepped: Ledger) -> None:
    batch_id = submitted(stepped, "a", [MODEL] * 3).batch_id
    done, running, _ = leases = stepped.chunks.lease("w", MODEL, 3)
    stepped.chunks.commit(done.ref, result_of(done))
    stepped.chunks.checkpoint(running.ref, part_of(running, 1))
    assert stepped.chunks.run_again(batch_id, "operator", order="run-1") == 3
    (lane,) = stepped.batches.lanes(batch_id)
    assert (lane.pending, lane.leased, lane.committed) == (3, 0, 0)
    assert (lane.completed, lane.failed, lane.input_tokens, lane.output_tokens) == (0, 0, 0, 0)
    assert stepped.chunks.run_again(batch_id, "operator", order="run-1") == 0, "the same order again"
    for lease in leases:
        with pytest.raises(Exception, match="is not valid any more"):
            stepped.chunks.commit(lease.ref, result_of(lease))
    for lease in stepped.chunks.lease("w2", MODEL, 3):
        assert lease.parts == []
        stepped.chunks.commit(lease.ref, result_of(lease))
    assert finish(stepped, batch_id).completed == 30
    with pytest.raises(Exception, match="as a new batch"):
        stepped.chunks.run_again(batch_id, "operator", order="run-2")
