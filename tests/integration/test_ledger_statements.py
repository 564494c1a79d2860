"""How many statements the work of every chunk sends: each is a round trip, and they are what a ledger's speed is made
of. Whoever adds one changes this test, and says in docs/performance.md what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.leasing import Policy
from tests.fakes.clock import SteppedClock
from tests.fakes.ledger_statements import sent_by
from tests.fakes.ledger_values import MODEL, part_of, result_of, submitted

AS_CONFIGURED = Policy(margin_seconds=1800.0, share=0.3, most_tokens=1e6)


@pytest.fixture(params=[4, 60], ids=["few batches", "many batches"])
def ledger(ledger_url: str, request: pytest.FixtureRequest) -> Iterator[Ledger]:
    opened = Ledger.open(ledger_url, clock=SteppedClock(), policy=AS_CONFIGURED)
    for number in range(request.param):
        submitted(opened, f"b{number}", [MODEL] * 12, f"customer-{number % 4}", window_seconds=86_400)
    opened.chunks.lease("w", MODEL, 1)  # looks up what is remembered for some seconds
    yield opened
    opened.close()


def test_the_statements_of_each_chunk_are_few_and_do_not_grow_with_the_batches(ledger: Ledger) -> None:
    def count(do: Callable[[], object]) -> int:
        with sent_by(ledger) as sent:
            do()
        return len(sent)

    only = [ledger.batches.recent(limit=1)[0].batch_id]
    one, kept, *_ = ledger.chunks.lease("w", MODEL, 7)  # two of each customer, with the one of before
    of_four = ledger.chunks.lease("w", MODEL, 8)
    assert len({lease.ref.batch_id for lease in of_four}) == 4
    counts = {"lease of 8 of four batches": count(lambda: ledger.chunks.lease("w", MODEL, 8))}
    of_one_batch = ledger.chunks.lease("w", MODEL, 4, only)
    counts |= {
        "lease of 1": count(lambda: ledger.chunks.lease("w", MODEL, 1)),
        "lease of 4 of one batch": count(lambda: ledger.chunks.lease("w", MODEL, 4, only)),
        "heartbeat without leases": count(lambda: ledger.workers.heartbeat("w")),
        "heartbeat with 8": count(lambda: ledger.workers.heartbeat("w", [lease.ref for lease in of_four])),
        "checkpoint": count(lambda: ledger.chunks.checkpoint(kept.ref, part_of(kept, 1))),
        "release": count(lambda: ledger.chunks.release(kept.ref, "gives way")),
        "commit of 1": count(lambda: ledger.chunks.commit(one.ref, result_of(one))),
        "commit of 4 of one batch": count(
            lambda: ledger.chunks.commit_all({lease.ref: result_of(lease) for lease in of_one_batch})
        ),
        "commit of 8 of four batches": count(
            lambda: ledger.chunks.commit_all({lease.ref: result_of(lease) for lease in of_four})
        ),
    }
    assert counts == {
        # overdue leases, batches in turn, batches at risk, take, event, lane, charge
        "lease of 1": 7,
        "lease of 4 of one batch": 6,
        "lease of 8 of four batches": 10 if ledger._database.is_sqlite else 7,  # SQLite: a take for each batch
        "heartbeat without leases": 1,
        "heartbeat with 8": 3,
        "checkpoint": 3,
        "release": 7,
        # lock, commit, event, lane, charge
        "commit of 1": 5,
        "commit of 4 of one batch": 5,
        "commit of 8 of four batches": 6,  # the four lanes are looked at once more
    }
