"""What operators are alarmed about beside failed runs, and how it is told: one signed message at a time, by a webhook.

Raising is the ledger's (`ledger.alarms`): an occurrence is one alarm, however often it is looked at. Telling is
bounded: what happens between two messages is told together, and a receiver that is away gets the same message, under
the same id, with growing pauses. A receiver may get one twice (its answer was lost), never an alarm in two messages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import httpx
import msgspec

from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.alarms import Alarm, AlarmKind, Message
from batch_pipeline.ledger.records import WorkerState
from batch_pipeline.plain import one_line
from batch_pipeline.results.forecast import outlook
from batch_pipeline.scheduling import accuracy
from batch_pipeline.scheduling.risk import duration, risk_of
from batch_pipeline.settings import Alarms, Settings
from batch_pipeline.wire import webhooks

_LEASE_MARGIN_SECONDS = 30.0
_THERE = (WorkerState.STARTING, WorkerState.READY)
_log = logging.getLogger(__name__)


class RiskChange(NamedTuple):
    """A batch that has come to be at risk, is so no longer, or has ended after it was."""

    batch_id: str
    on_time: bool
    text: str


class MessageData(msgspec.Struct, frozen=True, kw_only=True):
    """What a message is about."""

    alarms: list[Alarm]


class AlarmMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The body that is posted: an event as the customers' webhooks have it, and a text for people."""

    id: str
    object: str = "event"
    type: str = "alarms.raised"
    created_at: int
    """When the first of the alarms was raised, in Unix seconds."""
    text: str
    data: MessageData


def workerless(ledger: Ledger, lease_seconds: float) -> list[str]:
    """Return the models with waiting or interrupted work of which no worker is starting or ready at this moment.

    Workers of single batches are no help to the others.
    """
    wanted = [backlog.model for backlog in ledger.backlog()]
    if not wanted:
        return []
    now = ledger.now()
    served = {
        worker.model
        for worker in ledger.workers.of_models(wanted)
        if worker.state in _THERE and not worker.batches and now - worker.seen_at <= lease_seconds
    }
    return sorted(set(wanted) - served)


def look_at_models(ledger: Ledger, since: dict[str, float], alone: list[str], settings: Alarms) -> dict[str, float]:
    """Raise an alarm for models that have been without workers for too long; returns since when each one has been.

    `since` is what the last look returned, which the caller keeps. Where it was lost, the time begins anew.
    """
    now = ledger.now()
    kept = {model: since.get(model, now) for model in alone}
    for model, moment in kept.items():
        if now - moment >= settings.workerless_seconds:
            text = f"work of {model} has waited for {duration(now - moment)}, and there is no worker"
            ledger.alarms.raise_alarm(AlarmKind.MODEL_WITHOUT_WORKERS, model, text, occurrence=f"{moment:.0f}")
    for model in since.keys() - kept.keys():
        ledger.alarms.resolve(AlarmKind.MODEL_WITHOUT_WORKERS, model)
    return kept


def look_at_risks(ledger: Ledger, settings: Settings, most: int = 50) -> list[RiskChange]:
    """Raise and resolve the alarms of batches at risk; returns what has changed since the last look, to be shown. And
    keep the estimates of their finish that are due, to be judged at their end.

    Killed between the note of a change and its show: it is not shown, but its alarm is raised: that comes first.
    """
    now = ledger.now()
    changes: list[RiskChange] = []
    for pace in ledger.desk.paces():
        if len(changes) == most:
            break
        expected = outlook(pace.batch_id, pace.models, now, ledger=ledger, settings=settings)
        milestones = accuracy.due(pace.done, pace.total, pace.kept)
        if milestones and expected.finish_at is not None:
            ledger.desk.keep_estimate(pace.batch_id, milestones, expected.finish_at)
        risk = risk_of(pace, expected, now)
        if (risk is not None) == (pace.at_risk_at is not None):
            continue
        if risk is None:
            ledger.alarms.resolve(AlarmKind.BATCH_AT_RISK, pace.batch_id)
        else:
            text = f"batch {pace.batch_id} ({pace.name} of {pace.customer}): {risk}"
            ledger.alarms.raise_alarm(AlarmKind.BATCH_AT_RISK, pace.batch_id, text)
        if ledger.desk.note_risk(pace.batch_id, at_risk=risk is not None):
            changes.append(RiskChange(pace.batch_id, risk is None, risk or "it will be in time again"))
    for over in ledger.desk.at_risk_and_over(most):
        ledger.alarms.resolve(AlarmKind.BATCH_AT_RISK, over.batch_id)
        if ledger.desk.note_risk(over.batch_id, at_risk=False):
            changes.append(RiskChange(over.batch_id, over.in_time, f"it has ended: {over.status}"))
    return changes


def tell(
    ledger: Ledger, settings: Alarms, *, client: httpx.Client | None = None, clock: Callable[[], float] = time.time
) -> str | None:
    """Send the message that is due, if any, and note what came of it; returns that in words.

    Killed before it is noted: sent again once its lease is over, under the same id. Takes `timeout_seconds` at most.
    """
    if settings.url is None:
        passed = ledger.alarms.pass_over()
        return f"{passed} alarms, and no webhook to tell them to" if passed else None
    lease = settings.timeout_seconds + _LEASE_MARGIN_SECONDS
    message = ledger.alarms.take(lease_seconds=lease, pause_seconds=settings.message_seconds)
    if message is None:
        return None
    trouble = _post(message, settings.url, settings, client, int(clock()))
    if trouble is None:
        ledger.alarms.delivered(message.message_id)
        return f"{len(message.alarms)} alarms told"
    pause = _pause(message.attempt, settings)
    ledger.alarms.failed(message.message_id, trouble, pause)
    then = "given up" if pause is None else f"again in {duration(pause)}"
    _log.warning("alarms could not be told: %s; %s", trouble, then)
    return f"{len(message.alarms)} alarms could not be told: {trouble}; {then}"


def body_of(message: Message) -> bytes:
    """Return the bytes that are posted: the same in every try."""
    lines = [f"{alarm.kind}: {alarm.text}" for alarm in message.alarms]
    # Whether it was over by the time of a try, and what became of the tries, is no part of it.
    plain = [msgspec.structs.replace(alarm, over_at=None, told_at=None, error=None) for alarm in message.alarms]
    return msgspec.json.encode(
        AlarmMessage(
            id=message.message_id,
            created_at=int(message.alarms[0].raised_at),
            text="\n".join(lines),
            data=MessageData(alarms=plain),
        )
    )


def _post(message: Message, url: str, settings: Alarms, client: httpx.Client | None, now: int) -> str | None:
    """Return what is in the way of a message; None where it has arrived."""
    body = body_of(message)
    headers = {"Content-Type": "application/json", "webhook-id": message.message_id, "webhook-timestamp": str(now)}
    if settings.secret is not None:
        headers = webhooks.headers(message.message_id, body, secret=settings.secret, timestamp=now)
    try:
        if client is not None:
            answer = client.post(url, content=body, headers=headers)
        else:
            with httpx.Client(timeout=settings.timeout_seconds, trust_env=False, follow_redirects=False) as own:
                answer = own.post(url, content=body, headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        # Without the address: that of a chat's hook is its key.
        return one_line(f"{type(error).__name__}: {str(error).replace(url, 'the webhook')}")
    return None if answer.is_success else f"answered {answer.status_code}"


def _pause(attempt: int, settings: Alarms) -> float | None:
    """Return how long to wait after a try; None after the last."""
    if attempt >= settings.attempts:
        return None
    return min(settings.first_pause_seconds * 2.0 ** min(attempt - 1, 30), settings.longest_pause_seconds)
