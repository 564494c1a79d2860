"""What a poll costs the ledger: statements are counted, so that none is added unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa

from batch_pipeline.api.statuses import OwnedBatch, Statuses
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import WorkerState
from batch_pipeline.results import outbox
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from tests.fakes.clock import SteppedClock
from tests.fakes.ledger_values import MODEL, finish, new_batch, result_of, submitted

_OF_BATCHES = 1
_OF_QUEUES = 2
"""Of one model: what waits, and workers."""
_OF_SURROUNDINGS = 2
"""Notices, and workers."""


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    """By a clock that stands still: what is read once in some seconds is read once here, however long a test takes."""
    opened = Ledger.open(ledger_url, clock=SteppedClock())
    yield opened
    opened.close()


@pytest.fixture
def statements(ledger: Ledger) -> Iterator[Callable[[Callable[[], object]], int]]:
    """Counts the statements that a function sends to the ledger, without those that begin a transaction: on Postgres
    they are one round trip, with the question for the time, that is not seen here.
    """
    sent: list[str] = []
    engine = ledger._database.engine

    def note(*seen: object) -> None:
        if not str(seen[2]).startswith("BEGIN"):
            sent.append(str(seen[2]))

    def count(do: Callable[[], object]) -> int:
        sent.clear()
        do()
        return len(sent)

    sa.event.listen(engine, "before_cursor_execute", note)
    yield count
    sa.event.remove(engine, "before_cursor_execute", note)


def _completed(ledger: Ledger, name: str) -> str:
    batch_id = submitted(ledger, name).batch_id
    for lease in ledger.chunks.lease("w", MODEL, 10, [batch_id]):
        ledger.chunks.commit(lease.ref, result_of(lease))
    finish(ledger, batch_id)
    return batch_id


def test_a_poll_takes_few_statements_however_many_poll_at_once(
    ledger: Ledger, settings: Settings, statements: Callable[[Callable[[], object]], int]
) -> None:
    statuses = Statuses(ledger, settings)
    ledger.workers.register("w", MODEL, None, "host")
    ledger.workers.set_state("w", WorkerState.READY)
    running = [submitted(ledger, f"b{number}", [MODEL, "model-b"]).batch_id for number in range(20)]
    ended = _completed(ledger, "ended")
    keys = [ledger.customers.add_key("acme").secret for _ in range(20)]

    def poll(*batch_ids: str) -> Callable[[], object]:
        return lambda: statuses.owned([OwnedBatch("acme", batch_id) for batch_id in batch_ids])

    assert statements(lambda: ledger.customers.by_secrets(keys[:1])) == 1
    assert statements(lambda: ledger.customers.by_secrets(keys)) == 1
    assert statements(poll(running[0])) == _OF_BATCHES + _OF_SURROUNDINGS + 2 * _OF_QUEUES
    assert statements(poll(running[0])) == _OF_BATCHES + _OF_SURROUNDINGS, "queues are read once in five seconds"
    assert statements(poll(*running)) == _OF_BATCHES + _OF_SURROUNDINGS
    assert statements(poll(ended)) == _OF_BATCHES + 1, "and one for what it is charged"
    assert statements(lambda: statuses.at(ledger.moments.page("acme", after=None, limit=21))) == (
        _OF_BATCHES + 1 + _OF_SURROUNDINGS
    )


def test_statuses_that_are_shown_already_cost_no_statement_each(
    ledger: Ledger, store: ObjectStore, settings: Settings, statements: Callable[[Callable[[], object]], int]
) -> None:
    for number in range(5):
        submitted(ledger, f"b{number}")

    def look() -> outbox.Published:
        return outbox.publish_due(ledger=ledger, store=store, settings=settings)

    assert look().written == 5
    assert statements(look) == 1 + _OF_BATCHES + _OF_SURROUNDINGS, "one for which there are"


def test_polls_that_are_read_together_show_nobody_anothers_batch(ledger: Ledger, settings: Settings) -> None:
    mine = submitted(ledger, "mine", customer="acme").batch_id
    theirs = ledger.batches.create(new_batch("theirs", "globex")).batch_id
    asked = [OwnedBatch(customer, batch_id) for customer in ("acme", "globex") for batch_id in (mine, theirs, "none")]
    shown = Statuses(ledger, settings).owned(asked)
    assert {one: batch.customer for one, batch in shown.items()} == {
        OwnedBatch("acme", mine): "acme",
        OwnedBatch("globex", theirs): "globex",
    }


def test_keys_that_are_read_together_are_told_apart_and_revoked_ones_left_out(ledger: Ledger) -> None:
    for customer in ("acme", "globex"):
        ledger.customers.add(customer)
    acme, globex, revoked = (ledger.customers.add_key(customer) for customer in ("acme", "globex", "acme"))
    ledger.customers.revoke_key("acme", revoked.key.key_id)
    known = ledger.customers.by_secrets([globex.secret, revoked.secret, "bp-none", acme.secret])
    assert {secret: one.customer.customer for secret, one in known.items()} == {
        acme.secret: "acme",
        globex.secret: "globex",
    }
