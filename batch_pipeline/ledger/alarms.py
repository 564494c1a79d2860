"""Alarms of operators: raised once for each occurrence, told by a webhook in messages, a bounded number of them.

    raised ──take──> in a message that is being sent ──delivered | given up──> told
                              ^ └──failed, again after a pause──┘

Each function is one transaction: killed before its commit nothing has changed, after it all has. A message that was
taken and never acknowledged is taken again once its lease has run out, with the same alarms and the same id.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Any

import msgspec
import sqlalchemy as sa

from batch_pipeline.ledger.database import Database, Transaction
from batch_pipeline.ledger.schema import alarms, is_untold
from batch_pipeline.ledger.transitions import insert_for

_MOST_CHARACTERS = 1000
_SENDING_LOCK = 7_240_003
"""Advisory lock under which one process at a time chooses a message, on Postgres; SQLite has one writer anyway."""


class AlarmKind(StrEnum):
    """What alarms tell of."""

    RUN_FAILED = "run_failed"
    BATCH_AT_RISK = "batch_at_risk"
    MODEL_WITHOUT_WORKERS = "model_without_workers"


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """One occurrence of something that an operator should know."""

    alarm_id: str
    kind: AlarmKind
    subject: str
    """The id of a run or batch, or the name of a model."""
    text: str
    raised_at: float
    over_at: float | None
    """When it had passed; of a failed run never."""
    told_at: float | None
    """When it was told, or given up."""
    error: str | None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Alarms that are told together; the same in every try."""

    message_id: str
    alarms: list[Alarm]
    attempt: int
    """1 for the first try."""


class Alarms:
    """The alarms and their messages."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def raise_alarm(self, kind: AlarmKind, subject: str, text: str, *, occurrence: str = "") -> bool:
        """Raise an alarm; False where that very occurrence has been raised already. That is not told again, but is not
        over any more.
        """
        named = f"{kind}\n{subject}\n{occurrence}".encode()
        alarm_id = f"alarm_{hashlib.sha256(named).hexdigest()[:32]}"
        with self._database.write() as tx:
            insert = insert_for(tx, alarms).values(
                alarm_id=alarm_id,
                kind=kind,
                subject=subject[:200],
                text=text[:_MOST_CHARACTERS],
                raised_at=tx.now,
            )
            raised = insert.on_conflict_do_nothing().returning(alarms.c.alarm_id)
            if tx.connection.execute(raised).first() is not None:
                return True
            self._set(tx, (alarms.c.alarm_id == alarm_id) & alarms.c.over_at.is_not(None), over_at=None)
            return False

    def resolve(self, kind: AlarmKind, subject: str) -> int:
        """Note that what the alarms of a kind about a subject told of has passed; returns how many there were."""
        with self._database.write() as tx:
            changed = tx.connection.execute(
                alarms.update()
                .where(alarms.c.kind == kind, alarms.c.subject == subject, alarms.c.over_at.is_(None))
                .values(over_at=tx.now)
                .returning(alarms.c.alarm_id)
            )
            return len(changed.all())

    def take(self, *, lease_seconds: float, pause_seconds: float, most: int = 50) -> Message | None:
        """Return the message that is to be sent now, and keep it from others for `lease_seconds`; None where none is.

        One at a time: while one is under way or waits for its next try, no other begins. A new one has the `most`
        alarms that wait longest, and begins at the earliest `pause_seconds` after the one before was begun or told.
        """
        with self._database.write() as tx:
            if tx.connection.dialect.name == "postgresql":
                tx.connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_SENDING_LOCK)))
            under_way = tx.connection.execute(
                sa.select(alarms.c.message_id, alarms.c.due_at).where(is_untold, alarms.c.message_id.is_not(None))
            ).first()
            if under_way is not None:
                return None if under_way.due_at > tx.now else self._lease(tx, under_way.message_id, lease_seconds)
            told = tx.connection.execute(sa.select(sa.func.max(alarms.c.told_at))).scalar_one_or_none()
            if told is not None and told > tx.now - pause_seconds:
                return None
            waiting = list(
                tx.connection.execute(
                    sa.select(alarms.c.alarm_id)
                    .where(is_untold)
                    .order_by(alarms.c.raised_at, alarms.c.alarm_id)
                    .limit(most)
                ).scalars()
            )
            if not waiting:
                return None
            message_id = waiting[0].replace("alarm_", "msg_", 1)
            self._set(tx, alarms.c.alarm_id.in_(waiting), message_id=message_id)
            return self._lease(tx, message_id, lease_seconds)

    def _lease(self, tx: Transaction, message_id: str, lease_seconds: float) -> Message:
        of_message = alarms.c.message_id == message_id
        self._set(tx, of_message, due_at=tx.now + lease_seconds, attempts=alarms.c.attempts + 1)
        found = tx.connection.execute(
            sa.select(alarms).where(of_message).order_by(alarms.c.raised_at, alarms.c.alarm_id)
        ).all()
        return Message(message_id=message_id, alarms=[_alarm(row) for row in found], attempt=found[0].attempts)

    def delivered(self, message_id: str) -> None:
        """Note that a message has arrived."""
        with self._database.write() as tx:
            self._set(tx, _untold(message_id), told_at=tx.now, error=None)

    def failed(self, message_id: str, error: str, pause_seconds: float | None) -> None:
        """Note why a try failed, and when the next one is due; None gives the message up."""
        with self._database.write() as tx:
            then = {"told_at": tx.now} if pause_seconds is None else {"due_at": tx.now + pause_seconds}
            self._set(tx, _untold(message_id), error=error[:_MOST_CHARACTERS], **then)

    def pass_over(self) -> int:
        """Note that nobody is to be told of what waits: there is no webhook. Returns how many alarms that were."""
        with self._database.write() as tx:
            changed = alarms.update().where(is_untold).values(told_at=tx.now, error="no webhook is configured")
            return len(tx.connection.execute(changed.returning(alarms.c.alarm_id)).all())

    def recent(self, limit: int = 50, *, only_current: bool = False) -> list[Alarm]:
        """Return alarms, the newest first; `only_current` leaves out what has passed."""
        query = sa.select(alarms).order_by(alarms.c.raised_at.desc(), alarms.c.alarm_id).limit(limit)
        if only_current:
            query = query.where(alarms.c.over_at.is_(None))
        with self._database.read() as tx:
            return [_alarm(row) for row in tx.connection.execute(query)]

    def forget(self, older_than_seconds: float) -> int:
        """Delete alarms that were told so long ago; returns how many."""
        with self._database.write() as tx:
            old = alarms.c.told_at.is_not(None) & (alarms.c.raised_at < tx.now - older_than_seconds)
            return len(tx.connection.execute(alarms.delete().where(old).returning(alarms.c.alarm_id)).all())

    @staticmethod
    def _set(tx: Transaction, where: sa.ColumnElement[bool], **values: Any) -> None:
        tx.connection.execute(alarms.update().where(where).values(**values))


def _untold(message_id: str) -> sa.ColumnElement[bool]:
    return (alarms.c.message_id == message_id) & is_untold


def _alarm(row: Any) -> Alarm:
    return msgspec.convert({name: getattr(row, name) for name in Alarm.__struct_fields__}, Alarm)
