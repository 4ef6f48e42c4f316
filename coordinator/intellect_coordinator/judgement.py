"""What becomes of a submission when a validator has judged it, or failed to.

    accepted      the batch file is in the batch store, then the row says so
    rejected      findings to the node; a fraud is noted for `slashing`
    suspect       another validator reviews; suspect again: rejected, never fraud
    inconclusive  our own fault: judged again, a bounded number of times, and never held against the node;
                  once more by anybody, then rather by others than the validator that failed. A review stays
                  a review, by another validator than the one who was suspicious.

Functions of a connection, called inside one write transaction that also stores the verdict.
"""

from __future__ import annotations

from sqlalchemy import Connection

from intellect_protocol.messages import FindingNote, JobKind, JudgeVerdict, SubmissionState

from . import jobs, slashing, submissions
from .store import Record, add_event
from .submissions import Unit

MAX_ATTEMPTS = 6
MAX_LEASES = 4  # of one job, before its loss counts as an inconclusive attempt
FATAL_KINDS = ("fraud", "invalid", "stale")


def unit_of(row: Record) -> Unit:
    """The unit a submission row is about."""
    return Unit(row.node, row.version, row.unit_index)


def reason_code(findings: list[FindingNote]) -> str:
    """Code of the first finding that decides, "" if none does."""
    for kinds in (FATAL_KINDS, ("suspect",)):
        for note in findings:
            if note.kind in kinds:
                return note.code
    return ""


def contradiction(verdict: JudgeVerdict) -> str | None:
    """Why a verdict cannot be what an honest validator says, or None."""
    kinds = {note.kind for note in verdict.findings}
    fatal = kinds & set(FATAL_KINDS)
    problems = [
        (verdict.outcome not in ("accepted", "rejected", "suspect", "inconclusive"), "no such outcome"),
        (verdict.fraud != ("fraud" in kinds), "fraud without a finding of fraud, or the other way round"),
        (bool(fatal) != (verdict.outcome == "rejected"), "outcome and findings contradict each other"),
        ((verdict.outcome == "suspect") > ("suspect" in kinds), "suspect without a finding"),
        (
            bool(verdict.batch_hash) != (verdict.outcome == "accepted"),
            "a batch file goes with acceptance only",
        ),
        (verdict.rows < 0 or verdict.tokens < 0, "negative counts"),
    ]
    return next((text for wrong, text in problems if wrong), None)


def apply(
    connection: Connection,
    run_id: bytes,
    row: Record,
    job: Record,
    verdict: JudgeVerdict,
    validator: str,
    now_ms: int,
) -> SubmissionState | None:
    """Take in a verdict; returns the submission's final state, or None if it is to be judged again."""
    submissions.add_findings(connection, row.id, job.id, verdict.findings)
    jobs.finish(connection, job.id)
    if verdict.outcome == "inconclusive":
        return retry(connection, run_id, row, job, validator, now_ms)
    if verdict.outcome == "suspect" and job.kind == JobKind.JUDGE:
        submissions.set_attempts(connection, row.id, row.attempts + 1)
        jobs.add_judge(
            connection,
            run_id,
            unit_of(row),
            row.file_hash,
            row.id,
            attempt=row.attempts + 1,
            now_ms=now_ms,
            kind=JobKind.REVIEW,
            not_for=validator,
        )
        return None
    accepted = verdict.outcome == "accepted"
    state = SubmissionState.ACCEPTED if accepted else SubmissionState.REJECTED
    code = "" if accepted else reason_code(verdict.findings)
    submissions.conclude(
        connection,
        row.id,
        state,
        now_ms,
        fraud=verdict.fraud,
        code=code,
        batch_hash=verdict.batch_hash if accepted else None,
        rows=verdict.rows,
        tokens=verdict.tokens,
    )
    if not accepted:
        unit = f"unit {row.version}/{row.unit_index} of 0x{row.node.hex()}"
        add_event(connection, now_ms, f"{unit} refused: {code}")
        if verdict.fraud:
            slashing.note_fraud(connection, row, job.id, code, now_ms)
    return state


def retry(
    connection: Connection, run_id: bytes, row: Record, job: Record, failed: str | None, now_ms: int
) -> SubmissionState | None:
    """Judge a submission once more, or end it as inconclusive after too many tries.

    Args:
        job: that led to nothing. failed: the validator who had it.
    """
    attempt = row.attempts + 1
    submissions.set_attempts(connection, row.id, attempt)
    if attempt >= MAX_ATTEMPTS:
        submissions.conclude(connection, row.id, SubmissionState.INCONCLUSIVE, now_ms)
        unit = f"unit {row.version}/{row.unit_index} of 0x{row.node.hex()}"
        add_event(connection, now_ms, f"{unit} could not be judged ({attempt} tries)")
        return SubmissionState.INCONCLUSIVE
    jobs.add_judge(
        connection,
        run_id,
        unit_of(row),
        row.file_hash,
        row.id,
        attempt=attempt,
        now_ms=now_ms + 250 * 2**attempt,
        kind=JobKind(job.kind),
        not_for=_not_for(job, failed, attempt),
    )
    return None


def _not_for(job: Record, failed: str | None, attempt: int) -> str | None:
    if job.kind == JobKind.REVIEW:
        return job.not_for  # type: ignore[no-any-return]
    # What failed once may have been a restart under way; what failed twice is better tried elsewhere.
    return failed if attempt > 1 else None


def sweep_leases(connection: Connection, run_id: bytes, now_ms: int) -> int:
    """Queue again every job whose lease ran out; returns how many there were."""
    lost = jobs.expired(connection, now_ms)
    for job in lost:
        if job.submission_id is not None and job.leases >= MAX_LEASES:
            jobs.finish(connection, job.id)
            row = submissions.get(connection, job.submission_id)
            if row is not None and row.state in submissions.PENDING:
                retry(connection, run_id, row, job, job.validator, now_ms)
        else:
            jobs.postpone(connection, job.id, now_ms)
    return len(lost)
