"""A node's signed history and its outbox, in one SQLite file.

The problem: a unit of work may be answered once. Two signed files for one (version, index) are
equivocation, and a node that is killed at any moment must neither sign a second answer after the
restart nor lose one that it signed. Writing "signed" after sending, or signing in memory and storing
later, fails when the process dies in between.

The way taken: the file is on disk (fsync of file and folder) before its hash is signed; the signature
leaves this module only after the transaction that records it is committed (WAL, synchronous=FULL);
(version, index) is the primary key of the signed history, and triggers forbid to change or delete its
rows. A crash before the commit leaves a file that nothing refers to: it is removed at the next start and
the unit is generated again. A crash after it leaves a signed unit that is sent until it is receipted.

    (building) -- file durable, row committed --> signed
    signed     -- verified receipt ------------> received --> queued --> accepted | rejected
                                                                 └-----> inconclusive --> (judged again)
    signed     -- refused for good ------------> refused
    signed     -- no answer, or "later" -------> signed (tried again, with back-off)

Two rows of one unit are impossible within one database. Two copies of a data directory that run at once
are not seen here: the coordinator's "next index" and the lock on the directory are the guards there.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from intellect_protocol.errors import HistoryError, PreflightError
from intellect_protocol.keys import Signer, work_digest
from intellect_protocol.messages import GetVerdictsResult, Receipt, SubmissionState
from intellect_protocol.wire import encode, sha256

from .entries import (
    REFUSED,
    SCHEMA,
    SELECT_ENTRY,
    SIGNED,
    TABLES,
    Entry,
    Kind,
    entry_of,
    statements,
)
from .unit_files import UnitFiles

_LOCK_TIMEOUT_S = 10.0


class History:
    """The database and the folder of rollout files. Thread-safe; every call blocks on the disk."""

    def __init__(self, data_dir: Path, run_id: bytes, node: str) -> None:
        """
        Args:
            node: address of the node key whose history this is.

        Raises:
            HistoryError: the history belongs to another node key or run, or is damaged.
            PreflightError: it cannot be opened.
        """
        self._lock = threading.Lock()
        path = data_dir / "history.db"
        try:
            self._files = UnitFiles(data_dir / "outbox")
            self._db = _connect(path)
        except (OSError, sqlite3.Error) as error:
            raise PreflightError(f"{path}: {error}") from error
        try:
            self._open(path, run_id, node)
        except sqlite3.Error as error:
            self._db.close()
            raise HistoryError(f"{path}: damaged: {error}") from error
        except BaseException:
            self._db.close()
            raise

    def _open(self, path: Path, run_id: bytes, node: str) -> None:
        with self._transaction() as db:
            found: int = db.execute("PRAGMA user_version").fetchone()[0]
            if found == 0:
                for statement in statements(TABLES):
                    db.execute(statement)
                db.executemany(
                    "INSERT INTO meta VALUES (?, ?)",
                    [("run", run_id), ("node", node.encode()), ("cursor", 0)],
                )
                db.execute(f"PRAGMA user_version = {SCHEMA}")
            elif found != SCHEMA:
                raise HistoryError(f"{path}: written by another version of this program (schema {found})")
            meta = dict(db.execute("SELECT key, value FROM meta"))
        if meta.get("node") != node.encode() or meta.get("run") != run_id:
            raise HistoryError(
                f"{path}: the signed history of another node key or run; choose another --data-dir"
            )

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()

    # Signing

    def next_index(self, version: int) -> int:
        """The lowest unit index of a version above all that were signed."""
        with self._reading() as db:
            row = db.execute("SELECT max(idx) FROM signed WHERE version = ?", (version,)).fetchone()
        return 0 if row[0] is None else int(row[0]) + 1

    def sign_work(
        self,
        signer: Signer,
        run_id: bytes,
        version: int,
        checkpoint_hash: bytes,
        index: int,
        content: bytes,
        now_ms: int,
        *,
        before_commit: Callable[[], None] = lambda: None,
    ) -> Entry:
        """Make a rollout file durable, sign it and record the signature, in this order.

        Args:
            content: the rollout file.
            before_commit: called when all is written but nothing committed (for crash tests).

        Raises:
            HistoryError: something else was signed for this unit.
            PreflightError: the disk refuses.
        """
        file_hash = sha256(content)
        known = self.entry(version, index)
        if known is not None:
            return _same_answer(known, file_hash)
        self._files.write(version, index, file_hash, content)
        digest = work_digest(run_id, version, checkpoint_hash, index, file_hash, len(content))
        row = (
            version,
            index,
            Kind.WORK,
            checkpoint_hash,
            file_hash,
            len(content),
            signer.sign_digest(digest),
        )
        self._record((*row, now_ms), before_commit)
        return self._existing(version, index)

    def sign_abandon(self, version: int, index: int, now_ms: int) -> Entry:
        """Record that there will be no work for a unit.

        Raises:
            HistoryError: work was signed for this unit.
        """
        known = self.entry(version, index)
        if known is not None:
            return _same_answer(known, b"")
        self._record((version, index, Kind.ABANDON, b"", b"", 0, b"", now_ms), lambda: None)
        return self._existing(version, index)

    def _record(self, row: tuple[object, ...], before_commit: Callable[[], None]) -> None:
        try:
            with self._transaction() as db:
                db.execute("INSERT INTO signed VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
                db.execute("INSERT INTO delivery (version, idx, state) VALUES (?, ?, ?)", (*row[:2], SIGNED))
                before_commit()
        except sqlite3.IntegrityError as error:
            raise HistoryError(f"unit {row[0]}/{row[1]} was already answered") from error

    # Delivery

    def due(self, now_ms: int) -> tuple[list[Entry], int | None]:
        """Units to send now, in order, and the time of the next one (None: nothing waits).

        The indices of a version are sent in order: those behind a unit that must wait do so as well.
        """
        with self._reading() as db:
            rows = db.execute(
                f"{SELECT_ENTRY} WHERE d.state = ? ORDER BY s.version, s.idx", (SIGNED,)
            ).fetchall()
        ready, waiting = [], {}
        for entry in map(entry_of, rows):
            if entry.version in waiting:
                continue
            if entry.retry_at_ms > now_ms:
                waiting[entry.version] = entry.retry_at_ms
            else:
                ready.append(entry)
        return ready, min(waiting.values(), default=None)

    def mark_precommitted(self, entry: Entry, deadline_ms: int) -> None:
        """The coordinator holds the unit's deadline until then."""
        self._update(entry, "precommit_until_ms = ?", deadline_ms)

    def mark_received(self, entry: Entry, receipt: Receipt | None, now_ms: int) -> None:
        """The coordinator has the unit; `receipt` (checked by the caller) is None for an abandoned one."""
        proof = b"" if receipt is None else encode(receipt)
        at_ms = now_ms if receipt is None else receipt.received_at_ms
        # A verdict may have come first (over the other service); it is the later state of the two.
        change = (
            "receipt = ?, received_at_ms = ?, error = '', "
            "code = CASE state WHEN ? THEN '' ELSE code END, state = CASE state WHEN ? THEN ? ELSE state END"
        )
        self._update(entry, change, proof, at_ms, SIGNED, SIGNED, SubmissionState.RECEIVED)

    def mark_failed(self, entry: Entry, error: str, retry_at_ms: int) -> None:
        """A delivery failed and is to be tried again."""
        self._update(entry, "attempts = attempts + 1, error = ?, retry_at_ms = ?", error, retry_at_ms)

    def mark_refused(self, entry: Entry, code: str, text: str) -> None:
        """The unit will never be taken."""
        change = (
            "state = CASE state WHEN ? THEN ? ELSE state END, attempts = attempts + 1, code = ?, error = ?"
        )
        self._update(entry, change, SIGNED, REFUSED, code, text)

    def _update(self, entry: Entry, change: str, *values: object) -> None:
        with self._transaction() as db:
            where = (entry.version, entry.index)
            db.execute(f"UPDATE delivery SET {change} WHERE version = ? AND idx = ?", (*values, *where))

    # Verdicts

    @property
    def cursor(self) -> int:
        """Where `GetVerdicts` goes on."""
        with self._reading() as db:
            return int(db.execute("SELECT value FROM meta WHERE key = 'cursor'").fetchone()[0])

    def apply_verdicts(self, result: GetVerdictsResult) -> list[Entry]:
        """Take over the coordinator's word and its cursor, at once.

        Returns:
            The units whose state changed. Units that this node never signed are ignored.
        """
        changed = []
        with self._transaction() as db:
            for status in result.entries:
                key = (status.version, status.index)
                row = db.execute(f"{SELECT_ENTRY} WHERE s.version = ? AND s.idx = ?", key).fetchone()
                if row is None or entry_of(row).file_hash != status.file_hash:
                    continue
                code = next((finding.code for finding in status.findings if finding.kind != "note"), "")
                db.execute(
                    "UPDATE delivery SET state = ?, code = ?, status = ? WHERE version = ? AND idx = ?",
                    (status.state, code, encode(status), *key),
                )
                if row[8] != status.state:
                    changed.append(key)
            db.execute("UPDATE meta SET value = ? WHERE key = 'cursor'", (result.cursor,))
        return [self._existing(*key) for key in changed]

    # Reading

    def entry(self, version: int, index: int) -> Entry | None:
        """One unit, or None if nothing was signed for it."""
        with self._reading() as db:
            row = db.execute(f"{SELECT_ENTRY} WHERE s.version = ? AND s.idx = ?", (version, index)).fetchone()
        return None if row is None else entry_of(row)

    def _existing(self, version: int, index: int) -> Entry:
        entry = self.entry(version, index)
        if entry is None:
            raise HistoryError(f"unit {version}/{index} is not in the signed history")
        return entry

    def entries(self, *, version: int | None = None, newest: int = 1000) -> list[Entry]:
        """Units, newest first."""
        where = "" if version is None else "WHERE s.version = ?"
        with self._reading() as db:
            rows = db.execute(
                f"{SELECT_ENTRY} {where} ORDER BY s.version DESC, s.idx DESC LIMIT ?",
                (newest,) if version is None else (version, newest),
            ).fetchall()
        return [entry_of(row) for row in rows]

    def counts(self, version: int | None = None) -> dict[str, int]:
        """Number of units with work by state, of one version or of all."""
        where = "" if version is None else "AND d.version = ?"
        with self._reading() as db:
            rows = db.execute(
                "SELECT d.state, count(*) FROM delivery d JOIN signed s ON s.version = d.version AND s.idx = "
                f"d.idx WHERE s.kind = 'work' {where} GROUP BY d.state",
                () if version is None else (version,),
            )
            return dict(rows.fetchall())

    def refusals(self) -> dict[str, int]:
        """Number of refused and rejected units by reason code."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT code, count(*) FROM delivery WHERE state IN (?, ?) GROUP BY code",
                (REFUSED, SubmissionState.REJECTED),
            )
            return dict(rows.fetchall())

    def last_credited_version(self) -> int | None:
        """Newest version of which a unit was accepted, or None."""
        with self._reading() as db:
            query = "SELECT max(version) FROM delivery WHERE state = ?"
            found: int | None = db.execute(query, (SubmissionState.ACCEPTED,)).fetchone()[0]
        return found

    # Files

    def path_of(self, entry: Entry) -> Path:
        """Where a unit's rollout file is, if it is kept."""
        return self._files.path(entry.version, entry.index, entry.file_hash)

    def content(self, entry: Entry) -> bytes:
        """The rollout file of a signed unit.

        Raises:
            HistoryError: it is gone or changed.
        """
        return self._files.read(entry.version, entry.index, entry.file_hash)

    def prune(self, keep_from_version: int) -> None:
        """Delete files of accepted units older than a version; refused ones are kept as evidence."""
        with self._reading() as db:
            rows = db.execute(
                f"{SELECT_ENTRY} WHERE d.state = ? AND s.version < ?",
                (SubmissionState.ACCEPTED, keep_from_version),
            ).fetchall()
        for entry in map(entry_of, rows):
            self.path_of(entry).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove files that were never signed: their process died first. Only for the lock's holder."""
        with self._reading() as db:
            rows = db.execute("SELECT version, idx, file_hash FROM signed").fetchall()
        self._files.keep_only(rows)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """One consistent view, without keeping writers of other processes out."""
        with self._lock:
            self._db.execute("BEGIN")
            try:
                yield self._db
            finally:
                self._db.execute("ROLLBACK")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise


def _connect(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    db = sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")
    except sqlite3.Error:
        db.close()
        raise
    return db


def _same_answer(known: Entry, file_hash: bytes) -> Entry:
    if known.file_hash != file_hash:
        raise HistoryError(
            f"unit {known.version}/{known.index} was already answered with another file; "
            "a second answer would be equivocation"
        )
    return known
