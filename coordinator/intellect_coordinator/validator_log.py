"""What a validator has judged and which receipts it was shown: its memory when it is asked to sign a root.

SQLite beside the validator's key. A verdict is written here before it is sent, so that no root can leave it
out unnoticed after a crash.
"""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

import msgspec

from intellect_protocol.errors import ConfigError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS judged (
    version INTEGER NOT NULL, node TEXT NOT NULL, unit_index INTEGER NOT NULL, file_hash BLOB NOT NULL,
    attempt INTEGER NOT NULL, outcome TEXT NOT NULL,
    PRIMARY KEY (version, node, unit_index, file_hash, attempt)
) STRICT;
CREATE TABLE IF NOT EXISTS receipts (
    version INTEGER NOT NULL, node TEXT NOT NULL, unit_index INTEGER NOT NULL, file_hash BLOB NOT NULL,
    PRIMARY KEY (version, node, unit_index, file_hash)
) STRICT;
"""
MAX_RECEIPTS_PER_NODE = 256  # per version


class JudgedUnit(msgspec.Struct, frozen=True):
    """One verdict of ours."""

    version: int
    node: str
    index: int
    file_hash: bytes
    attempt: int
    outcome: str


class ShownReceipt(msgspec.Struct, frozen=True):
    """A receipt that somebody showed us."""

    version: int
    node: str
    index: int
    file_hash: bytes


class ValidatorLog:
    """Methods block briefly: call them in threads."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ConfigError: the file cannot be opened or is not a validator's log.
        """
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=30)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise ConfigError(f"{path}: {error}") from error

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def add_verdict(self, unit: JudgedUnit) -> None:
        """Remember a verdict; on disk when this returns."""
        with self._lock:
            self._db.execute(
                "INSERT OR REPLACE INTO judged VALUES (?, ?, ?, ?, ?, ?)", msgspec.structs.astuple(unit)
            )

    def add_receipt(self, receipt: ShownReceipt) -> bool:
        """Remember a receipt; False if its node has shown too many for the version."""
        with self._lock:
            (count,) = self._db.execute(
                "SELECT COUNT(*) FROM receipts WHERE version = ? AND node = ?",
                (receipt.version, receipt.node),
            ).fetchone()
            if count >= MAX_RECEIPTS_PER_NODE:
                return False
            self._db.execute(
                "INSERT OR IGNORE INTO receipts VALUES (?, ?, ?, ?)", msgspec.structs.astuple(receipt)
            )
            return True

    def verdicts(self, version: int) -> list[JudgedUnit]:
        """Our verdicts on a version."""
        return [JudgedUnit(*row) for row in self._select("judged", version)]

    def receipts(self, version: int) -> list[ShownReceipt]:
        """Receipts of a version that we were shown."""
        return [ShownReceipt(*row) for row in self._select("receipts", version)]

    def _select(self, table: str, version: int) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(f"SELECT * FROM {table} WHERE version = ?", (version,)).fetchall()
