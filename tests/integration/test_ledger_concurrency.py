"""Workers, cancels and sweeps at one moment, and kills in the middle of a transaction: real threads and processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from batch_pipeline.errors import LeaseLost, NotAllowedInState
from batch_pipeline.ledger import Ledger, database, schema
from batch_pipeline.ledger.records import BatchStatus, ChunkState, Lease, LeaseRef
from tests.fakes.databases import open_transactions
from tests.fakes.ledger_checks import assert_consistent
from tests.fakes.ledger_values import CHUNK_TOKENS, MODEL, finish, part_of, result_of, submitted
from tests.fakes.waiting import wait_until

THREADS = 8
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    opened = Ledger.open(ledger_url, max_failures=1000)
    yield opened
    opened.close()


def together(works: list[Callable[[], object]]) -> None:
    """Run all at the same moment and raise what any of them raised: a deadlock among them fails the test."""
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        barrier.wait()
        work()

    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(run, work) for work in works]:
            done.result()


def test_eight_workers_commit_every_chunk_exactly_once_and_drain_every_batch_exactly_once(ledger: Ledger) -> None:
    batches = [submitted(ledger, f"b{n}", [MODEL] * n, f"customer-{n}").batch_id for n in (250, 100, 50)]
    committed: list[LeaseRef] = []
    drained: list[str] = []

    def work(name: str) -> None:
        while leases := ledger.chunks.lease(name, MODEL, 3):
            for lease in leases:
                reply = ledger.chunks.commit(lease.ref, result_of(lease))
                committed.append(lease.ref)
                if reply.batch_drained:
                    drained.append(lease.ref.batch_id)

    together([partial(work, f"w{n}") for n in range(THREADS)])
    assert Counter(committed) == {LeaseRef(batch, n, 1): 1 for batch, size in zip(batches, (250, 100, 50), strict=True)
                                  for n in range(size)}  # fmt: skip
    assert sorted(drained) == sorted(batches)
    for batch_id in batches:
        assert_consistent(ledger, batch_id)
        assert finish(ledger, batch_id).status == BatchStatus.COMPLETED


def test_of_two_models_whose_last_chunks_are_committed_at_one_moment_one_drains_the_batch(ledger: Ledger) -> None:
    def commit(lease: Lease, replies: list[bool]) -> None:
        replies.append(ledger.chunks.commit(lease.ref, result_of(lease)).batch_drained)

    for number in range(20):
        batch = submitted(ledger, f"b{number}", [MODEL, "model-b"])
        leases = [ledger.chunks.lease("w", model, 1)[0] for model in (MODEL, "model-b")]
        replies: list[bool] = []
        together([partial(commit, lease, replies) for lease in leases])
        assert sorted(replies) == [False, True]
        assert ledger.batches.get(batch.batch_id).status == BatchStatus.FINALIZING
        assert [event.event for event in ledger.events.of(batch.batch_id)].count("finalizing") == 1


def test_whatever_workers_cancels_and_sweeps_do_at_once_nobody_waits_for_ever_and_nothing_is_left(
    ledger_url: str,
) -> None:
    ledger = Ledger.open(ledger_url, lease_seconds=0.5, max_failures=1000)  # so that some leases run out
    models = (MODEL, "model-b")
    batches = [submitted(ledger, f"b{n}", models * 8, f"customer-{n % 3}").batch_id for n in range(9)]
    doomed = batches[::3]

    def work(seed: int) -> None:
        draw = random.Random(seed)
        while any(lane.pending + lane.leased for batch_id in batches for lane in ledger.batches.lanes(batch_id)):
            for lease in ledger.chunks.lease(f"w{seed}", models[seed % 2], draw.randint(1, 5)):
                try:
                    ledger.workers.heartbeat(f"w{seed}", [lease.ref])
                    if draw.random() < 0.3:
                        ledger.chunks.checkpoint(lease.ref, part_of(lease, draw.randrange(10**9)))
                    if draw.random() < 0.3:
                        ledger.chunks.release(lease.ref, "gives way", failed=draw.random() < 0.5)
                    elif draw.random() < 0.9:
                        ledger.chunks.commit(lease.ref, result_of(lease))
                except LeaseLost:
                    continue  # it has run out while we were slow, as it should

    def cancel() -> None:
        for batch_id in doomed:
            try:
                ledger.batches.cancel(batch_id)
            except NotAllowedInState:
                assert ledger.batches.get(batch_id).status.is_final
            ledger.batches.settle_all()

    together([*(partial(work, seed) for seed in range(6)), cancel, cancel])
    ledger.batches.settle_all()
    for batch_id in batches:
        assert_consistent(ledger, batch_id)
        assert ledger.batches.get(batch_id).status == BatchStatus.FINALIZING
        told = [event.event for event in ledger.events.of(batch_id) if event.chunk is None]
        assert told.count("finalizing") == 1
        assert told.count("cancelling") <= 1
        finish(ledger, batch_id)
    ledger.close()


def test_a_create_call_that_races_with_itself_makes_one_batch(ledger: Ledger) -> None:
    made: list[str] = []

    def create(key: str) -> None:
        made.append(submitted(ledger, key).batch_id)

    for number in range(10):
        together([partial(create, f"key-{number}")] * 4)
    assert len(set(made)) == 10
    for batch_id in set(made):
        told = [event.event for event in ledger.events.of(batch_id)]
        assert told == ["created", "in_progress"]


def test_two_merges_at_once_end_the_batch_once(ledger: Ledger) -> None:
    batch = submitted(ledger, "a")
    (lease,) = ledger.chunks.lease("w", MODEL, 1)
    ledger.chunks.commit(lease.ref, result_of(lease))
    ends: list[float | None] = []
    together([lambda: ends.append(finish(ledger, batch.batch_id).ended_at)] * 4)
    assert len(set(ends)) == 1
    assert [event.event for event in ledger.events.of(batch.batch_id)].count("completed") == 1


def test_a_lease_goes_on_to_the_next_batch_where_others_hold_the_first_one(postgres_url: str) -> None:
    ledger = Ledger.open(postgres_url)
    first, second = (submitted(ledger, key, [MODEL, MODEL]).batch_id for key in ("a", "b"))
    engine = sa.create_engine(postgres_url)
    with engine.begin() as connection:  # another worker's lease, that has not committed yet
        connection.execute(sa.select(schema.chunks).where(schema.chunks.c.batch_id == first).with_for_update())
        leases = ledger.chunks.lease("w", MODEL, 2)
    assert [lease.ref.batch_id for lease in leases] == [second, second]
    assert_consistent(ledger, second)
    engine.dispose()
    ledger.close()


@pytest.fixture
def frozen(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    """Whose transactions the server gives up after half a second in which nothing was asked for."""
    monkeypatch.setattr(database, "_FROZEN_SECONDS", 0.5)
    opened = Ledger.open(postgres_url)
    yield opened
    opened.close()


def test_a_process_that_freezes_inside_a_transaction_keeps_its_locks_from_nobody_for_long(
    postgres_url: str, frozen: Ledger
) -> None:
    ledger = Ledger.open(postgres_url)
    submitted(ledger, "a", [MODEL] * 3)

    def freeze() -> None:
        with frozen._database.write() as tx:
            tx.connection.execute(schema.service.update().values(tokens=1e9))
            # Waits for the row that is locked here.
            assert len(ledger.chunks.lease("w", MODEL, 2)) == 2

    with pytest.raises(OperationalError, match="idle-in-transaction timeout"):
        freeze()
    with ledger._database.read() as tx:
        assert tx.connection.execute(sa.select(schema.service.c.tokens)).scalar_one() < 1e9
    ledger.close()


def test_an_interrupt_comes_out_of_a_transaction_whose_connection_was_lost(postgres_url: str, frozen: Ledger) -> None:
    """As of a run that was frozen in one and is told to end when it wakes up: that is no failure."""
    ledger = Ledger.open(postgres_url)

    def interrupted(inside: str) -> None:
        with getattr(frozen._database, inside)():
            wait_until(lambda: not _transactions_of_others(ledger), "the server gives the transaction up")
            raise KeyboardInterrupt

    for inside in ("write", "read", "look"):
        with pytest.raises(KeyboardInterrupt):
            interrupted(inside)
    ledger.close()


def test_connections_that_died_while_idle_are_replaced_without_an_error(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger.open(postgres_url)
    together([ledger.backlog] * 4)  # several connections in the pool
    engine = sa.create_engine(postgres_url)
    with engine.connect() as connection:
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        killed = connection.exec_driver_sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")
        assert len(killed.all()) >= 1
    engine.dispose()
    monkeypatch.setattr(database, "_IDLE_SECONDS", 0.0)
    together([ledger.backlog] * 4)
    assert submitted(ledger, "a").status == BatchStatus.IN_PROGRESS
    ledger.close()


def test_several_processes_may_open_a_new_ledger_at_once(ledger_url: str) -> None:
    script = f"from batch_pipeline.ledger import Ledger; Ledger.open({ledger_url!r}).close()"
    processes = [subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY) for _ in range(6)]
    assert [process.wait(120) for process in processes] == [0] * 6


VICTIM = """
import sys
import sqlalchemy as sa
from batch_pipeline.ledger import Ledger
from tests.fakes.ledger_values import result_of

url, what = sys.argv[1:]
ledger = Ledger.open(url)

def halt(connection):
    if not connection.get_execution_options().get("read_only"):
        print("within", flush=True)
        sys.stdin.read()

def arm():
    sa.event.listen(ledger._database.engine, "commit", halt)

if what == "lease":
    arm()
    ledger.chunks.lease("victim", "model-a", 2)
elif what == "commit":
    (lease,) = ledger.chunks.lease("victim", "model-a", 1)
    arm()
    ledger.chunks.commit(lease.ref, result_of(lease))
elif what == "commit of several":
    leases = ledger.chunks.lease("victim", "model-a", 2)
    arm()
    ledger.chunks.commit_all({lease.ref: result_of(lease) for lease in leases})
elif what == "cancel":
    batch = ledger.batches.recent()[0]
    arm()
    ledger.batches.cancel(batch.batch_id)
"""


@pytest.mark.parametrize(
    ("what", "before"),
    [
        ("lease", [ChunkState.PENDING] * 3),
        ("commit", [ChunkState.LEASED] + [ChunkState.PENDING] * 2),
        ("commit of several", [ChunkState.LEASED] * 2 + [ChunkState.PENDING]),
        ("cancel", [ChunkState.PENDING] * 3),
    ],
)
def test_a_process_killed_inside_a_transaction_has_changed_nothing_and_blocks_nobody(
    ledger: Ledger, ledger_url: str, what: str, before: list[ChunkState]
) -> None:
    batch_id = submitted(ledger, "a", [MODEL] * 3).batch_id
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, ledger_url, what],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert victim.stdout is not None
    assert victim.stdout.readline() == "within\n"
    victim.send_signal(signal.SIGKILL)
    victim.wait(30)
    assert [chunk.state for chunk in ledger.chunks.of(batch_id)] == before
    assert ledger.batches.get(batch_id).status == BatchStatus.IN_PROGRESS
    assert_consistent(ledger, batch_id)
    # Until the server has heard of the death, the victim's chunks are locked: a lease does not wait for them, it goes
    # without.
    wait_until(lambda: not _transactions_of_others(ledger), "the server rolls back what the victim has begun")
    leases = ledger.chunks.lease("survivor", MODEL, 3)
    assert len(leases) == before.count(ChunkState.PENDING)
    for lease in leases:
        ledger.chunks.commit(lease.ref, result_of(lease))
    assert_consistent(ledger, batch_id)
    with ledger._database.read() as tx:
        counted = tx.connection.execute(sa.select(schema.service.c.tokens)).scalar_one()
    assert counted == before.count(ChunkState.LEASED) * CHUNK_TOKENS + len(leases) * 270.0, (
        "charged once, corrected once"
    )


def _transactions_of_others(ledger: Ledger) -> int:
    """How many connections of other programs are inside a transaction. SQLite's end with their process."""
    return 0 if ledger._database.is_sqlite else open_transactions(ledger._database.engine.url)
