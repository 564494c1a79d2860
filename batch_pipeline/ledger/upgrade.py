"""Bringing the tables of an older release up to date, inside the transaction that looked at their version.

Each version adds tables (which `create_all` makes), columns and indexes. So the tables are compared with what this
release describes, what is missing is added, and indexes that are not used any more are dropped. A new column has to be
nullable or to have a default of the server's; what older rows are to have in it instead is said here.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.schema import CreateColumn

from batch_pipeline.ledger import schema

_LANES_NAME_CUSTOMERS = 8
"""From this version on a lane says whose it is."""
_UNUSED_INDEXES = {"lanes_waiting"}


def upgrade(connection: sa.Connection, version: int) -> bool:
    """Bring tables of `version` to the one that this release needs; False where that is not known how.

    Killed before the commit the tables are as they were, after it they are up to date: both databases change tables
    within a transaction.
    """
    if not 1 <= version <= schema.SCHEMA_VERSION:
        return False
    if version < schema.SCHEMA_VERSION:
        found = sa.inspect(connection)
        for table in schema.metadata.sorted_tables:
            columns = {column["name"] for column in found.get_columns(table.name)}
            indexes = {index["name"] for index in found.get_indexes(table.name)}
            for column in table.columns:
                if column.name not in columns:
                    added = CreateColumn(column).compile(dialect=connection.dialect)
                    connection.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {added}")
            for index in table.indexes:
                if index.name not in indexes:
                    index.create(connection)
            for name in sorted(_UNUSED_INDEXES.intersection(indexes)):
                connection.exec_driver_sql(f"DROP INDEX {name}")
        if version < _LANES_NAME_CUSTOMERS:
            _copy_to_lanes(connection)
        connection.execute(schema.schema_info.update().values(version=schema.SCHEMA_VERSION))
    return True


def _copy_to_lanes(connection: sa.Connection) -> None:
    """Let lanes say whose they are and when they are due, as their batches do."""
    batches, lanes = schema.batches, schema.lanes
    of_batch = batches.c.batch_id == lanes.c.batch_id
    customer = sa.select(batches.c.customer).where(of_batch).scalar_subquery()
    deadline = sa.select(batches.c.deadline_at).where(of_batch).scalar_subquery()
    connection.execute(lanes.update().values(customer=customer, deadline_at=deadline))
