"""The transactions a program has signed, kept until they are mined: SQLite, synced before anything is sent.

Rows are scoped by the genesis hash of the chain, so that a development chain made anew never receives what
was meant for the one before.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from enum import StrEnum
from pathlib import Path

import msgspec

from ..errors import ConfigError


class TransactionState(StrEnum):
    """`PENDING` until the chain shows a receipt; `LOST` if another transaction took its nonce."""

    PENDING = "pending"
    MINED = "mined"
    REVERTED = "reverted"
    LOST = "lost"


class SignedTransaction(msgspec.Struct, frozen=True):
    """A row of the journal. `raw` is the signed transaction, `intent` the caller's name for what it does."""

    hash: bytes
    sender: str
    nonce: int
    raw: bytes
    intent: str | None
    state: TransactionState = TransactionState.PENDING
    block_number: int | None = None
    gas_used: int | None = None
    contract: str | None = None


_COLUMNS = "hash, sender, nonce, raw, intent, state, block_number, gas_used, contract"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS transactions (
    id INTEGER PRIMARY KEY,
    genesis BLOB NOT NULL,
    hash BLOB NOT NULL,
    sender TEXT NOT NULL,
    nonce INTEGER NOT NULL,
    raw BLOB NOT NULL,
    intent TEXT,
    state TEXT NOT NULL,
    block_number INTEGER,
    gas_used INTEGER,
    contract TEXT,
    signed_at REAL NOT NULL,
    UNIQUE (genesis, hash)
) STRICT;
CREATE UNIQUE INDEX IF NOT EXISTS one_per_nonce ON transactions (genesis, sender, nonce)
    WHERE state != 'lost';
CREATE INDEX IF NOT EXISTS by_intent ON transactions (genesis, sender, intent);
CREATE INDEX IF NOT EXISTS by_state ON transactions (genesis, state);
"""


class TransactionJournal:
    """Safe for several threads, and for several processes if each key is used by one at a time."""

    def __init__(self, path: Path, genesis: bytes) -> None:
        """
        Raises:
            ConfigError: the file cannot be opened or is not a journal.
        """
        self._genesis = genesis
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=30)
            path.chmod(0o600)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"{path}: {error}") from error

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def add(self, transaction: SignedTransaction) -> None:
        """Keep a signed transaction; on disk when this returns.

        Raises:
            sqlite3.IntegrityError: its nonce is taken by another that is not lost.
        """
        with self._lock:
            self._db.execute(
                f"INSERT INTO transactions (genesis, {_COLUMNS}, signed_at) VALUES (?,?,?,?,?,?,?,?,?,?,?)",
                (
                    self._genesis,
                    transaction.hash,
                    transaction.sender,
                    transaction.nonce,
                    transaction.raw,
                    transaction.intent,
                    transaction.state,
                    transaction.block_number,
                    transaction.gas_used,
                    transaction.contract,
                    time.time(),
                ),
            )

    def resolve(
        self,
        hash_: bytes,
        state: TransactionState,
        block_number: int | None = None,
        gas_used: int | None = None,
        contract: str | None = None,
    ) -> None:
        """Write down how a transaction ended."""
        with self._lock:
            self._db.execute(
                "UPDATE transactions SET state = ?, block_number = ?, gas_used = ?, contract = ?"
                " WHERE genesis = ? AND hash = ?",
                (state, block_number, gas_used, contract, self._genesis, hash_),
            )

    def pending(self, sender: str | None = None) -> list[SignedTransaction]:
        """What is not known to have ended, ascending by nonce."""
        condition, values = ("", ()) if sender is None else (" AND sender = ?", (sender,))
        return self._select(f"state = 'pending'{condition} ORDER BY sender, nonce", *values)

    def latest(self, sender: str, intent: str) -> SignedTransaction | None:
        """The newest transaction of an intent."""
        rows = self._select("sender = ? AND intent = ? ORDER BY id DESC LIMIT 1", sender, intent)
        return rows[0] if rows else None

    def _select(self, condition: str, *values: object) -> list[SignedTransaction]:
        with self._lock:
            rows = self._db.execute(
                f"SELECT {_COLUMNS} FROM transactions WHERE genesis = ? AND {condition}",
                (self._genesis, *values),
            ).fetchall()
        names = _COLUMNS.split(", ")
        return [msgspec.convert(dict(zip(names, row, strict=True)), SignedTransaction) for row in rows]
