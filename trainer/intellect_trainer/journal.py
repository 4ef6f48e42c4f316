"""The trainer's journal: which groups went into which step, written before the step trains on them.

A step's plan (what it trains on, what it filters out, what has expired) is committed to SQLite first and
carried out afterwards. After a crash the plan is found and carried out again, so every group is used
exactly once per run and a repeated step is the same step. Groups are named by unit and prompt, so a file
that is written again for a unit already used changes nothing.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from intellect_protocol.errors import PreflightError
from intellect_protocol.messages import TrainingState

_SCHEMA = """
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS units (
    version INTEGER, node BLOB, unit_index INTEGER, file_hash BLOB NOT NULL, group_count INTEGER NOT NULL,
    PRIMARY KEY (version, node, unit_index)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    version INTEGER, node BLOB, unit_index INTEGER, prompt INTEGER,
    step INTEGER NOT NULL, position INTEGER NOT NULL, outcome TEXT NOT NULL,
    environment TEXT NOT NULL, rows INTEGER NOT NULL, reward_sum REAL NOT NULL,
    PRIMARY KEY (version, node, unit_index, prompt)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS groups_by_step ON groups (step, position);
CREATE TABLE IF NOT EXISTS set_aside (path TEXT PRIMARY KEY, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoints (version INTEGER PRIMARY KEY, checkpoint_hash BLOB NOT NULL);
"""


class UnitKey(NamedTuple):
    """One unit of work: policy version, node (20 address bytes) and the node's index in that version."""

    version: int
    node: bytes
    unit_index: int


class Settled(msgspec.Struct, frozen=True):
    """What a step decides about one group."""

    unit: UnitKey
    prompt: int
    file_hash: bytes
    unit_groups: int  # groups in the unit
    outcome: TrainingState  # TRAINED, FILTERED or EXPIRED
    environment: str
    rows: int
    reward_sum: float  # of task rewards


class Journal:
    """The journal in one SQLite file; every write is durable when the call returns.

    Raises:
        PreflightError: the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Training and publication call from different worker threads; the lock keeps one's writes out
            # of the other's transaction.
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._lock = threading.Lock()
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise PreflightError(f"{path}: {error}") from error

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def record_plan(self, step: int, settled: Sequence[Settled]) -> None:
        """Commit the plan of the step that produces version `step`, in the order of `settled`."""
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("INSERT INTO steps VALUES (?)", (step,))
            self._db.executemany(
                "INSERT OR IGNORE INTO units VALUES (?, ?, ?, ?, ?)",
                [(*entry.unit, entry.file_hash, entry.unit_groups) for entry in settled],
            )
            self._db.executemany(
                "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [_group_row(step, position, entry) for position, entry in enumerate(settled)],
            )

    def plan(self, step: int) -> list[Settled] | None:
        """The plan of a step, or None if none was committed."""
        if not self._rows("SELECT 1 FROM steps WHERE step = ?", (step,)):
            return None
        found = self._rows(
            "SELECT version, node, unit_index, prompt, file_hash, group_count, outcome, environment, rows, "
            "reward_sum FROM groups JOIN units USING (version, node, unit_index) "
            "WHERE step = ? ORDER BY position",
            (step,),
        )
        return [
            Settled(UnitKey(*row[:3]), row[3], row[4], row[5], TrainingState(row[6]), *row[7:])
            for row in found
        ]

    def settled_prompts(self, unit: UnitKey) -> frozenset[int]:
        """Prompts of a unit that some step has settled."""
        found = self._rows(
            "SELECT prompt FROM groups WHERE version = ? AND node = ? AND unit_index = ?", unit
        )
        return frozenset(prompt for (prompt,) in found)

    def is_settled(self, unit: UnitKey) -> bool:
        """Whether every group of a unit is settled."""
        found = self._unit(unit)
        return found is not None and len(self.settled_prompts(unit)) >= found[1]

    def file_hash(self, unit: UnitKey) -> bytes | None:
        """Hash of the file from which groups of a unit were settled, or None."""
        found = self._unit(unit)
        return None if found is None else found[0]

    def _unit(self, unit: UnitKey) -> tuple[bytes, int] | None:
        found = self._rows(
            "SELECT file_hash, group_count FROM units WHERE version = ? AND node = ? AND unit_index = ?", unit
        )
        return (bytes(found[0][0]), int(found[0][1])) if found else None

    def _rows(self, statement: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(statement, values).fetchall()

    def outcomes(self, step: int) -> dict[bytes, TrainingState]:
        """Units whose fate was decided at `step`, by the hash of their batch file.

        A unit is trained at the step that first trains on one of its groups. Without such a step it is
        decided when its last group is settled: filtered if all groups were, else expired.
        """
        found = self._rows(
            "SELECT file_hash, group_count, count(*), min(CASE WHEN outcome = 'trained' THEN step END), "
            "max(step), sum(outcome = 'filtered') FROM groups JOIN units USING (version, node, unit_index) "
            "WHERE (version, node, unit_index) IN "
            "(SELECT version, node, unit_index FROM groups WHERE step = ?) "
            "GROUP BY version, node, unit_index",
            (step,),
        )
        outcomes = {}
        for file_hash, group_count, settled, trained_at, last_step, filtered in found:
            if trained_at == step:
                outcomes[file_hash] = TrainingState.TRAINED
            elif trained_at is None and settled >= group_count and last_step == step:
                outcomes[file_hash] = TrainingState.FILTERED if filtered == settled else TrainingState.EXPIRED
        return outcomes

    def set_aside(self, path: str, reason: str) -> None:
        """Never read this file again; `reason` says why."""
        self._rows("INSERT OR REPLACE INTO set_aside VALUES (?, ?)", (path, reason))

    def set_aside_reason(self, path: str) -> str | None:
        """Why a file was set aside, or None."""
        found = self._rows("SELECT reason FROM set_aside WHERE path = ?", (path,))
        return str(found[0][0]) if found else None

    def record_checkpoint(self, version: int, checkpoint_hash: bytes) -> None:
        """Remember C of a version that is about to be published; a restarted publication replaces it."""
        self._rows("INSERT OR REPLACE INTO checkpoints VALUES (?, ?)", (version, checkpoint_hash))

    def checkpoint(self, version: int) -> bytes | None:
        """C of a published version, or None."""
        found = self._rows("SELECT checkpoint_hash FROM checkpoints WHERE version = ?", (version,))
        return bytes(found[0][0]) if found else None


def _group_row(step: int, position: int, entry: Settled) -> tuple[object, ...]:
    decided = (entry.outcome.value, entry.environment, entry.rows, entry.reward_sum)
    return (*entry.unit, entry.prompt, step, position, *decided)
