"""A ledger with very many batches: how long its daily work takes, by which plans, and whether finished work matters."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from batch_pipeline.embedded.postgres import PostgresServer
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.leasing import Policy
from batch_pipeline.ledger.records import Lease, WorkerState
from benchmarks.ledger.filling import analyse, fill
from benchmarks.ledger.throughput import milliseconds
from tests.fakes.ledger_statements import Sent, sent_by
from tests.fakes.ledger_values import MODEL, result_of

CUSTOMERS = 190
ROUNDS = 200
POLICY = Policy(margin_seconds=1800.0, share=0.3, most_tokens=1_000_000.0)
SPEED = 500.0
"""Tokens a second of all workers: some of the batches are then at risk."""


class Size(NamedTuple):
    """How many batches in progress and finished ones, and how many chunks each has."""

    active: int
    finished: int
    chunks: int


def measure(size: Size, plans: Path | None) -> None:
    """Fill a ledger with batches in progress, measure, add the finished ones, measure again; print a table."""
    kept: list[str] = []
    with tempfile.TemporaryDirectory() as folder, PostgresServer(Path(folder) / "postgres") as url:
        ledger = Ledger.open(url, policy=POLICY)
        ledger.workers.register("w", MODEL, None, "here")
        ledger.workers.set_state("w", WorkerState.READY)
        ledger.workers.heartbeat("w", tokens_per_second=SPEED)
        print("| chunks in progress | finished chunks | what | p50 / p99 | statements |\n" + "| --- " * 5 + "|")
        for status, batches in (("in_progress", size.active), ("completed", size.finished)):
            began = time.perf_counter()
            fill(ledger, status, batches, size.chunks, CUSTOMERS)
            analyse(ledger)
            filled = time.perf_counter() - began
            finished = 0 if status == "in_progress" else size.finished * size.chunks
            for what, seconds, sent in _daily_work(ledger):
                what_is_there = f"| {size.active * size.chunks:,} | {finished:,} "
                print(f"{what_is_there}| {what} | {milliseconds(seconds)} | {len(sent)} |", flush=True)
                if plans is not None:
                    kept.append(f"## {what}, with {finished:,} finished chunks beside\n\n{_plans(ledger, sent)}")
            print(f"({batches} batches were filled in within {filled:.0f} s)", flush=True)
        ledger.close()
    if plans is not None:
        plans.write_text("\n".join(kept), encoding="utf-8")


def _daily_work(ledger: Ledger) -> list[tuple[str, list[float], list[Sent]]]:
    """Return what a worker does: its name, the seconds of each round, and the statements of one."""
    held: list[Lease] = []

    def lease(chunks: int) -> None:
        held[:] = ledger.chunks.lease("w", MODEL, chunks)
        assert len(held) == chunks

    def commit() -> None:
        ledger.chunks.commit_all({lease.ref: result_of(lease) for lease in held})

    def release() -> None:
        for each in held:
            ledger.chunks.release(each.ref, "gives way")

    steps: list[list[tuple[str, Callable[[], object]]]] = [
        [("lease of 1", lambda: lease(1)), ("commit of 1", commit)],
        [
            ("lease of 8", lambda: lease(8)),
            ("heartbeat with 8", lambda: ledger.workers.heartbeat("w", [each.ref for each in held])),
            ("commit of 8", commit),
        ],
        [("lease of 1", lambda: lease(1)), ("release", release)],
    ]
    done: dict[str, tuple[list[float], list[Sent]]] = {}
    for step in steps:
        for _ in range(ROUNDS):
            for what, do in step:
                with sent_by(ledger) as sent:
                    began = time.perf_counter()
                    do()
                    seconds = time.perf_counter() - began
                done.setdefault(what, ([], []))[0].append(seconds)
                done[what][1][:] = sent
    return [(what, *measured) for what, measured in done.items()]


def _plans(ledger: Ledger, sent: list[Sent]) -> str:
    """Return how Postgres runs these statements; nothing of it stays."""
    texts = []
    with ledger._database.engine.connect() as connection:
        for statement, parameters, _ in sent:
            explained = f"EXPLAIN (ANALYZE, BUFFERS, COSTS OFF) {statement}"
            lines = connection.exec_driver_sql(explained, parameters).scalars()
            texts.append("```\n" + " ".join(statement.split())[:300] + "\n\n" + "\n".join(lines) + "\n```\n")
        connection.rollback()
    return "\n".join(texts)
