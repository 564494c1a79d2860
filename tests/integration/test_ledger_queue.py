"""What the database finds for a lease is what the policy needs: the picks are those of all that waits."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest
import sqlalchemy as sa

from batch_pipeline.ledger import Ledger, leasing, queue, schema
from batch_pipeline.ledger.database import Transaction
from batch_pipeline.scheduling.order import Conditions, choose
from tests.fakes.clock import SteppedClock
from tests.fakes.ledger_values import MODEL, submitted

BATCHES = 30
CUSTOMERS = 6


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    opened = Ledger.open(ledger_url, clock=SteppedClock())
    for number in range(BATCHES):
        submitted(opened, f"b{number}", [MODEL] * 3, f"customer-{number % CUSTOMERS}")
    yield opened
    opened.close()


def test_the_picks_from_what_the_database_finds_are_those_from_all_that_waits(ledger: Ledger) -> None:
    batch_ids = [batch.batch_id for batch in ledger.batches.recent(limit=BATCHES)]
    out_of_turn = 0
    for seed in range(40):
        draw = random.Random(seed)
        with ledger._database.write() as tx:
            _draw_queue(tx, draw, batch_ids)
            limit, speed = draw.choice([1, 2, 5, 9]), draw.choice([0.0, 5.0, 50.0])
            conditions = Conditions(
                now=tx.now, tokens_per_second=speed, margin_seconds=900.0, credit=draw.choice([0.0, 1.0, 3000.0])
            )
            drained = draw.sample(batch_ids, draw.choice([0, 0, 4]))
            wanted = queue.Wanted(MODEL, limit, speed, conditions.margin_seconds, drained)
            every = queue.of_batches(tx, MODEL, set(batch_ids) - set(drained))
            some = [*queue.in_turn(tx, wanted), *queue.at_risk(tx, wanted)]
        picks = _picks(every, limit, conditions)
        assert _picks(some, limit, conditions) == picks, seed
        assert len({row.batch_id for row in some}) <= len(every)
        out_of_turn += sum(pick["out_of_turn"] for pick in picks)
    assert out_of_turn > 10  # otherwise this has shown little


def _draw_queue(tx: Transaction, draw: random.Random, batch_ids: list[str]) -> None:
    """Give every lane, batch and customer other numbers, of which some are equal."""
    deadlines = {batch_id: tx.now + draw.choice([-60, 300, 1000, 1000, 5000, 9000]) for batch_id in batch_ids}
    lanes, batches, service = schema.lanes, schema.batches, schema.service
    for batch_id in batch_ids:
        done = draw.choice([0, 0, 10, 25])
        tx.connection.execute(
            lanes.update()
            .where(lanes.c.batch_id == batch_id)
            .values(
                pending=draw.choice([0, 1, 1, 2, 3]),
                pending_tokens=draw.choice([300, 600, 40_000]),
                tokens=draw.choice([None, 900, 90_000]),
                completed=done,
                input_tokens=done * draw.choice([1, 20, 4000]),
                deadline_at=deadlines[batch_id],
            )
        )
        priority = draw.choice([0, 0, 0, 1])
        of_batch = batches.update().where(batches.c.batch_id == batch_id)
        tx.connection.execute(of_batch.values(deadline_at=deadlines[batch_id], priority=priority))
    for number in range(CUSTOMERS):
        before = draw.choice([0.0, 1000.0, 3e6])
        of_customer = service.update().where(service.c.customer == f"customer-{number}")
        served = draw.choice([0.0, 0.0, 500.0, 800.0])
        values = {"tokens": served, "estimated_tokens": before, "real_tokens": before * draw.random()}
        tx.connection.execute(of_customer.values(**values))
        of_customer = schema.customers.update().where(schema.customers.c.customer == f"customer-{number}")
        tx.connection.execute(of_customer.values(weight=draw.choice([0.5, 1.0, 3.0])))


def _picks(rows: list[sa.Row[tuple[object, ...]]], limit: int, conditions: Conditions) -> list[dict[str, int]]:
    found = {row.batch_id: leasing._found(row, leasing.usage_ratio_in(row)) for row in rows}
    shares = {each.waiting.customer: each.share for each in found.values()}
    picks = choose([each.waiting for each in found.values()], shares, limit, conditions)
    return [msgspec.structs.asdict(pick) for pick in picks]
