"""Several chunks committed in one transaction: each as by itself, and none for another's sake."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from batch_pipeline.errors import LeaseLost
from batch_pipeline.ledger import Ledger, schema
from batch_pipeline.ledger.records import BatchStatus, ChunkState, CommitReply, LeaseRef
from tests.fakes.ledger_checks import assert_consistent
from tests.fakes.ledger_values import MODEL, part_of, result_of, submitted


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    opened = Ledger.open(ledger_url)
    yield opened
    opened.close()


def test_of_several_commits_one_whose_lease_is_lost_takes_nothing_from_the_others(ledger: Ledger) -> None:
    batches = [submitted(ledger, key, [MODEL] * 2, key).batch_id for key in ("a", "b")]
    leases = ledger.chunks.lease("w", MODEL, 4)
    ledger.chunks.checkpoint(leases[0].ref, part_of(leases[0], 1))
    ledger.chunks.release(leases[1].ref, "somebody else has it")
    replies = ledger.chunks.commit_all({lease.ref: result_of(lease) for lease in leases})
    assert list(replies) == [lease.ref for lease in leases]
    assert [isinstance(reply, LeaseLost) for reply in replies.values()] == [False, True, False, False]
    for batch_id in batches:
        assert_consistent(ledger, batch_id)
    states = Counter(chunk.state for batch_id in batches for chunk in ledger.chunks.of(batch_id))
    assert states == {ChunkState.COMMITTED: 3, ChunkState.PENDING: 1}


def test_several_commits_repeated_after_a_lost_acknowledgement_are_made_and_charged_once(ledger: Ledger) -> None:
    batch_id = submitted(ledger, "a", [MODEL] * 3).batch_id
    results = {lease.ref: result_of(lease) for lease in ledger.chunks.lease("w", MODEL, 3)}
    first = ledger.chunks.commit_all(results)
    charged = _charged(ledger)
    again = ledger.chunks.commit_all(results)
    assert [_drained(reply) for reply in first.values()].count(True) == 1
    assert [_drained(reply) for reply in again.values()].count(True) == 0
    assert _charged(ledger) == charged == {"acme": sum(r.input_tokens + r.output_tokens for r in results.values())}
    assert_consistent(ledger, batch_id)
    assert ledger.batches.get(batch_id).status == BatchStatus.FINALIZING


def test_workers_that_commit_in_groups_while_they_beat_never_wait_for_each_other_for_ever(ledger: Ledger) -> None:
    batches = [submitted(ledger, f"b{n}", [MODEL] * 40, f"customer-{n % 3}").batch_id for n in range(5)]
    committed: list[LeaseRef] = []
    drained: list[str] = []

    def work(name: str) -> None:
        while leases := ledger.chunks.lease(name, MODEL, 7):
            refs = [lease.ref for lease in leases]
            beating = threading.Thread(target=ledger.workers.heartbeat, args=(name, list(reversed(refs))))
            beating.start()
            # In an order that is nobody else's: locks must not be taken in it.
            shuffled = sorted(leases, key=lambda lease: hash((name, lease.ref)))
            for ref, reply in ledger.chunks.commit_all({lease.ref: result_of(lease) for lease in shuffled}).items():
                committed.append(ref)
                if _drained(reply):
                    drained.append(ref.batch_id)
            beating.join()

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work, f"w{n}") for n in range(6)]:
            done.result()
    assert Counter(committed) == {LeaseRef(batch_id, n, 1): 1 for batch_id in batches for n in range(40)}
    assert sorted(drained) == sorted(batches)
    for batch_id in batches:
        assert_consistent(ledger, batch_id)


def _drained(reply: CommitReply | LeaseLost) -> bool:
    assert not isinstance(reply, LeaseLost)
    return reply.batch_drained


def _charged(ledger: Ledger) -> dict[str, float]:
    with ledger._database.read() as tx:
        rows = tx.connection.execute(sa.select(schema.service.c.customer, schema.service.c.tokens))
        return {row.customer: row.tokens for row in rows}
