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
