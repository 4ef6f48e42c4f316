"""What the development chain keeps: one SQLite file, one SQLite transaction per block.

It holds the node database of the EVM (state tries, headers) as keys and values, and an index of blocks,
transactions, receipts and logs as JSON-RPC answers them. A block is either there with all of it or not at
all, and is on disk before its transaction is acknowledged. After `kill -9` the chain goes on from its last
block, with the same hashes: nothing is executed again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eth.db.atomic import AtomicDBWriteBatch
from eth.db.backends.base import BaseAtomicDB

from intellect_protocol.errors import ConfigError

_FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS nodes (key BLOB PRIMARY KEY, value BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS blocks (
    number INTEGER PRIMARY KEY, hash TEXT NOT NULL UNIQUE, block TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS transactions (
    hash TEXT PRIMARY KEY, number INTEGER NOT NULL, body TEXT NOT NULL, receipt TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS logs (
    number INTEGER NOT NULL, position INTEGER NOT NULL, address TEXT NOT NULL,
    topic0 TEXT, topic1 TEXT, topic2 TEXT, topic3 TEXT, log TEXT NOT NULL,
    PRIMARY KEY (number, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS logs_by_address ON logs (address, number);
"""


class ChainStore(BaseAtomicDB):  # type: ignore[misc]
    """Used by one thread. Writes collect in memory until `commit`; `rollback` forgets them."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ConfigError: the file cannot be opened or is of another format.
        """
        self._written: dict[bytes, bytes | None] = {}
        self._rows: list[tuple[str, tuple[Any, ...]]] = []
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA cache_size = -65536")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise ConfigError(f"{path}: {error}") from error
        if self.meta("format", str(_FORMAT)) != str(_FORMAT):
            raise ConfigError(f"{path}: a development chain of another format; start in a new directory")

    def close(self) -> None:
        self._db.close()

    # The node database, as py-evm wants it

    def __getitem__(self, key: bytes) -> bytes:
        if key in self._written:
            value = self._written[key]
        else:
            row = self._db.execute("SELECT value FROM nodes WHERE key = ?", (key,)).fetchone()
            value = None if row is None else bytes(row[0])
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self._written[key] = value

    def __delitem__(self, key: bytes) -> None:
        self._written[key] = None

    def _exists(self, key: bytes) -> bool:
        try:
            self[key]
        except KeyError:
            return False
        return True

    @contextmanager
    def atomic_batch(self) -> Iterator[Any]:
        with AtomicDBWriteBatch._commit_unless_raises(self) as batch:
            yield batch

    # Blocks

    def commit(self) -> None:
        """Make everything written since the last commit durable, at once."""
        nodes = self._written.items()
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany(
                "INSERT OR REPLACE INTO nodes VALUES (?, ?)", [item for item in nodes if item[1] is not None]
            )
            self._db.executemany(
                "DELETE FROM nodes WHERE key = ?", [(key,) for key, value in nodes if value is None]
            )
            for statement, values in self._rows:
                self._db.execute(statement, values)
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        finally:
            self.rollback()

    def rollback(self) -> None:
        """Forget what was written since the last commit."""
        self._written.clear()
        self._rows.clear()

    def add_block(
        self, block: dict[str, Any], transactions: list[tuple[dict[str, Any], dict[str, Any]]]
    ) -> None:
        """Index a block with its (transaction, receipt) pairs; kept with the next commit."""
        number = int(block["number"], 16)
        self._rows.append(("INSERT INTO blocks VALUES (?, ?, ?)", (number, block["hash"], json.dumps(block))))
        for body, receipt in transactions:
            self._rows.append(
                (
                    "INSERT INTO transactions VALUES (?, ?, ?, ?)",
                    (body["hash"], number, json.dumps(body), json.dumps(receipt)),
                )
            )
            for log in receipt["logs"]:
                topics = (log["topics"] + [None] * 4)[:4]
                self._rows.append(
                    (
                        "INSERT INTO logs VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                        (number, int(log["logIndex"], 16), log["address"], *topics, json.dumps(log)),
                    )
                )

    def set_meta(self, key: str, value: str) -> None:
        """Keep a setting with the next commit."""
        self._rows.append(("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value)))

    def meta(self, key: str, default: str) -> str:
        """A committed setting."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return default if row is None else str(row[0])

    def is_empty(self) -> bool:
        """Whether there is no block yet."""
        return self._db.execute("SELECT 1 FROM blocks LIMIT 1").fetchone() is None

    def block(self, number: int) -> dict[str, Any] | None:
        return self._json("SELECT block FROM blocks WHERE number = ?", number)

    def block_by_hash(self, hash_: str) -> dict[str, Any] | None:
        return self._json("SELECT block FROM blocks WHERE hash = ?", hash_)

    def transaction(self, hash_: str) -> dict[str, Any] | None:
        return self._json("SELECT body FROM transactions WHERE hash = ?", hash_)

    def receipt(self, hash_: str) -> dict[str, Any] | None:
        return self._json("SELECT receipt FROM transactions WHERE hash = ?", hash_)

    def logs(
        self, first: int, last: int, addresses: list[str], topics: list[list[str]], limit: int
    ) -> list[dict[str, Any]]:
        """Logs of blocks `first` to `last`; of one of `addresses` if any are given; whose topic i is in
        `topics[i]` where that is not empty. At most `limit`."""
        conditions, values = ["number BETWEEN ? AND ?"], [first, last]
        choices = [("address", addresses), *((f"topic{i}", topic) for i, topic in enumerate(topics[:4]))]
        bound: list[Any] = list(values)
        for column, allowed in choices:
            if allowed:
                conditions.append(f"{column} IN ({','.join('?' * len(allowed))})")
                bound += allowed
        rows = self._db.execute(
            f"SELECT log FROM logs WHERE {' AND '.join(conditions)} ORDER BY number, position LIMIT ?",
            (*bound, limit),
        )
        return [json.loads(row[0]) for row in rows]

    def _json(self, query: str, value: Any) -> dict[str, Any] | None:
        row = self._db.execute(query, (value,)).fetchone()
        if row is None:
            return None
        found: dict[str, Any] = json.loads(row[0])
        return found
