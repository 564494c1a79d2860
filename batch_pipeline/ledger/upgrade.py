"""Bringing the tables of an older release up to date, inside the transaction that looked at their version."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.schema import CreateColumn

from batch_pipeline.ledger import schema

_NEW_COLUMNS = {
    2: ("archived_at", "archived_lanes", "work_removed_at", "files_removed_at", "stored"),
    3: (),
}
"""Columns of `batches` that each version has added."""
_NEW_INDEXES = {
    2: ("batches_unarchived", "batches_with_work", "batches_with_objects"),
    3: ("batches_by_end",),
}


def upgrade(connection: sa.Connection, version: int) -> bool:
    """Bring tables of `version` to the one that this release needs; False where that is not known how.

    Killed before the commit the tables are as they were, after it they are up to date: both databases change tables
    within a transaction.
    """
    if not 1 <= version <= schema.SCHEMA_VERSION:
        return False
    for step in range(version + 1, schema.SCHEMA_VERSION + 1):
        for name in _NEW_COLUMNS[step]:
            column = CreateColumn(schema.batches.c[name]).compile(dialect=connection.dialect)
            connection.exec_driver_sql(f"ALTER TABLE batches ADD COLUMN {column}")
        for index in schema.batches.indexes:
            if index.name in _NEW_INDEXES[step]:
                index.create(connection, checkfirst=True)
    if version < schema.SCHEMA_VERSION:
        connection.execute(schema.schema_info.update().values(version=schema.SCHEMA_VERSION))
    return True
