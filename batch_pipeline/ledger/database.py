"""Connections, transactions and the database's clock, on SQLite and Postgres.

A write transaction is all or nothing: killed before its commit nothing of it happened, after it all of it did.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, DBAPIError, InvalidatePoolError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry

from batch_pipeline.errors import OperatorError
from batch_pipeline.ledger import schema
from batch_pipeline.ledger.upgrade import upgrade

_BUSY_SECONDS = 30
_IDLE_SECONDS = 5.0
"""A connection that was idle for longer is tried before it is used."""
_FROZEN_SECONDS = 30.0
"""A transaction in which nothing was asked for so long is rolled back by the server (Postgres)."""
_TIMED_OUT = {"25P03", "25P04"}
"""SQLSTATEs of what the server says of such a transaction, and of one that took longer than an operator lets it."""
_BEGAN_AT = "ledger_began_at"
"""Where a connection to Postgres keeps the server's time at the begin of its transaction."""
_BEGIN = "BEGIN; SELECT extract(epoch FROM clock_timestamp())::float8"
_Inside = TypeVar("_Inside")
_SET_UP_LOCK = 7_240_001
"""Advisory lock under which one process at a time creates tables on Postgres."""


class Clock(Protocol):
    """Tells the time of a transaction."""

    def now(self, connection: sa.Connection) -> float:
        """Return UTC seconds since the epoch."""


class DatabaseClock:
    """The database's own clock: the only one that all workers share (invariant I3)."""

    def now(self, connection: sa.Connection) -> float:
        """Return the server's time when the transaction began to work: on SQLite, after it has got its lock."""
        if connection.dialect.name == "sqlite":
            return float(connection.exec_driver_sql("SELECT (julianday('now') - 2440587.5) * 86400.0").scalar_one())
        return float(connection.info[_BEGAN_AT])


class Transaction(NamedTuple):
    """A connection inside a transaction, and the time at which it began to work."""

    connection: sa.Connection
    now: float

    @property
    def is_postgres(self) -> bool:
        """Whether several rows can be given as one parameter (`rows.given`)."""
        return self.connection.dialect.name == "postgresql"


def execute_all(tx: Transaction, statement: sa.Executable, parameters: Sequence[Mapping[str, Any]]) -> None:
    """Run a statement that returns nothing once for each of the parameters, in their order; on Postgres in one round
    trip.
    """
    if len(parameters) == 1:
        tx.connection.execute(statement, parameters[0])  # a round trip less than for a list of one
    elif parameters:
        tx.connection.execute(statement, parameters)


class Database:
    """One database. `write` and `read` give transactions; both raise SQLAlchemy's OperationalError when it is away."""

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self._clock = clock or DatabaseClock()
        self.engine = _make_engine(url)
        self.is_sqlite = self.engine.dialect.name == "sqlite"
        # SQLite has one writer at a time, and whoever waits for it asks again and again, in no order: with many threads
        # one may wait in vain for longer than it has patience. Those of one process wait for each other here instead.
        self._writing = threading.Lock() if self.is_sqlite else nullcontext()

    def set_up(self) -> None:
        """Create what is missing, and bring older tables up to date; safe in several processes at once.

        Raises OperatorError on tables of another version.
        """
        with self.engine.begin() as connection:
            if not self.is_sqlite:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_SET_UP_LOCK)))
            schema.metadata.create_all(connection)
            version = connection.execute(sa.select(schema.schema_info.c.version)).scalar_one_or_none()
            if version is None:
                connection.execute(schema.schema_info.insert().values(version=schema.SCHEMA_VERSION))
            elif not upgrade(connection, version):
                raise OperatorError(
                    f"the ledger has tables of version {version}, this release needs {schema.SCHEMA_VERSION}: "
                    "use the matching release, or point ledger.url at an empty database"
                )

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """A transaction that may write. On SQLite it has the write lock from its first moment."""
        with self._writing, _interrupts_first(self.engine.begin()) as connection:
            yield Transaction(connection, self._clock.now(connection))

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A transaction that only reads, and blocks nobody."""
        with self.look() as connection:
            yield Transaction(connection, self._clock.now(connection))

    @contextmanager
    def look(self) -> Iterator[sa.Connection]:
        """Like `read`, for what does not ask for the time: one statement less."""
        with (
            self.engine.connect().execution_options(read_only=True) as connection,
            _interrupts_first(connection.begin()),
        ):
            yield connection

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


@contextmanager
def _interrupts_first(transaction: AbstractContextManager[_Inside]) -> Iterator[_Inside]:
    """A transaction out of which an interrupt comes as what it is, also where the rollback fails: its connection may be
    lost, and of a process that is told to end nobody wants to know that.
    """
    told: BaseException | None = None
    try:
        with transaction as inside:
            try:
                yield inside
            except BaseException as error:
                told = error
                raise
    except Exception as error:
        if told is None or isinstance(told, Exception):
            raise
        raise told from error


def _make_engine(url: str) -> sa.Engine:
    try:
        return _engine_of(sa.make_url(url))
    except (ArgumentError, ImportError, ValueError) as error:
        # Without the URL: it may hold a password.
        raise OperatorError(
            f"ledger.url cannot be used ({type(error).__name__}): write sqlite:///FILE or "
            "postgresql+psycopg://USER:PASSWORD@HOST/DATABASE"
        ) from error


def _engine_of(parsed: sa.URL) -> sa.Engine:
    if parsed.get_backend_name() == "sqlite":
        if parsed.database:
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        # A connection is an open file: as many as there are threads, and none of them waits for one.
        engine = sa.create_engine(parsed, connect_args={"timeout": _BUSY_SECONDS}, max_overflow=-1)
        event.listen(engine, "connect", _configure_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    if parsed.get_backend_name() == "postgresql":
        engine = sa.create_engine(parsed, pool_size=8, max_overflow=16)
        event.listen(engine, "connect", _configure_postgres)
        event.listen(engine, "begin", _begin_postgres)
        event.listen(engine, "handle_error", _as_outage, retval=True)
        event.listen(engine, "checkin", _note_idle)
        event.listen(engine, "checkout", partial(_check_idle, engine.dialect))
        return engine
    raise OperatorError(f"ledger.url: {parsed.get_backend_name()!r} is not served; use sqlite or postgresql+psycopg")


def _note_idle(_connection: Any, entry: ConnectionPoolEntry) -> None:
    entry.info["idle_since"] = time.monotonic()


def _check_idle(dialect: sa.Dialect, connection: Any, entry: ConnectionPoolEntry, _proxy: Any) -> None:
    """Replace a connection that died while nobody used it: the server was restarted, or a firewall cut it.

    SQLAlchemy's own check (pool_pre_ping) asks before every transaction, which is a quarter of what a lease costs.
    """
    if time.monotonic() - entry.info.get("idle_since", time.monotonic()) < _IDLE_SECONDS:
        return
    try:
        dialect.do_ping(connection)
    except dialect.loaded_dbapi.Error as error:
        # The pool then makes a new one, and trusts none that is as old as this.
        raise InvalidatePoolError(f"a connection died while it was idle: {error}") from error


def _configure_postgres(connection: Any, _entry: ConnectionPoolEntry) -> None:
    # The driver would send a BEGIN of its own before the first statement: `_begin_postgres` does it instead.
    connection.autocommit = True
    # Ours take milliseconds. One whose process is frozen, or whose machine has gone, would keep its locks for ever.
    connection.execute(f"SET idle_in_transaction_session_timeout = {round(_FROZEN_SECONDS * 1000)}")
    # For disks without a head to move. By its default of 4 a lease by prefixes reads all of `chunks` where a batch is
    # most of it, instead of what is pending.
    connection.execute("SET random_page_cost = 1.1")


def _as_outage(context: sa.ExceptionContext) -> BaseException | None:
    """Let a process that was frozen for too long see an outage, as any other that has lost its connection: the driver
    calls this one an internal error.
    """
    return _outage_of(context.original_exception, context.statement)


def _outage_of(error: BaseException, statement: str | None) -> OperationalError | None:
    if getattr(error, "sqlstate", None) not in _TIMED_OUT:
        return None
    return OperationalError(statement, None, error, connection_invalidated=True)


def _begin_postgres(connection: sa.Connection) -> None:
    """Begin, and learn the server's time, in one round trip: by itself each costs as much as a write.

    Raises SQLAlchemy's exceptions, as its statements do: the connection of a server that went away is given up.
    """
    raw: Any = connection.connection
    dialect = connection.dialect
    try:
        with raw.cursor() as cursor:
            cursor.execute(_BEGIN, prepare=False)  # two commands cannot be prepared as one
            cursor.nextset()
            (connection.info[_BEGAN_AT],) = cursor.fetchone()
    except dialect.loaded_dbapi.Error as error:
        is_gone = dialect.is_disconnect(error, raw, None)
        if is_gone:
            connection.invalidate(error)
        if (outage := _outage_of(error, _BEGIN)) is not None:
            raise outage from error
        of_driver = dialect.loaded_dbapi.Error
        raise DBAPIError.instance(
            _BEGIN, None, error, of_driver, connection_invalidated=is_gone, dialect=dialect
        ) from error


def _configure_sqlite(connection: Any, _entry: ConnectionPoolEntry) -> None:
    # The driver must not begin transactions by itself: `_begin_sqlite` does, with the kind of lock that is needed.
    connection.isolation_level = None
    # NORMAL survives the kill of any process; a power cut may take the last commits. FULL starves workers of the lock.
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", f"busy_timeout={_BUSY_SECONDS * 1000}"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: sa.Connection) -> None:
    # IMMEDIATE: a read that turns into a write half-way would fail at once where another one writes.
    read_only = connection.get_execution_options().get("read_only", False)
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")
