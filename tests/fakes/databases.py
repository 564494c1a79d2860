"""Databases on a Postgres server."""

from __future__ import annotations

import sqlalchemy as sa


def new_database(server: str, name: str) -> str:
    """Make an empty database, in place of one of that name; return its URL. `server` is the URL of any other one."""
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.execute(sa.text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    return f"{server.rpartition('/')[0]}/{name}"


def open_transactions(url: str | sa.URL) -> int:
    """Return how many connections to a database of Postgres are inside a transaction."""
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    query = sa.text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND backend_type = 'client backend' AND xact_start IS NOT NULL"
    )
    with engine.connect() as connection:
        return int(connection.execute(query).scalar_one())
