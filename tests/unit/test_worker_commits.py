"""Commits that come while one is under way are one transaction, and each is told what came of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from sqlalchemy.exc import OperationalError

from batch_pipeline.errors import LeaseLost
from batch_pipeline.ledger.records import ChunkResult, CommitReply, LeaseRef
from batch_pipeline.worker.commits import Commits
from tests.fakes.waiting import wait_until

RESULT = ChunkResult(
    result_key="results.jsonl",
    lines_key="lines.parquet",
    output_bytes=1,
    error_bytes=0,
    sha256="0" * 64,
    completed=1,
    failed=0,
    input_tokens=1,
    cached_tokens=0,
    output_tokens=1,
    engine_version="1",
    model_version="1",
)


class Ledger:
    """Commits when it is let; the second group fails where it is told to."""

    def __init__(self, fails_with: Exception | None = None, cannot_write: int | None = None) -> None:
        self.may_go_on = threading.Event()
        self.groups: list[list[int]] = []
        self._fails_with = fails_with
        self._cannot_write = cannot_write

    def commit_all(self, results: Mapping[LeaseRef, ChunkResult]) -> dict[LeaseRef, CommitReply | LeaseLost]:
        self.groups.append([ref.chunk for ref in results])
        assert self.may_go_on.wait(30)
        if len(self.groups) == 2 and self._fails_with is not None:
            raise self._fails_with
        if any(ref.chunk == self._cannot_write for ref in results):
            raise ValueError(f"chunk {self._cannot_write} cannot be written")
        return {
            ref: LeaseLost("taken") if ref.chunk == 3 else CommitReply(batch_drained=ref.chunk == 2) for ref in results
        }


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def commit_four(ledger: Ledger, threads: ThreadPoolExecutor) -> list[Future[CommitReply]]:
    """Commit chunk 0, and while that is under way chunks 1, 2 and 3."""
    commits = Commits(ledger.commit_all)
    made = [threads.submit(commits.commit, LeaseRef("batch", 0, 1), RESULT)]
    wait_until(lambda: ledger.groups, "the first transaction begins")
    made += [threads.submit(commits.commit, LeaseRef("batch", chunk, 1), RESULT) for chunk in (1, 2, 3)]
    wait_until(lambda: len(commits._waiting) == 3, "the others wait")
    ledger.may_go_on.set()
    return made


def test_those_that_wait_go_together_and_one_that_is_refused_takes_nothing_from_the_others(
    threads: ThreadPoolExecutor,
) -> None:
    ledger = Ledger()
    made = commit_four(ledger, threads)
    assert [future.result(30).batch_drained for future in made[:3]] == [False, False, True]
    with pytest.raises(LeaseLost, match="taken"):
        made[3].result(30)
    assert [sorted(group) for group in ledger.groups] == [[0], [1, 2, 3]]


def test_an_outage_is_raised_to_all_that_it_met_and_each_may_try_again(threads: ThreadPoolExecutor) -> None:
    ledger = Ledger(fails_with=OperationalError("COMMIT", None, ConnectionError("away")))
    made = commit_four(ledger, threads)
    assert made[0].result(30) == CommitReply(batch_drained=False)
    for future in made[1:]:
        with pytest.raises(OperationalError, match="away"):
            future.result(30)
    assert len(ledger.groups) == 2
    again = Commits(ledger.commit_all)
    assert again.commit(LeaseRef("batch", 2, 1), RESULT) == CommitReply(batch_drained=True)


def test_one_that_cannot_be_written_costs_the_others_nothing(threads: ThreadPoolExecutor) -> None:
    ledger = Ledger(cannot_write=1)
    made = commit_four(ledger, threads)
    with pytest.raises(ValueError, match="chunk 1"):
        made[1].result(30)
    assert made[2].result(30) == CommitReply(batch_drained=True)
    with pytest.raises(LeaseLost, match="taken"):
        made[3].result(30)
    assert sorted(map(sorted, ledger.groups)) == [[0], [1], [1, 2, 3], [2], [3]]
