"""How the ledger keeps the service of its customers: nobody starves, nobody saves up credit, weights count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from batch_pipeline.ledger import Ledger, schema
from tests.fakes.clock import SteppedClock
from tests.fakes.ledger_values import MODEL, result_of, submitted


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    opened = Ledger.open(ledger_url, clock=SteppedClock())
    yield opened
    opened.close()


def serve(ledger: Ledger, chunks: int, at_once: int = 1) -> Counter[str]:
    """Lease and commit so many chunks; returns how many of each customer."""
    got: Counter[str] = Counter()
    while got.total() < chunks:
        leases = ledger.chunks.lease("w", MODEL, min(at_once, chunks - got.total()))
        if not leases:
            break
        for lease in leases:
            ledger.chunks.commit(lease.ref, result_of(lease))
            got[lease.customer] += 1
    return got


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_customer_that_comes_late_shares_from_then_on_and_does_not_catch_up(ledger: Ledger, at_once: int) -> None:
    submitted(ledger, "huge", [MODEL] * 100, "acme")
    serve(ledger, 40)
    submitted(ledger, "later", [MODEL] * 30, "bolt")
    assert serve(ledger, 20, at_once) == {"acme": 10, "bolt": 10}


def test_a_small_batch_that_comes_after_a_huge_one_is_done_within_a_few_chunks(ledger: Ledger) -> None:
    submitted(ledger, "huge", [MODEL] * 100, "acme")
    serve(ledger, 30)
    submitted(ledger, "small", [MODEL], "bolt")
    assert serve(ledger, 2)["bolt"] == 1


def test_a_customer_that_comes_back_has_no_credit_for_the_time_it_was_away(ledger: Ledger) -> None:
    submitted(ledger, "a", [MODEL] * 100, "acme")
    submitted(ledger, "b1", [MODEL] * 2, "bolt")
    serve(ledger, 50)  # bolt's two, and then acme's alone
    submitted(ledger, "b2", [MODEL] * 30, "bolt")
    assert serve(ledger, 20) == {"acme": 10, "bolt": 10}


def test_a_customer_whose_last_chunk_is_still_running_has_no_credit_either(ledger: Ledger) -> None:
    submitted(ledger, "b1", [MODEL], "bolt")
    (running,) = ledger.chunks.lease("slow", MODEL, 1)
    submitted(ledger, "a", [MODEL] * 100, "acme")
    serve(ledger, 50)
    submitted(ledger, "b2", [MODEL] * 30, "bolt")
    assert serve(ledger, 20) == {"acme": 10, "bolt": 10}
    ledger.chunks.commit(running.ref, result_of(running))


def test_a_customer_that_was_served_while_alone_owes_nothing_to_one_that_comes_when_it_is_gone(ledger: Ledger) -> None:
    submitted(ledger, "a1", [MODEL] * 50, "acme")
    assert serve(ledger, 50) == {"acme": 50}  # and then nobody waits
    submitted(ledger, "b", [MODEL] * 30, "bolt")
    submitted(ledger, "a2", [MODEL] * 30, "acme")
    assert serve(ledger, 20) == {"acme": 10, "bolt": 10}


def test_a_second_batch_of_a_customer_that_waits_already_lifts_nobody(ledger: Ledger) -> None:
    submitted(ledger, "a", [MODEL] * 50, "acme")
    submitted(ledger, "b1", [MODEL] * 20, "bolt")
    serve(ledger, 10)
    submitted(ledger, "b2", [MODEL] * 20, "bolt")
    assert serve(ledger, 20) == {"acme": 10, "bolt": 10}


def test_service_of_one_model_does_not_count_on_another(ledger: Ledger) -> None:
    submitted(ledger, "other-model", ["model-b"] * 20, "acme")
    ledger.chunks.lease("w", "model-b", 20)
    submitted(ledger, "a", [MODEL] * 20, "acme")
    submitted(ledger, "b", [MODEL] * 20, "bolt")
    assert serve(ledger, 10) == {"acme": 5, "bolt": 5}


def test_weights_of_one_and_three_give_service_one_to_three(ledger: Ledger) -> None:
    submitted(ledger, "a", [MODEL] * 50, "acme")
    submitted(ledger, "b", [MODEL] * 50, "bolt")
    with ledger._database.write() as tx:
        tx.connection.execute(schema.customers.update().where(schema.customers.c.customer == "bolt").values(weight=3.0))
    got = serve(ledger, 40)
    assert abs(got["bolt"] - 30) <= 1


def test_an_operators_priority_and_then_the_deadline_order_a_customers_batches(ledger: Ledger) -> None:
    late = submitted(ledger, "late", window_seconds=9000).batch_id
    soon = submitted(ledger, "soon", window_seconds=1000).batch_id
    asked = submitted(ledger, "asked", window_seconds=99_000).batch_id
    ledger.batches.set_priority(asked, 1, "operator")
    leases = [ledger.chunks.lease("w", MODEL, 1)[0] for _ in range(3)]
    assert [lease.ref.batch_id for lease in leases] == [asked, soon, late]
