"""Rows of the submission table: what one unit of work went through.

    (Submit) -> received -> queued -> accepted | rejected | inconclusive      SubmissionState
                                      accepted -> batched -> trained | filtered | expired   TrainingState

Functions of a connection; those that write run inside one write transaction of the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, func, insert, select, update

from intellect_protocol.messages import FindingNote, SubmissionState, TrainingState, WorkStatus

from . import schema
from .store import Record, next_change

PENDING = (SubmissionState.RECEIVED, SubmissionState.QUEUED)
_SUBMISSIONS = schema.submissions
_MAX_TEXT = 300


class Unit(msgspec.Struct, frozen=True):
    """Which unit of work: node key (20 bytes), version and index."""

    node: bytes
    version: int
    index: int


class NewSubmission(msgspec.Struct, frozen=True):
    """A submission that passed the door; its file is on disk already."""

    unit: Unit
    owner: str
    checkpoint_hash: bytes
    block_hash: bytes
    file_hash: bytes
    size_bytes: int
    work_signature: bytes


def add(
    connection: Connection,
    new: NewSubmission,
    received_at_ms: int,
    receipt_signature: bytes,
    *,
    audit: bool = True,
) -> int:
    """Write down a submission as `queued` for judgement; returns its id.

    Args:
        audit: whether it was drawn for the forward pass.
    """
    result = connection.execute(
        insert(_SUBMISSIONS).values(
            node=new.unit.node,
            owner=new.owner,
            version=new.unit.version,
            unit_index=new.unit.index,
            checkpoint_hash=new.checkpoint_hash,
            block_hash=new.block_hash,
            file_hash=new.file_hash,
            size_bytes=new.size_bytes,
            work_signature=new.work_signature,
            receipt_signature=receipt_signature,
            state=SubmissionState.QUEUED,
            training=TrainingState.NONE,
            attempts=0,
            fraud=False,
            audit=audit,
            code="",
            rows=0,
            tokens=0,
            received_at_ms=received_at_ms,
            queued_at_ms=received_at_ms,
            change=next_change(connection),
        )
    )
    assert result.inserted_primary_key is not None
    return int(result.inserted_primary_key[0])


def find(connection: Connection, unit: Unit) -> Record | None:
    """The submission of a unit, or None."""
    return connection.execute(
        select(_SUBMISSIONS).where(
            _SUBMISSIONS.c.node == unit.node,
            _SUBMISSIONS.c.version == unit.version,
            _SUBMISSIONS.c.unit_index == unit.index,
        )
    ).one_or_none()


def get(connection: Connection, submission_id: int) -> Record | None:
    """A submission by id, or None."""
    return connection.execute(select(_SUBMISSIONS).where(_SUBMISSIONS.c.id == submission_id)).one_or_none()


def next_index(connection: Connection, node: bytes, version: int) -> int:
    """The lowest index of a node and version that is neither submitted nor abandoned."""
    submitted = connection.scalar(
        select(func.count()).where(_SUBMISSIONS.c.node == node, _SUBMISSIONS.c.version == version)
    )
    abandons = schema.abandons
    abandoned = connection.scalar(
        select(func.count()).where(abandons.c.node == node, abandons.c.version == version)
    )
    return int(submitted or 0) + int(abandoned or 0)


def units_of_owner(connection: Connection, owner: str, version: int) -> int:
    """Units of a version that all nodes of an owner have used up, abandoned ones included."""
    submitted = connection.scalar(
        select(func.count()).where(_SUBMISSIONS.c.owner == owner, _SUBMISSIONS.c.version == version)
    )
    abandons = schema.abandons
    abandoned = connection.scalar(
        select(func.count()).where(abandons.c.owner == owner, abandons.c.version == version)
    )
    return int(submitted or 0) + int(abandoned or 0)


def pending_count(connection: Connection) -> int:
    """How many submissions wait for a verdict."""
    return int(connection.scalar(select(func.count()).where(_SUBMISSIONS.c.state.in_(PENDING))) or 0)


def conclude(
    connection: Connection,
    submission_id: int,
    state: SubmissionState,
    at_ms: int,
    *,
    fraud: bool = False,
    code: str = "",
    batch_hash: bytes | None = None,
    rows: int = 0,
    tokens: int = 0,
) -> None:
    """Give a submission its final state; an accepted one is `batched` from now on."""
    accepted = state is SubmissionState.ACCEPTED
    connection.execute(
        update(_SUBMISSIONS)
        .where(_SUBMISSIONS.c.id == submission_id)
        .values(
            state=state,
            training=TrainingState.BATCHED if accepted else TrainingState.NONE,
            judged_at_ms=at_ms,
            fraud=fraud,
            code=code[:64],
            batch_hash=batch_hash,
            rows=rows,
            tokens=tokens,
            change=next_change(connection),
        )
    )


def set_attempts(connection: Connection, submission_id: int, attempts: int) -> None:
    """Count one more try at judging."""
    connection.execute(
        update(_SUBMISSIONS)
        .where(_SUBMISSIONS.c.id == submission_id)
        .values(attempts=attempts, change=next_change(connection))
    )


def set_training(connection: Connection, batch_hash: bytes, state: TrainingState, at_ms: int) -> bool:
    """Note what the trainer did with an accepted unit; False if no unit has that batch file."""
    changed = connection.execute(
        update(_SUBMISSIONS)
        .where(_SUBMISSIONS.c.batch_hash == batch_hash, _SUBMISSIONS.c.training != state)
        .values(training=state, trained_at_ms=at_ms, change=next_change(connection))
    )
    return changed.rowcount > 0


def set_case(connection: Connection, submission_id: int, case_id: int) -> None:
    """Name the slashing case that a submission led to."""
    connection.execute(
        update(_SUBMISSIONS)
        .where(_SUBMISSIONS.c.id == submission_id)
        .values(case_id=case_id, change=next_change(connection))
    )


def add_findings(
    connection: Connection, submission_id: int, job_id: bytes, notes: Sequence[FindingNote]
) -> None:
    """Keep what a validator found; an earlier validator's findings stay beside them."""
    if notes:
        connection.execute(
            insert(schema.findings),
            [
                {
                    "submission_id": submission_id,
                    "job_id": job_id,
                    "position": position,
                    "check_name": note.check,
                    "code": note.code,
                    "kind": note.kind,
                    "row": note.row,
                    "measured": note.measured,
                    "limit": note.limit,
                    "text": note.text[:_MAX_TEXT],
                }
                for position, note in enumerate(notes)
            ],
        )


def findings_of(connection: Connection, submission_ids: Sequence[int]) -> dict[int, list[FindingNote]]:
    """All findings of some submissions, in the order they were made."""
    table = schema.findings
    rows = connection.execute(
        select(table).where(table.c.submission_id.in_(submission_ids)).order_by(table.c.id)
    )
    found: dict[int, list[FindingNote]] = {}
    for row in rows:
        note = FindingNote(row.check_name, row.code, row.kind, row.row, row.measured, row.limit, row.text)
        found.setdefault(row.submission_id, []).append(note)
    return found


def statuses_since(
    connection: Connection, node: bytes, cursor: int, limit: int
) -> tuple[list[WorkStatus], int, bool]:
    """A node's units that changed after `cursor`, the next cursor, and whether there are more."""
    rows = connection.execute(
        select(_SUBMISSIONS)
        .where(_SUBMISSIONS.c.node == node, _SUBMISSIONS.c.change > cursor)
        .order_by(_SUBMISSIONS.c.change)
        .limit(limit + 1)
    ).all()
    more = len(rows) > limit
    rows = rows[:limit]
    notes = findings_of(connection, [row.id for row in rows])
    statuses = [status_of(row, notes.get(row.id, [])) for row in rows]
    return statuses, (rows[-1].change if rows else cursor), more


def status_of(row: Record, notes: list[FindingNote]) -> WorkStatus:
    """A row as told to its node."""
    times = {
        "received": row.received_at_ms,
        "queued": row.queued_at_ms,
        row.state: row.judged_at_ms,
        row.training: row.trained_at_ms,
    }
    if row.training == TrainingState.BATCHED:
        times[TrainingState.BATCHED.value] = row.judged_at_ms
    return WorkStatus(
        version=row.version,
        index=row.unit_index,
        file_hash=row.file_hash,
        state=SubmissionState(row.state),
        training=TrainingState(row.training),
        times_ms={str(name): at for name, at in times.items() if at is not None},
        findings=notes,
        case_id=row.case_id,
    )


def summary(row: Record) -> dict[str, Any]:
    """One submission as the command line and the web page show it, ready for JSON."""
    return {
        "id": row.id,
        "node": f"0x{row.node.hex()}",
        "owner": row.owner,
        "version": row.version,
        "index": row.unit_index,
        "state": row.state,
        "training": row.training,
        "code": row.code,
        "fraud": bool(row.fraud),
        "case_id": row.case_id,
        "received_at_ms": row.received_at_ms,
    }
