"""What leaves the ledger when a batch is over, and what it notes of objects that leave the bucket.

    chunks in the ledger ──archive──> in the manifest alone
    stored: all ──begin, delete objects, end──> files ──begin, delete objects, end──> nothing

`begin` is noted before the first object is deleted and `end` after the last one: whoever reads the row never takes a
half-deleted batch for a whole one, and whatever is killed in between is found again. Each function is one transaction:
killed before its commit nothing has changed, after it all has; repeating it changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from batch_pipeline.errors import NotAllowedInState, NotFound, ProofFailed
from batch_pipeline.ledger import rows
from batch_pipeline.ledger.database import Database, Transaction
from batch_pipeline.ledger.events import record
from batch_pipeline.ledger.files import remove_of_batch
from batch_pipeline.ledger.records import Batch, BatchStatus, Chunk, ChunkState, Stored
from batch_pipeline.ledger.schema import (
    batches,
    chunks,
    events,
    has_objects,
    has_work,
    is_open,
    is_unarchived,
    lanes,
    workers,
)
from batch_pipeline.ledger.transitions import lock_batch, update_batch

_PAGE = 500
"""Ids in one query: SQLite takes no more than some thousand parameters."""


class Archived(NamedTuple):
    """Rows that have left the ledger."""

    chunks: int
    events: int


class Retention:
    """What housekeeping asks of the ledger. Moments are UTC seconds since the epoch by the database's clock."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def to_archive(self, ended_before: float, limit: int) -> list[Batch]:
        """Return final batches whose chunks are still in the ledger, those that ended first."""
        return self._ended(is_unarchived, ended_before, limit)

    def with_work(self, ended_before: float, limit: int) -> list[Batch]:
        """Return archived batches of which chunk objects may still lie in the bucket, those that ended first."""
        return self._ended(has_work & batches.c.archived_at.is_not(None), ended_before, limit)

    def with_objects(self, ended_before: float, limit: int) -> list[Batch]:
        """Return final batches of which anything may still lie in the bucket, those that ended first."""
        return self._ended(has_objects, ended_before, limit)

    def _ended(self, where: sa.ColumnElement[bool], ended_before: float, limit: int) -> list[Batch]:
        query = rows.BATCH.where(where, batches.c.ended_at <= ended_before).order_by(batches.c.ended_at).limit(limit)
        with self._database.read() as tx:
            return [rows.batch(row) for row in tx.connection.execute(query)]

    def archive(self, batch_id: str, chunk_count: int, actor: str = "housekeeping") -> Archived:
        """Let a final batch's chunks, lanes and chunk events go: its manifest, which the caller has compared, has them.

        Raises NotFound; NotAllowedInState before the end; ProofFailed where the ledger has not `chunk_count` chunks.
        Again: nothing is left to go.
        """
        with self._database.write() as tx:
            batch = _final(tx, batch_id)
            if batch.archived_at is not None:
                return Archived(0, 0)
            count = sa.select(sa.func.count()).select_from(chunks).where(chunks.c.batch_id == batch_id)
            found = tx.connection.execute(count).scalar_one()
            if found != chunk_count:
                raise ProofFailed([f"the ledger has {found} chunks of {batch_id}, its manifest {chunk_count}"])
            kept = tx.connection.execute(rows.LANE.where(lanes.c.batch_id == batch_id).order_by(lanes.c.model))
            kept_lanes = rows.json([rows.lane(row) for row in kept])
            gone = _delete_rows(tx, batch_id, events.c.chunk.is_not(None))
            update_batch(tx, batch_id, archived_at=tx.now, archived_lanes=kept_lanes)
            record(tx, batch_id, "archived", actor, detail=f"{gone.chunks} chunks and {gone.events} events of chunks")
            return gone

    def begin_work_removal(self, batch_id: str, actor: str = "housekeeping") -> None:
        """Note that what the batch's files were made from is about to be deleted. To be called before the first is."""
        with self._database.write() as tx:
            batch = _final(tx, batch_id)
            if batch.archived_at is None:
                raise NotAllowedInState(f"batch {batch_id}: its chunks are still in the ledger")
            if batch.work_removed_at is None:
                update_batch(tx, batch_id, work_removed_at=tx.now)
                record(tx, batch_id, "work_removed", actor)

    def end_work_removal(self, batch_id: str) -> None:
        """stored: all -> files, once the last of these objects is deleted."""
        with self._database.write() as tx:
            if _final(tx, batch_id).stored == Stored.ALL:
                update_batch(tx, batch_id, stored=Stored.FILES)

    def begin_file_removal(self, batch_id: str) -> None:
        """Note that the batch's files are not given out any more. To be called before the first is deleted."""
        with self._database.write() as tx:
            batch = _final(tx, batch_id)
            if batch.files_removed_at is None:
                removed = batch.work_removed_at or tx.now
                # Nobody shows its end any more: there is nothing to copy to the outbox.
                update_batch(tx, batch_id, files_removed_at=tx.now, work_removed_at=removed, published="final")
                remove_of_batch(tx, batch_id)

    def end_file_removal(self, batch_id: str) -> None:
        """stored: all | files -> nothing, once the last object is deleted; its events leave, and what else is there."""
        with self._database.write() as tx:
            batch = _final(tx, batch_id)
            if batch.stored == Stored.NOTHING:
                return
            kept = batch.archived_lanes
            if batch.archived_at is None:
                found = tx.connection.execute(rows.LANE.where(lanes.c.batch_id == batch_id).order_by(lanes.c.model))
                kept = rows.json([rows.lane(row) for row in found])
            _delete_rows(tx, batch_id, sa.true())
            update_batch(
                tx, batch_id, stored=Stored.NOTHING, archived_at=batch.archived_at or tx.now, archived_lanes=kept
            )

    def chunks_with_leftovers(self, after: tuple[str, int], limit: int) -> list[Chunk]:
        """Return chunks of open batches that have had an attempt which can write no more and did not commit.

        Those behind `after` (batch id, number), in the order of both. Cost: the chunks of open batches.
        """
        unfinished = ~chunks.c.state.in_([ChunkState.LEASED, ChunkState.COMMITTED])
        query = (
            rows.CHUNK.join(batches, batches.c.batch_id == chunks.c.batch_id)
            .where(
                is_open,
                (chunks.c.token > 1) | ((chunks.c.token == 1) & unfinished),
                sa.or_(
                    chunks.c.batch_id > after[0],
                    sa.and_(chunks.c.batch_id == after[0], chunks.c.chunk > after[1]),
                ),
            )
            .order_by(chunks.c.batch_id, chunks.c.chunk)
            .limit(limit)
        )
        with self._database.read() as tx:
            return [rows.chunk(row) for row in tx.connection.execute(query)]

    def still_stored(self, batch_ids: Sequence[str]) -> set[str]:
        """Return those of these ids that name a batch of which something may lie in the bucket."""
        return set(self._among(batch_ids, has_objects))

    def ends(self, batch_ids: Sequence[str]) -> dict[str, float]:
        """Return when these batches ended; those that have not, and unknown ids, are left out."""
        return self._among(batch_ids, batches.c.ended_at.is_not(None))

    def _among(self, batch_ids: Sequence[str], where: sa.ColumnElement[bool]) -> dict[str, Any]:
        """Return those of these ids for which the condition holds, each with its batch's end."""
        found: dict[str, Any] = {}
        for start in range(0, len(batch_ids), _PAGE):
            some = batches.c.batch_id.in_(batch_ids[start : start + _PAGE])
            query = sa.select(batches.c.batch_id, batches.c.ended_at).where(some, where)
            with self._database.read() as tx:
                found.update({row.batch_id: row.ended_at for row in tx.connection.execute(query)})
        return found

    def silent_workers(self, seen_before: float) -> int:
        """Return how many workers were last heard of before a moment."""
        query = sa.select(sa.func.count()).select_from(workers).where(workers.c.seen_at < seen_before)
        with self._database.read() as tx:
            return int(tx.connection.execute(query).scalar_one())

    def forget_workers(self, seen_before: float) -> int:
        """Delete the rows of workers that were last heard of before a moment; returns how many.

        One that is heard of later after all is not known any more; its leases have run out long ago.
        """
        with self._database.write() as tx:
            return int(tx.connection.execute(workers.delete().where(workers.c.seen_at < seen_before)).rowcount)


def _final(tx: Transaction, batch_id: str) -> Any:
    """Return the locked row of a final batch."""
    batch = lock_batch(tx, batch_id)
    if batch is None:
        raise NotFound(f"no batch {batch_id}")
    if not BatchStatus(batch.status).is_final:
        raise NotAllowedInState(f"batch {batch_id} is {batch.status}: it needs what it has")
    return batch


def _delete_rows(tx: Transaction, batch_id: str, which_events: sa.ColumnElement[bool]) -> Archived:
    chunk_rows = tx.connection.execute(chunks.delete().where(chunks.c.batch_id == batch_id)).rowcount
    tx.connection.execute(lanes.delete().where(lanes.c.batch_id == batch_id))
    event_rows = tx.connection.execute(events.delete().where(events.c.batch_id == batch_id, which_events)).rowcount
    return Archived(int(chunk_rows), int(event_rows))
