"""Chunks that share a long prefix go to the worker that has it in its cache, and to others before these idle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from batch_pipeline.intake import ops
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import ChunkState, Lease
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from tests.fakes.intake_files import file_of, intake_settings, request_line, uploaded
from tests.fakes.ledger_checks import assert_consistent
from tests.fakes.ledger_values import MODEL, grouped, result_of, submitted
from tests.fakes.small_model import write_model

Leased = tuple[str, int]


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    opened = Ledger.open(ledger_url)
    yield opened
    opened.close()


def run_all(ledger: Ledger, workers: Sequence[str]) -> list[Leased]:
    """Let the workers take turns until nothing is left: each leases its next chunk before it commits the last one."""
    leased: list[Leased] = []
    held: dict[str, deque[Lease]] = {worker: deque() for worker in workers}
    while True:
        before = len(leased)
        for worker in workers:
            for lease in ledger.chunks.lease(worker, MODEL, 1):
                leased.append((worker, lease.ref.chunk))
                held[worker].append(lease)
            if held[worker] and (len(held[worker]) > 1 or len(leased) == before):
                done = held[worker].popleft()
                ledger.chunks.commit(done.ref, result_of(done))
        if len(leased) == before and not any(held.values()):
            return leased


def computed(leased: Sequence[Leased], groups: Sequence[int | None]) -> int:
    """How often a prefix is computed: once by each worker that has a chunk of its group."""
    return len({(worker, groups[chunk]) for worker, chunk in leased if groups[chunk] is not None})


def test_each_worker_goes_on_with_its_prefix_and_begins_one_that_nobody_has(ledger: Ledger) -> None:
    groups = [chunk - chunk % 5 for chunk in range(20)]
    batch = grouped(ledger, "documents", groups)
    leased = run_all(ledger, ["w1", "w2"])
    assert sorted(chunk for _, chunk in leased) == list(range(20))
    assert computed(leased, groups) == 4
    # In the order of their numbers alone nearly each worker would have computed each of them.
    in_order = [("w1" if turn % 2 else "w2", chunk) for turn, chunk in enumerate(range(20))]
    assert computed(in_order, groups) == 8
    assert {chunk.state for chunk in ledger.chunks.of(batch.batch_id)} == {ChunkState.COMMITTED}


def test_where_all_prefixes_are_under_way_others_help(ledger: Ledger) -> None:
    grouped(ledger, "documents", [0] * 6)
    first = [ledger.chunks.lease(worker, MODEL, 1)[0].ref.chunk for worker in ("w1", "w2", "w3")]
    assert first == [0, 1, 2]


def test_helpers_are_spread_over_the_prefixes_that_are_under_way(ledger: Ledger) -> None:
    grouped(ledger, "documents", [0] * 4 + [4] * 4)
    first = [ledger.chunks.lease(worker, MODEL, 1)[0].ref.chunk for worker in ("w1", "w2", "w3", "w4")]
    assert first == [0, 4, 1, 5]


def test_with_twice_as_many_workers_as_prefixes_each_worker_has_one(ledger: Ledger) -> None:
    groups = [chunk - chunk % 8 for chunk in range(64)]
    grouped(ledger, "documents", groups)
    leased = run_all(ledger, [f"w{number}" for number in range(16)])
    assert computed(leased, groups) == 16


def test_chunks_without_a_long_prefix_have_their_turn_with_the_prefixes_that_nobody_has(ledger: Ledger) -> None:
    grouped(ledger, "mixed", [0, 0, None, 3, 3, None])
    order = ["w1", "w2", "w1", "w2", "w2", "w2"]
    leased = [ledger.chunks.lease(worker, MODEL, 1)[0].ref.chunk for worker in order]
    # w2 has no prefix until it gets to 3; then it goes on with that, before it takes what is left.
    assert leased == [0, 2, 1, 3, 4, 5]


def test_a_prefix_whose_worker_is_gone_is_begun_by_the_next_one(ledger: Ledger) -> None:
    grouped(ledger, "documents", [0, 0, 2, 2])
    (lost,) = ledger.chunks.lease("w1", MODEL, 1)
    ledger.chunks.release(lost.ref, "the worker ends")
    assert [lease.ref.chunk for lease in ledger.chunks.lease("w2", MODEL, 2)] == [0, 1]


def test_several_batches_in_one_lease_each_have_their_own_order(ledger: Ledger) -> None:
    grouped(ledger, "documents", [0, 0, 2, 2], "acme")
    submitted(ledger, "plain-1", [MODEL] * 2, "bolt")
    submitted(ledger, "plain-2", [MODEL] * 2, "core")
    ledger.chunks.lease("w1", MODEL, 3)
    leases = ledger.chunks.lease("w2", MODEL, 3)
    assert sorted((lease.customer, lease.ref.chunk) for lease in leases) == [("acme", 2), ("bolt", 1), ("core", 1)]


def test_prefixes_of_one_customer_take_nothing_from_another(ledger: Ledger) -> None:
    grouped(ledger, "documents", [0] * 20, "acme")
    submitted(ledger, "plain", [MODEL] * 20, "bolt")
    customers = [ledger.chunks.lease("w", MODEL, 1)[0].customer for _ in range(10)]
    assert (customers.count("acme"), customers.count("bolt")) == (5, 5)


@examples(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.booleans(), st.integers(2, 5)), min_size=1, max_size=6),
    workers=st.integers(1, 4),
)
def test_every_chunk_is_leased_once_and_nobody_idles_while_one_is_pending(
    sizes: list[tuple[bool, int]], workers: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    groups: list[int | None] = []
    for is_group, size in sizes:
        groups += [len(groups) if is_group else None] * size
    ledger = Ledger.open(f"sqlite:///{tmp_path_factory.mktemp('ledger')}/ledger.sqlite")
    batch = grouped(ledger, "drawn", groups)
    leased = run_all(ledger, [f"w{number}" for number in range(workers)])
    assert sorted(chunk for _, chunk in leased) == list(range(len(groups)))
    # In turns, as long as there are as many as workers.
    turns = [worker for worker, _ in leased]
    assert turns == [f"w{number % workers}" for number in range(len(turns))]
    assert_consistent(ledger, batch.batch_id)
    ledger.close()


def test_intake_tells_which_chunks_share_a_long_prefix(
    sqlite_url: str, store: ObjectStore, settings: Settings, tmp_path: Path
) -> None:
    ledger = Ledger.open(sqlite_url)
    small = intake_settings(settings, write_model(tmp_path / "model"), tmp_path / "scratch", chunk_requests=4)
    models = {name: msgspec.structs.replace(model, context_length=100_000) for name, model in small.models.items()}
    small = msgspec.structs.replace(small, models=models)
    documents = ["a " * 2500, "b " * 2500, "short"]
    lines = [request_line(number, system=documents[number % 3]) for number in range(24)]
    batch = uploaded(ledger, store, file_of(lines))
    ops.validate(batch.batch_id, ledger=ledger, store=store, settings=small, run_id="intake")
    ops.write_chunks(batch.batch_id, ledger=ledger, store=store, settings=small, run_id="intake")
    assert [chunk.prefix_group for chunk in ledger.chunks.of(batch.batch_id)] == [0, 0, 2, 2, None, None]
    ledger.close()
