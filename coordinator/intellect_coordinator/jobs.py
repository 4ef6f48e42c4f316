"""Jobs for validators and their leases.

    queued -> leased -> done            a verdict was stored
       ^         |
       +---------+                      the lease ran out: somebody else may try

A judging job's id names unit, file and attempt (`work_file.judge_job_id`); a further opinion or a retry is
a new attempt and thereby a new job. Case and root jobs are addressed to one validator each. Functions of a
connection; those that write run inside one write transaction of the caller.
"""

from __future__ import annotations

from collections.abc import Collection

import trio
from sqlalchemy import ColumnElement, Connection, func, insert, or_, select, update

from intellect_protocol.keys import address_bytes
from intellect_protocol.messages import JobKind
from intellect_protocol.wire import sha256, short, u64
from intellect_protocol.work_file import judge_job_id

from . import schema
from .store import Record
from .submissions import Unit

PREFER_OTHERS_MS = 10_000
QUEUED, LEASED, DONE = "queued", "leased", "done"
_JOBS = schema.jobs
# Cases have deadlines, roots and reviews hold others up; fresh submissions can wait that long.
_URGENCY = (JobKind.CASE, JobKind.ROOT, JobKind.REVIEW, JobKind.JUDGE)


class Bell:
    """Wakes those who wait for a job. Take `heard = bell.listen()` before looking: then no ring is lost."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def listen(self) -> trio.Event:
        """The event that the next ring sets."""
        return self._event

    def ring(self) -> None:
        """Wake everybody who listens now."""
        self._event.set()
        self._event = trio.Event()


def _add(connection: Connection, job_id: bytes, kind: JobKind, not_before_ms: int, **fields: object) -> None:
    if connection.scalar(select(func.count()).where(_JOBS.c.id == job_id)):
        return
    seq = int(connection.scalar(select(func.coalesce(func.max(_JOBS.c.seq), 0))) or 0) + 1
    values = {"attempt": 0, "leases": 0, **fields}
    connection.execute(
        insert(_JOBS).values(
            id=job_id, seq=seq, kind=kind, state=QUEUED, not_before_ms=not_before_ms, **values
        )
    )


def add_judge(
    connection: Connection,
    run_id: bytes,
    unit: Unit,
    file_hash: bytes,
    submission_id: int,
    *,
    attempt: int,
    now_ms: int,
    kind: JobKind = JobKind.JUDGE,
    not_for: str | None = None,
) -> None:
    """Queue the `attempt`-th judging of a submission.

    Args:
        not_for: who may not do it: a review never, a judging only after a while in which nobody else came.
    """
    job_id = judge_job_id(run_id, unit.version, unit.node, unit.index, file_hash, attempt)
    _add(connection, job_id, kind, now_ms, submission_id=submission_id, attempt=attempt, not_for=not_for)


def add_case(
    connection: Connection, run_id: bytes, evidence_hash: bytes, validator: str, attempt: int, now_ms: int
) -> None:
    """Queue the replay of a case's evidence by one validator."""
    job_id = sha256(
        b"intellect/case-job/1", run_id, evidence_hash, short(address_bytes(validator)), u64(attempt)
    )
    _add(
        connection,
        job_id,
        JobKind.CASE,
        now_ms,
        evidence_hash=evidence_hash,
        attempt=attempt,
        assigned_to=validator,
    )


def add_root(
    connection: Connection, run_id: bytes, data_hash: bytes, validator: str, attempt: int, now_ms: int
) -> None:
    """Queue the check of a work file by one validator."""
    job_id = sha256(b"intellect/root-job/1", run_id, data_hash, short(address_bytes(validator)), u64(attempt))
    _add(
        connection,
        job_id,
        JobKind.ROOT,
        now_ms,
        data_hash=data_hash,
        attempt=attempt,
        assigned_to=validator,
    )


def claim(
    connection: Connection, validator: str, kinds: Collection[JobKind], now_ms: int, lease_ms: int
) -> Record | None:
    """Lease the most urgent job a validator may do, oldest first; None if there is none."""
    for kind in _URGENCY:
        if kind not in kinds:
            continue
        found = connection.execute(
            select(_JOBS)
            .where(
                _JOBS.c.state == QUEUED,
                _JOBS.c.kind == kind,
                _JOBS.c.not_before_ms <= now_ms,
                or_(_JOBS.c.assigned_to.is_(None), _JOBS.c.assigned_to == validator),
                or_(*_allowed(kind, validator, now_ms)),
            )
            .order_by(_JOBS.c.seq)
            .limit(1)
        ).one_or_none()
        if found is not None:
            connection.execute(
                update(_JOBS)
                .where(_JOBS.c.id == found.id)
                .values(
                    state=LEASED,
                    validator=validator,
                    leases=_JOBS.c.leases + 1,
                    lease_until_ms=now_ms + lease_ms,
                )
            )
            return found
    return None


def _allowed(kind: JobKind, validator: str, now_ms: int) -> list[ColumnElement[bool]]:
    allowed = [_JOBS.c.not_for.is_(None), _JOBS.c.not_for != validator]
    if kind == JobKind.JUDGE:
        allowed.append(_JOBS.c.not_before_ms <= now_ms - PREFER_OTHERS_MS)
    return allowed


def extend(connection: Connection, job_id: bytes, validator: str, now_ms: int, lease_ms: int) -> bool:
    """Give a lease more time; False if the validator does not hold it any more."""
    changed = connection.execute(
        update(_JOBS)
        .where(_JOBS.c.id == job_id, _JOBS.c.state == LEASED, _JOBS.c.validator == validator)
        .values(lease_until_ms=now_ms + lease_ms)
    )
    return changed.rowcount > 0


def get(connection: Connection, job_id: bytes) -> Record | None:
    """A job by id, or None."""
    return connection.execute(select(_JOBS).where(_JOBS.c.id == job_id)).one_or_none()


def finish(connection: Connection, job_id: bytes) -> None:
    """A job needs no more work."""
    connection.execute(update(_JOBS).where(_JOBS.c.id == job_id).values(state=DONE))


def postpone(connection: Connection, job_id: bytes, not_before_ms: int) -> None:
    """Queue a job again, from a time on."""
    connection.execute(
        update(_JOBS).where(_JOBS.c.id == job_id).values(state=QUEUED, not_before_ms=not_before_ms)
    )


def withdraw_case(connection: Connection, evidence_hash: bytes) -> None:
    """Nobody needs to replay this evidence any more."""
    connection.execute(
        update(_JOBS).where(_JOBS.c.evidence_hash == evidence_hash, _JOBS.c.state != DONE).values(state=DONE)
    )


def withdraw_root(connection: Connection, data_hash: bytes) -> None:
    """Nobody needs to check this work file any more."""
    connection.execute(
        update(_JOBS).where(_JOBS.c.data_hash == data_hash, _JOBS.c.state != DONE).values(state=DONE)
    )


def expired(connection: Connection, now_ms: int) -> list[Record]:
    """Leased jobs whose time is over."""
    return list(
        connection.execute(
            select(_JOBS)
            .where(_JOBS.c.state == LEASED, _JOBS.c.lease_until_ms < now_ms)
            .order_by(_JOBS.c.seq)
        ).all()
    )


def open_counts(connection: Connection) -> dict[str, int]:
    """Jobs that wait or are being done, by kind."""
    rows = connection.execute(
        select(_JOBS.c.kind, func.count()).where(_JOBS.c.state != DONE).group_by(_JOBS.c.kind)
    )
    return {str(kind): int(count) for kind, count in rows}
