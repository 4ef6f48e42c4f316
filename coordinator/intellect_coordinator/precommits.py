"""Units whose upload is under way: one open promise per unit, with a deadline. Functions of a connection."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, and_, delete, insert, select

from . import schema
from .store import Record
from .submissions import Unit

_TABLE = schema.precommits


def _is(unit: Unit) -> ColumnElement[bool]:
    same = (_TABLE.c.node == unit.node, _TABLE.c.version == unit.version, _TABLE.c.unit_index == unit.index)
    return and_(*same)


def held(connection: Connection, unit: Unit, now_ms: int) -> Record | None:
    """The promise of a unit whose deadline has not passed, or None."""
    return connection.execute(select(_TABLE).where(_is(unit), _TABLE.c.deadline_ms >= now_ms)).one_or_none()


def hold(connection: Connection, unit: Unit, file_hash: bytes, size_bytes: int, deadline_ms: int) -> None:
    """Promise a unit to one file until a deadline, in place of a promise that ran out."""
    connection.execute(delete(_TABLE).where(_is(unit)))
    connection.execute(
        insert(_TABLE).values(
            node=unit.node,
            version=unit.version,
            unit_index=unit.index,
            file_hash=file_hash,
            size_bytes=size_bytes,
            deadline_ms=deadline_ms,
        )
    )
