"""No statement of the daily work reads more because more batches are finished: seen in the databases' own plans."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from batch_pipeline.ledger import Ledger, schema
from batch_pipeline.ledger.leasing import Policy
from tests.fakes.clock import SteppedClock
from tests.fakes.ledger_statements import sent_by
from tests.fakes.ledger_values import MODEL, grouped, result_of, submitted

FINISHED = 4_000
GROWING = {"batches", "chunks", "lanes", "events"}
OF_OPEN_WORK = {
    "batches_at_risk",
    "batches_open",
    "batches_open_by_customer",
    "batches_undecided",
    "batches_unshown",
    "chunks_pending",
    "chunks_leased",
    "chunks_leased_of_group",
    "lanes_waiting_in_turn",
}
"""Indexes that hold rows of unfinished work only (or of batches at risk until their end was told): reading one from end
to end is no scan.
"""


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    # As configured by default: only then a lease looks for batches at risk.
    policy = Policy(margin_seconds=900.0, share=0.25, most_tokens=4_000_000.0)
    ledger = Ledger.open(ledger_url, clock=SteppedClock(), policy=policy)
    _add_finished(ledger)
    for number in range(50):
        submitted(ledger, f"open-{number}", [MODEL] * 4, f"customer-{number % 7}")
    of_prefixes = [grouped(ledger, f"prefixes-{number}", [0] * 10 + [10] * 10, "customer-8") for number in range(10)]
    for lease in ledger.chunks.lease("w", MODEL, 20, [batch.batch_id for batch in of_prefixes]):
        ledger.chunks.commit(lease.ref, result_of(lease))
    if ledger_url.startswith("postgresql"):
        with ledger._database.engine.begin() as connection:
            connection.exec_driver_sql("ANALYZE")
    yield ledger
    ledger.close()


def _add_finished(ledger: Ledger) -> None:
    ids = [f"batch_{number:032x}" for number in range(FINISHED)]
    sums = {"model": MODEL, "requests": 40}
    row = {
        "customer": "customer-1",
        "name": "old",
        "door": "drop",
        "endpoint": "/v1/chat/completions",
        "window_seconds": 3600,
        "on_invalid": "skip",
        "input_key": "key",
        "input_bytes": 1,
        "input_etag": "etag",
        "metadata": "{}",
        "status": "completed",
        "outcome": "completed",
        "published": "final",
        "created_at": 1.0,
        "deadline_at": 3601.0,
        "input_sha256": "0" * 64,
    }
    chunk = {
        "model": MODEL,
        "input_key": "key",
        "requests": 10,
        "first_index": 0,
        "last_index": 9,
        "prompt_tokens": 1,
        "max_output_tokens": 1,
        "state": "committed",
        "token": 1,
    }
    with ledger._database.write() as tx:
        run = tx.connection.execute
        run(schema.batches.insert(), [{**row, "batch_id": batch_id, "creation_key": batch_id} for batch_id in ids])
        run(schema.chunks.insert(), [{**chunk, "batch_id": batch_id, "chunk": n} for batch_id in ids for n in range(4)])
        run(
            schema.lanes.insert(),
            [{**sums, "batch_id": batch_id, "pending": 0, "committed": 4, "pending_tokens": 0} for batch_id in ids],
        )
        run(
            schema.events.insert(),
            [{"at": 1.0, "batch_id": batch_id, "event": "old", "actor": "w"} for batch_id in ids for _ in range(4)],
        )


def test_no_statement_of_the_daily_work_scans_finished_work(ledger: Ledger) -> None:
    held = ledger.chunks.lease("w", MODEL, 8)
    batch_ids = [lease.ref.batch_id for lease in held]
    work: dict[str, Callable[[], object]] = {
        "lease": lambda: ledger.chunks.lease("w", MODEL, 4),
        "lease of one batch": lambda: ledger.chunks.lease("w", MODEL, 4, batch_ids[:1]),
        "lease of one with long prefixes": lambda: ledger.chunks.lease(
            "w", MODEL, 4, [ledger.batches.recent(customer="customer-8", limit=1)[0].batch_id]
        ),
        "heartbeat": lambda: ledger.workers.heartbeat("w", [lease.ref for lease in held]),
        "commit": lambda: ledger.chunks.commit(held[0].ref, result_of(held[0])),
        "commit of several": lambda: ledger.chunks.commit_all({lease.ref: result_of(lease) for lease in held[4:]}),
        "release": lambda: ledger.chunks.release(held[1].ref, "gives way"),
        "cancel": lambda: ledger.batches.cancel(batch_ids[2]),
        "want_again": lambda: ledger.chunks.want_again(batch_ids[3], "operator"),
        "submit": lambda: submitted(ledger, "one-more", [MODEL]),
        "expire_leases": ledger.chunks.expire_leases,
        "expire_due": ledger.batches.expire_due,
        "settle_all": ledger.batches.settle_all,
        "awaiting_intake": lambda: ledger.batches.awaiting_intake(10),
        "awaiting_merge": lambda: ledger.batches.awaiting_merge(10),
        "publishable": lambda: ledger.moments.publishable(10),
        "statuses": lambda: ledger.moments.these(batch_ids[:4]),
        "page of a customer": lambda: ledger.moments.page("customer-2", after=None, limit=10),
        "surroundings": lambda: ledger.surroundings.of_models([MODEL]),
        "backlog": ledger.backlog,
        "queue of a model": lambda: ledger.queues.look(MODEL, ledger.now(), lambda queue: queue),
        "pace of a batch": lambda: ledger.desk.pace(batch_ids[0]),
        "paces": lambda: list(ledger.desk.paces()),
        "progress to show": lambda: ledger.desk.to_observe(60.0, 10),
        "at risk and over": ledger.desk.at_risk_and_over,
        "gauges": ledger.gauges.read,
        "usage of a day": lambda: list(ledger.usage.ended(1e9, 1e9 + 86_400)),
        "usage of a day and a customer": lambda: list(ledger.usage.ended(1e9, 1e9 + 86_400, "customer-1")),
        "recent": lambda: ledger.batches.recent(limit=10),
        "recent of a customer": lambda: ledger.batches.recent(customer="customer-2", limit=10),
        "newest_named": lambda: ledger.batches.newest_named("customer-2", "open-2"),
        "events": lambda: list(ledger.events.of(batch_ids[0])),
    }
    scans = [
        f"{name}: {scan}"
        for name, do in work.items()
        for statement, parameters in _statements(ledger, do)
        for scan in _scans(ledger, statement, parameters)
    ]
    assert scans == []


def test_a_lease_by_prefixes_reads_what_is_pending_though_its_batch_is_most_of_the_table(ledger_url: str) -> None:
    chunks = 20_000
    ledger = Ledger.open(ledger_url, clock=SteppedClock())
    grouped(ledger, "prefixes", [chunk - chunk % 20 for chunk in range(chunks)])
    with ledger._database.write() as tx:
        done = schema.chunks.c.chunk < chunks - chunks // 10
        tx.connection.execute(schema.chunks.update().where(done).values(state="committed"))
    raw: Any = ledger._database.engine.raw_connection()  # outside of a transaction
    raw.driver_connection.execute("ANALYZE" if ledger._database.is_sqlite else "VACUUM ANALYZE chunks")
    raw.close()
    scans = [
        scan
        for statement, parameters in _statements(ledger, lambda: ledger.chunks.lease("w", MODEL, 1))
        for scan in _scans(ledger, statement, parameters)
        if "chunks" in scan
    ]
    assert scans == []
    ledger.close()


def _statements(ledger: Ledger, do: Callable[[], object]) -> list[tuple[str, Any]]:
    """The statements that `do` sends, but for those that only add rows."""
    with sent_by(ledger) as all_sent:
        do()
    sent = [
        (statement, parameters)
        for statement, parameters, is_for_many in all_sent
        if statement.startswith(("SELECT", "UPDATE", "WITH")) and not is_for_many
    ]
    assert sent
    return sent


def _scans(ledger: Ledger, statement: str, parameters: Any) -> list[str]:
    """Reads of a table that grows, by no index or by all of one that grows as well."""
    with ledger._database.engine.connect() as connection:
        if ledger._database.is_sqlite:
            steps = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            return [step.detail for step in steps if _is_sqlite_scan(step.detail)]
        (plan,) = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}", parameters).one()
    return list(_postgres_scans((plan if isinstance(plan, list) else json.loads(plan))[0]["Plan"]))


def _is_sqlite_scan(step: str) -> bool:
    scanned = re.match(r"SCAN (\w+)(?: USING (?:COVERING )?INDEX (\w+))?", step)
    if scanned is None or scanned[1] not in GROWING:
        return False
    newest_first = scanned[2] == "batches_by_time"  # read from its end, as far as the limit
    return scanned[2] not in OF_OPEN_WORK and not newest_first


def _postgres_scans(node: dict[str, Any]) -> Iterator[str]:
    index = node.get("Index Name")
    bounded = "Index Cond" in node or index in OF_OPEN_WORK or index == "batches_by_time"
    if node["Node Type"].endswith("Scan") and node.get("Relation Name") in GROWING and not bounded:
        is_bitmap = node["Node Type"] == "Bitmap Heap Scan"  # its condition is that of the index scan below it
        if not is_bitmap:
            yield f"{node['Node Type']} on {node['Relation Name']} by {index}"
    for below in node.get("Plans", []):
        yield from _postgres_scans(below)
