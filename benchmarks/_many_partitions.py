"""Dagster's instance and the ledger with many batches that have ended: one that was really run, and copies of its rows.

A copy has what the real one has, under an id of its own: partition, asset events with their tags, evaluations of
checks, the rows of its intake and its merge with their tags, and the batch in the ledger. It has not the other events
of its runs (steps, logs), and not the picture of its time line.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from dagster._core.storage.event_log.schema import (
    AssetCheckExecutionsTable,
    AssetEventTagsTable,
    DynamicPartitionsTable,
    SqlEventLogStorageTable,
)
from dagster._core.storage.runs.schema import RunsTable, RunTagsTable

from batch_pipeline import ids
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.schema import batches
from batch_pipeline.store import ObjectStore
from tests.fakes import desk
from tests.fakes.code_location import CodeLocation

PARTITIONS = "batches"
_PICTURE = "data:image/png;base64,[A-Za-z0-9+/=]+"
_FIRST_OF_RUN_ID = 8


def run_one(location: CodeLocation, store: ObjectStore) -> str:
    """Bring one file through all its runs; return its batch's id."""
    store.put("inbox/acme/questions.jsonl", desk.file_of(40, bad=2))
    (intake,) = location.tick("drop_folder")
    location.execute(intake)
    (worker,) = location.tick("gpu_workers")
    location.execute(worker)
    (merge,) = location.tick("batch_progress")
    location.execute(merge)
    location.tick("batch_progress")
    return str(intake.partition_key)


class Copies:
    """Copies of a batch, in the Postgres database of a Dagster instance and in a ledger."""

    def __init__(self, dagster_url: str, ledger: Ledger, batch_id: str) -> None:
        self._engine = sa.create_engine(dagster_url)
        self._ledger = ledger
        self._batch_id = batch_id
        events, tags = SqlEventLogStorageTable, RunTagsTable
        with self._engine.begin() as connection:
            connection.execute(events.update().values(event=sa.func.regexp_replace(events.c.event, _PICTURE, "")))
            is_of_batch = (tags.c.key == "dagster/partition") & (tags.c.value == batch_id)
            self._runs = list(connection.execute(sa.select(tags.c.run_id).where(is_of_batch)).scalars())

    def add(self, first: int, count: int) -> None:
        """Add so many copies; their ids follow from the number of each."""
        keys = [ids.batch_id_from(f"copy-{number}") for number in range(first, first + count)]
        self._add_to_ledger(keys)
        events, checks, runs, tags = SqlEventLogStorageTable, AssetCheckExecutionsTable, RunsTable, RunTagsTable
        with self._engine.begin() as connection:
            after = _last_id(connection, DynamicPartitionsTable)
            rows = [{"partitions_def_name": PARTITIONS, "partition": key} for key in keys]
            connection.execute(DynamicPartitionsTable.insert(), rows)
            last_event = _last_id(connection, events)
            self._copy(connection, events, events.c.partition == self._batch_id, after)
            self._copy_event_tags(connection, last_event)
            self._copy(connection, checks, checks.c.partition == self._batch_id, after)
            self._copy(connection, runs, runs.c.run_id.in_(self._runs), after)
            self._copy(connection, tags, tags.c.run_id.in_(self._runs), after)
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(sa.text("VACUUM ANALYZE"))

    def _copy(self, connection: sa.Connection, table: sa.Table, where: sa.ColumnElement[bool], after: int) -> None:
        """Copy the rows of a table for each partition behind `after`, with its id and runs of its own in every text."""
        key = DynamicPartitionsTable.c.partition
        names, values = [], []
        for column in table.c:
            if column.primary_key:
                continue
            value: sa.ColumnElement[Any] = column
            if isinstance(column.type, sa.String):
                for run_id in self._runs:
                    value = sa.func.replace(value, run_id, sa.func.concat(run_id[:_FIRST_OF_RUN_ID], "-", key))
                value = sa.func.replace(value, self._batch_id, key)
            names.append(column.name)
            values.append(value)
        rows = sa.select(*values).where(where, DynamicPartitionsTable.c.id > after)
        connection.execute(table.insert().from_select(names, rows))

    def _copy_event_tags(self, connection: sa.Connection, last_event: int) -> None:
        """Give the copied events the tags of those that they were copied from: of the same asset, kind and moment."""
        tags, real, copied = (
            AssetEventTagsTable,
            SqlEventLogStorageTable.alias("real"),
            SqlEventLogStorageTable.alias("copied"),
        )
        same = sa.and_(*[real.c[name] == copied.c[name] for name in ("asset_key", "dagster_event_type", "timestamp")])
        rows = (
            sa.select(copied.c.id, tags.c.asset_key, tags.c.key, tags.c.value, tags.c.event_timestamp)
            .join(real, real.c.id == tags.c.event_id)
            .join(copied, same)
            .where(real.c.partition == self._batch_id, copied.c.id > last_event)
        )
        names = ["event_id", "asset_key", "key", "value", "event_timestamp"]
        connection.execute(tags.insert().from_select(names, rows))

    def _add_to_ledger(self, keys: list[str]) -> None:
        with self._ledger._database.write() as tx:
            row = tx.connection.execute(sa.select(batches).where(batches.c.batch_id == self._batch_id)).one()
            copies = [{**row._asdict(), "batch_id": key, "creation_key": key, "name": key} for key in keys]
            tx.connection.execute(batches.insert(), copies)


def _last_id(connection: sa.Connection, table: sa.Table) -> int:
    return int(connection.execute(sa.select(sa.func.max(table.c.id))).scalar_one() or 0)
