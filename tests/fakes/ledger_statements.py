"""What a ledger sends to its database: to be counted, and for its plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import sqlalchemy as sa

from batch_pipeline.ledger import Ledger


class Sent(NamedTuple):
    """A statement and its parameters: those of its first run, where it was sent for several rows at once."""

    statement: str
    parameters: Any
    is_for_many: bool


@contextmanager
def sent_by(ledger: Ledger) -> Iterator[list[Sent]]:
    """Collect the statements that are sent meanwhile, but for the begin and the end of transactions."""
    sent: list[Sent] = []

    def note(*seen: Any) -> None:
        _, _, statement, parameters, _, many = seen
        if not statement.startswith("BEGIN"):
            sent.append(Sent(statement, parameters[0] if many else parameters, many))

    engine = ledger._database.engine
    sa.event.listen(engine, "before_cursor_execute", note)
    yield sent
    sa.event.remove(engine, "before_cursor_execute", note)
