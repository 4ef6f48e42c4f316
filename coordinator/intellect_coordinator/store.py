"""The coordinator's database: opened, migrated, and used from trio.

Everything the coordinator answers for is committed here before it is acknowledged. SQLite runs in WAL mode
with `synchronous = FULL`, so that a commit survives the loss of the process and of the machine's power.
Writes are serialised by one lock and run in worker threads; a step is an ordinary function of a connection
and either commits as a whole or leaves nothing behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import trio
from sqlalchemy import Connection, Row, create_engine, event, func, insert, select, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from intellect_protocol.errors import ConfigError

from . import schema

T = TypeVar("T")
Record = Row[Any]
"""A row of one of the tables of `schema`, its columns as attributes."""

_BUSY_TIMEOUT_S = 30.0


class Store:
    """One database."""

    def __init__(self, url: str) -> None:
        """Open and migrate the database at an SQLAlchemy URL (`sqlite:///coordinator.sqlite`, ...).

        Raises:
            ConfigError: the URL is malformed, the database cannot be used or is newer than this program.
        """
        self._writing = threading.Lock()
        try:
            parsed = make_url(url)
            sqlite = parsed.get_backend_name() == "sqlite"
            options: dict[str, Any] = {"connect_args": {"timeout": _BUSY_TIMEOUT_S}} if sqlite else {}
            self._engine = create_engine(parsed, **options)
            if sqlite:
                _prepare_sqlite(self._engine)
            with self.transaction() as connection:
                schema.migrate(connection)
        except (ArgumentError, NoSuchModuleError, ImportError) as error:
            raise ConfigError(f"not a usable database URL: {error}") from error
        except SQLAlchemyError as error:
            raise ConfigError(f"the database cannot be used: {_first_line(error)}") from error

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A write transaction; blocks while another one is open."""
        with self._writing, self._engine.connect() as connection:
            writing = connection.execution_options(intellect_write=True)
            with writing.begin():
                yield writing

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A read transaction: it sees one state of the database."""
        with self._engine.connect() as connection, connection.begin():
            yield connection

    async def write(self, step: Callable[[Connection], T]) -> T:
        """Run `step` in a write transaction in a thread; committed when this returns."""

        def run() -> T:
            with self.transaction() as connection:
                return step(connection)

        return await trio.to_thread.run_sync(run)

    async def read(self, step: Callable[[Connection], T]) -> T:
        """Run `step` in a read transaction in a thread."""

        def run() -> T:
            with self.snapshot() as connection:
                return step(connection)

        return await trio.to_thread.run_sync(run)


def _prepare_sqlite(engine: Any) -> None:
    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        # sqlite3's own transaction control does not cover DDL or BEGIN IMMEDIATE.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        writing = connection.get_execution_options().get("intellect_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def next_change(connection: Connection) -> int:
    """The next number of `submissions.change`; valid inside the write transaction that uses it."""
    return int(connection.scalar(select(func.coalesce(func.max(schema.submissions.c.change), 0))) or 0) + 1


def cursor_value(connection: Connection, name: str) -> int | None:
    """How far a follower of something outside has come, or None."""
    return connection.scalar(select(schema.cursors.c.value).where(schema.cursors.c.name == name))


def set_cursor(connection: Connection, name: str, value: int) -> None:
    """Remember how far a follower has come."""
    moved = connection.execute(
        update(schema.cursors).where(schema.cursors.c.name == name).values(value=value)
    )
    if moved.rowcount == 0:
        connection.execute(insert(schema.cursors).values(name=name, value=value))


def add_event(connection: Connection, at_ms: int, text: str) -> None:
    """Write down, in plain words, that something happened."""
    connection.execute(insert(schema.events).values(at_ms=at_ms, text=text[:500]))
