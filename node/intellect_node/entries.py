"""Rows of the signed history: schema, states, and `Entry`, the typed form of one unit."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from intellect_protocol.errors import HistoryError, WireError
from intellect_protocol.messages import WorkStatus
from intellect_protocol.wire import decode

SCHEMA = 1

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE signed (
    version INTEGER NOT NULL, idx INTEGER NOT NULL, kind TEXT NOT NULL CHECK (kind IN ('work', 'abandon')),
    checkpoint_hash BLOB NOT NULL, file_hash BLOB NOT NULL, size_bytes INTEGER NOT NULL,
    signature BLOB NOT NULL, signed_at_ms INTEGER NOT NULL,
    PRIMARY KEY (version, idx)
) WITHOUT ROWID;
CREATE TRIGGER signed_never_changes BEFORE UPDATE ON signed
    BEGIN SELECT RAISE(ABORT, 'the signed history never changes'); END;
CREATE TRIGGER signed_never_shrinks BEFORE DELETE ON signed
    BEGIN SELECT RAISE(ABORT, 'the signed history never shrinks'); END;
CREATE TABLE delivery (
    version INTEGER NOT NULL, idx INTEGER NOT NULL, state TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0,
    retry_at_ms INTEGER NOT NULL DEFAULT 0, precommit_until_ms INTEGER NOT NULL DEFAULT 0,
    received_at_ms INTEGER, receipt BLOB, code TEXT NOT NULL DEFAULT '', error TEXT NOT NULL DEFAULT '',
    status BLOB, PRIMARY KEY (version, idx), FOREIGN KEY (version, idx) REFERENCES signed (version, idx)
) WITHOUT ROWID;
CREATE INDEX delivery_by_state ON delivery (state, version, idx);
"""


class Kind(StrEnum):
    """What was signed for a unit: its work, or that there will be none."""

    WORK = "work"
    ABANDON = "abandon"


SIGNED = "signed"  # not receipted yet
REFUSED = "refused"  # the coordinator does not take it, ever


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One signed unit and where it stands; times in Unix ms."""

    version: int
    index: int
    kind: Kind
    checkpoint_hash: bytes
    file_hash: bytes
    size_bytes: int
    signature: bytes  # node key over `keys.work_digest`; empty for an abandoned unit
    signed_at_ms: int
    state: str  # SIGNED, REFUSED or a `SubmissionState`
    attempts: int
    retry_at_ms: int
    precommit_until_ms: int
    received_at_ms: int | None
    code: str  # reason code of the last refusal or the first finding
    error: str  # last failure in words
    status: WorkStatus | None


SELECT_ENTRY = """SELECT s.version, s.idx, s.kind, s.checkpoint_hash, s.file_hash, s.size_bytes, s.signature,
    s.signed_at_ms, d.state, d.attempts, d.retry_at_ms, d.precommit_until_ms, d.received_at_ms, d.code,
    d.error, d.status FROM signed s JOIN delivery d ON d.version = s.version AND d.idx = s.idx"""


def statements(script: str) -> Iterator[str]:
    """Statements of a script; `executescript` would commit the transaction it is called in."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def entry_of(row: tuple[object, ...]) -> Entry:
    """The typed form of a row of `SELECT_ENTRY`.

    Raises:
        HistoryError: the row is damaged.
    """
    *plain, status = row
    names = [name for name in Entry.__struct_fields__ if name != "status"]
    try:
        decoded = None if status is None else decode(status, WorkStatus)  # type: ignore[arg-type]
        return msgspec.convert({**dict(zip(names, plain, strict=True)), "status": decoded}, Entry)
    except (msgspec.ValidationError, WireError) as error:
        raise HistoryError(f"the signed history is damaged: {error}") from error
