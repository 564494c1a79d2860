"""What leaves the ledger, on SQLite and Postgres; and tables of an older release."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from batch_pipeline.errors import LeaseLost
from batch_pipeline.ledger import Ledger, schema
from batch_pipeline.ledger.records import Stored
from tests.fakes.clock import SteppedClock
from tests.fakes.ledger_values import MODEL, finish, part_of, result_of, submitted


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def ledger(ledger_url: str, clock: SteppedClock) -> Ledger:
    return Ledger.open(ledger_url, clock=clock)


def test_chunks_leave_once_and_their_sums_stay(ledger: Ledger, clock: SteppedClock) -> None:
    batch = submitted(ledger, "one", [MODEL, "model-b", MODEL])
    other = submitted(ledger, "two")
    leases = [*ledger.chunks.lease("w", MODEL, 3, [batch.batch_id]), *ledger.chunks.lease("w", "model-b", 1)]
    ledger.chunks.checkpoint(leases[0].ref, part_of(leases[0], 0))
    for lease in leases:
        ledger.chunks.commit(lease.ref, result_of(lease))
    finish(ledger, batch.batch_id)
    lanes = ledger.batches.lanes(batch.batch_id)
    retention = ledger.retention
    assert retention.to_archive(clock.time - 1, 10) == []
    assert [found.batch_id for found in retention.to_archive(clock.time, 10)] == [batch.batch_id]

    gone = retention.archive(batch.batch_id, 3)

    assert (gone.chunks, gone.events) == (3, 6)
    assert retention.archive(batch.batch_id, 3) == (0, 0)
    assert ledger.chunks.of(batch.batch_id) == []
    assert ledger.batches.lanes(batch.batch_id) == lanes
    assert len(ledger.chunks.of(other.batch_id)) == 1
    assert [event.event for event in ledger.events.of(batch.batch_id)][-1] == "archived"
    with pytest.raises(LeaseLost, match="gone"):
        ledger.chunks.commit(leases[0].ref, result_of(leases[0]))
    with pytest.raises(LeaseLost):
        ledger.chunks.release(leases[1].ref, "late")


def test_what_is_noted_of_objects_goes_forward_only(ledger: Ledger, clock: SteppedClock) -> None:
    batch = submitted(ledger, "one")
    (lease,) = ledger.chunks.lease("w", MODEL, 1)
    ledger.chunks.commit(lease.ref, result_of(lease))
    batch_id = finish(ledger, batch.batch_id).batch_id
    retention = ledger.retention
    assert retention.with_work(clock.time, 10) == [], "its chunks are in the ledger"
    retention.archive(batch_id, 1)
    assert [found.batch_id for found in retention.with_work(clock.time, 10)] == [batch_id]
    for _ in range(2):
        retention.begin_work_removal(batch_id)
        assert [found.batch_id for found in retention.with_work(clock.time, 10)] == [batch_id]
    retention.end_work_removal(batch_id)
    assert (retention.with_work(clock.time, 10), ledger.batches.get(batch_id).stored) == ([], Stored.FILES)
    assert retention.still_stored([batch_id, "batch_unknown"]) == {batch_id}
    assert retention.ends([batch_id, "batch_unknown"]) == {batch_id: clock.time}
    clock.advance(100)
    for _ in range(2):
        retention.begin_file_removal(batch_id)
        retention.end_file_removal(batch_id)
        retention.end_work_removal(batch_id)
    after = ledger.batches.get(batch_id)
    assert (after.stored, after.files_removed_at) == (Stored.NOTHING, clock.time)
    assert retention.with_objects(clock.time, 10) == []
    assert retention.still_stored([batch_id]) == set()
    assert list(ledger.events.of(batch_id)) == []
    assert ledger.moments.publishable() == []


def test_chunks_with_leftovers_are_those_with_an_attempt_in_vain(ledger: Ledger, clock: SteppedClock) -> None:
    batch = submitted(ledger, "one", [MODEL] * 4)
    leases = ledger.chunks.lease("w", MODEL, 4)
    assert ledger.retention.chunks_with_leftovers(("", -1), 10) == []
    ledger.chunks.release(leases[1].ref, "gives way")
    ledger.chunks.release(leases[2].ref, "gives way")
    ledger.chunks.commit(leases[0].ref, result_of(leases[0]))
    ledger.chunks.lease("w", MODEL, 1)
    found = ledger.retention.chunks_with_leftovers(("", -1), 10)
    assert [(chunk.chunk, chunk.state) for chunk in found] == [(1, "leased"), (2, "pending")]
    assert [chunk.chunk for chunk in ledger.retention.chunks_with_leftovers((batch.batch_id, 1), 10)] == [2]


def test_tables_of_the_first_version_are_brought_up_to_date(ledger_url: str, clock: SteppedClock) -> None:
    ledger = Ledger.open(ledger_url, clock=clock)
    batch = submitted(ledger, "one")
    indexes = (
        "batches_unarchived",
        "batches_with_work",
        "batches_with_objects",
        "batches_by_end",
        "batches_open_by_customer",
    )
    of_batches = (
        "archived_at",
        "archived_lanes",
        "work_removed_at",
        "files_removed_at",
        "stored",
        "enqueued",
        "sent_sha256",
        "estimates",
    )
    added = {
        "batches": of_batches,
        "customers": ("max_requests", "max_open_batches", "max_enqueued_tokens"),
        "chunks": ("charged", "prefix_group"),
        "service": ("floor",),
        "lanes": ("customer", "deadline_at", "prefix_groups"),
    }
    with ledger._database.write() as tx:
        for index in (*indexes, "lanes_waiting_in_turn", "chunks_leased_of_group"):
            tx.connection.execute(sa.text(f"DROP INDEX {index}"))
        for table, columns in added.items():
            for column in columns:
                tx.connection.execute(sa.text(f"ALTER TABLE {table} DROP COLUMN {column}"))
        for table in ("files", "api_keys", "quotas"):
            tx.connection.execute(sa.text(f"DROP TABLE {table}"))
        tx.connection.execute(sa.text("CREATE INDEX lanes_waiting ON lanes (model) WHERE pending > 0"))
        tx.connection.execute(schema.schema_info.update().values(version=1))
    ledger.close()
    upgraded = Ledger.open(ledger_url, clock=clock)
    assert upgraded.batches.get(batch.batch_id) == batch
    assert upgraded.retention.to_archive(clock.time, 10) == []
    names = {index["name"] for index in sa.inspect(upgraded._database.engine).get_indexes("batches")}
    assert set(indexes) <= names
    names = {index["name"] for index in sa.inspect(upgraded._database.engine).get_indexes("lanes")}
    assert names == {"lanes_waiting_in_turn"}
    (lease,) = upgraded.chunks.lease("w", MODEL, 1)  # found by what its lane has been given
    upgraded.chunks.release(lease.ref, "gives way")
    # What was there before holds nothing, and gives nothing back.
    assert upgraded.batches.cancel(batch.batch_id).status == "finalizing"
    assert upgraded.quotas.kept() == upgraded.quotas.recount() == {}
    Ledger.open(ledger_url, clock=clock).close()
    upgraded.close()
