"""Where validators come for work and bring back verdicts."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import trio
from sqlalchemy import Connection, insert, select

from intellect_protocol.errors import InvalidDataError, RefusedError, WireError
from intellect_protocol.keys import recover_address, verdict_digest
from intellect_protocol.messages import (
    CaseJob,
    CaseVerdict,
    JobHeartbeat,
    JobHeartbeatResult,
    JobKind,
    JudgeJob,
    JudgeVerdict,
    RootJob,
    RootVerdict,
    SubmissionState,
    ValidatorJob,
    ValidatorJobResult,
    Verdict,
    VerdictResult,
)
from intellect_protocol.rollouts import FileLimits, read_batch, read_unit
from intellect_protocol.run import RunConfig
from intellect_protocol.wire import decode_canonical, sha256

from . import jobs, judgement, schema, submissions
from .batches import BatchStore, check_batch, check_rows
from .blobs import BlobStore
from .duplicates import DuplicateIndex, Tokens
from .intake import now_ms
from .standing import Standing
from .store import Record, Store

MAX_VERDICT_BYTES = 512 * 1024
_POSTPONE_MS = 2_000
_LOOK_AGAIN_S = 0.25

logger = logging.getLogger(__name__)

Concluded = Callable[[int, SubmissionState], Awaitable[None]]


class DeskLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long validators may hold and wait for jobs."""

    lease_s: float = 30.0
    wait_s: float = 2.0  # a claim waits this long for a job to turn up
    sweep_s: float = 1.0


class JobDesk:
    """Requests of validators. `validator` is always the verified signer of the request."""

    def __init__(
        self,
        store: Store,
        blobs: BlobStore,
        batches: BatchStore,
        standing: Standing,
        config: RunConfig,
        bell: jobs.Bell,
        *,
        concluded: Concluded,
        limits: DeskLimits | None = None,
        clock_ms: Callable[[], int] = now_ms,
    ) -> None:
        """
        Args:
            concluded: called with id and final state after a submission's verdict is on disk.
        """
        self._store = store
        self._blobs = blobs
        self._batches = batches
        self._standing = standing
        self._config = config
        self._run_id = config.run_id
        self._bell = bell
        self._concluded = concluded
        self._limits = limits or DeskLimits()
        self._clock_ms = clock_ms
        self._duplicates = DuplicateIndex()

    async def run(self) -> None:
        """Take back jobs whose lease ran out, until cancelled."""
        while True:
            await self.sweep()
            await trio.sleep(self._limits.sweep_s)

    async def sweep(self) -> None:
        """Take back jobs whose lease ran out."""
        step = partial(judgement.sweep_leases, run_id=self._run_id, now_ms=self._clock_ms())
        if await self._store.write(step):
            self._bell.ring()

    async def claim(self, validator: str, message: ValidatorJob) -> tuple[ValidatorJobResult, Path | None]:
        """The next job of one of these kinds and the path of its body; an empty result if none turns up.

        Raises:
            RefusedError: not a validator.
        """
        await self._standing.check_validator(validator)
        kinds = frozenset(message.kinds)
        with trio.move_on_after(self._limits.wait_s):
            while True:
                heard = self._bell.listen()
                # Shielded: a claim that is committed must reach the caller, or it is lost until it expires.
                with trio.CancelScope(shield=True):
                    found = await self._store.write(partial(self._claim, validator=validator, kinds=kinds))
                if found is not None:
                    return found
                # Postponed jobs come due without a ring.
                with trio.move_on_after(_LOOK_AGAIN_S):
                    await heard.wait()
        return ValidatorJobResult(), None

    def _claim(
        self, connection: Connection, validator: str, kinds: frozenset[JobKind]
    ) -> tuple[ValidatorJobResult, Path | None] | None:
        while True:
            job = jobs.claim(connection, validator, kinds, self._clock_ms(), int(self._limits.lease_s * 1000))
            if job is None:
                return None
            described = self._describe(connection, job)
            if described is not None:
                return described
            jobs.finish(connection, job.id)

    def _describe(self, connection: Connection, job: Record) -> tuple[ValidatorJobResult, Path] | None:
        """A claimed job in words for the validator, or None if there is nothing left to do for it."""
        lease_s = self._limits.lease_s
        if job.kind in (JobKind.JUDGE, JobKind.REVIEW):
            row = submissions.get(connection, job.submission_id)
            if row is None or row.state not in submissions.PENDING:
                return None
            judge = JudgeJob(
                version=row.version,
                checkpoint_hash=row.checkpoint_hash,
                block_hash=row.block_hash,
                node=row.node,
                index=row.unit_index,
                file_hash=row.file_hash,
                size_bytes=row.size_bytes,
                work_signature=row.work_signature,
                received_at_ms=row.received_at_ms,
                attempt=job.attempt,
                audit=_must_audit(row, job),
            )
            return ValidatorJobResult(job.id, lease_s, judge=judge), self._blobs.path(row.file_hash)
        digest = job.evidence_hash if job.kind == JobKind.CASE else job.data_hash
        path = self._blobs.path(digest)
        size = path.stat().st_size
        if job.kind == JobKind.CASE:
            case = connection.execute(
                select(schema.cases).where(schema.cases.c.evidence_hash == digest)
            ).one_or_none()
            if case is None or case.case_id is None:
                return None
            return ValidatorJobResult(job.id, lease_s, case=CaseJob(case.case_id, digest, size)), path
        roots = schema.roots
        versions = connection.scalars(
            select(roots.c.version).where(roots.c.data_hash == digest).order_by(roots.c.version)
        ).all()
        return ValidatorJobResult(job.id, lease_s, root=RootJob(digest, size, list(versions))), path

    async def heartbeat(self, validator: str, message: JobHeartbeat) -> JobHeartbeatResult:
        """Extend a lease.

        Raises:
            RefusedError: the lease is lost; the job is somebody else's now.
        """
        step = partial(
            jobs.extend,
            job_id=message.job_id,
            validator=validator,
            now_ms=self._clock_ms(),
            lease_ms=int(self._limits.lease_s * 1000),
        )
        if not await self._store.write(step):
            raise RefusedError("lease_lost", "the job is done or somebody else's")
        return JobHeartbeatResult(self._limits.lease_s)

    async def verdict(self, validator: str, message: Verdict, body: bytes) -> VerdictResult:
        """Take in a verdict; it is on disk, and an accepted batch in the store, when this returns.

        Raises:
            RefusedError: not a validator, not its job, a bad signature, or a verdict that makes no sense.
        """
        await self._standing.check_validator(validator)
        if len(message.content) > MAX_VERDICT_BYTES:
            raise RefusedError("bad_verdict", f"a verdict has at most {MAX_VERDICT_BYTES} bytes")
        digest = verdict_digest(self._run_id, message.job_id[:255], message.content)
        if recover_address(digest, message.signature) != validator:
            raise RefusedError("bad_signature", "the verdict is not signed by the sender")
        job, known = await self._store.read(partial(_job_and_verdict, job_id=message.job_id))
        if job is None:
            raise RefusedError("unknown_job", "there is no such job")
        if known is not None and known.content == message.content and known.validator == validator:
            return VerdictResult(True)
        self._check_holder(job, validator)
        try:
            if job.kind in (JobKind.JUDGE, JobKind.REVIEW):
                await self._take_judgement(job, validator, message, body)
            else:
                await self._take_signature(job, validator, message)
        except WireError as error:
            raise RefusedError("bad_verdict", str(error)) from error
        self._bell.ring()
        return VerdictResult(True)

    @staticmethod
    def _check_holder(job: Record, validator: str) -> None:
        if job.state == jobs.DONE or job.validator != validator:
            raise RefusedError("lease_lost", "the job is done or somebody else's")

    async def _take_judgement(self, job: Record, validator: str, message: Verdict, body: bytes) -> None:
        verdict = decode_canonical(message.content, JudgeVerdict)
        problem = judgement.contradiction(verdict)
        if problem is not None:
            raise RefusedError("bad_verdict", problem)
        row = await self._store.read(partial(submissions.get, submission_id=job.submission_id))
        assert row is not None
        if _must_audit(row, job) and not verdict.is_audited:
            raise RefusedError(
                "bad_verdict", "the unit was drawn for an audit, and the verdict leaves it out"
            )
        if verdict.outcome == "accepted":
            await trio.to_thread.run_sync(self._accept_batch, row, verdict, validator, body)

        def step(connection: Connection) -> SubmissionState | None:
            current = jobs.get(connection, job.id)
            assert current is not None
            self._check_holder(current, validator)
            fresh = submissions.get(connection, job.submission_id)
            if fresh is None or fresh.state not in submissions.PENDING:
                jobs.finish(connection, job.id)
                return None
            self._keep(connection, job, validator, message, verdict.outcome)
            return judgement.apply(connection, self._run_id, fresh, job, verdict, validator, self._clock_ms())

        state = await self._store.write(step)
        if state is not None:
            await self._remark(row, job, verdict, body)
            await self._concluded(row.id, state)

    async def _remark(self, row: Record, job: Record, verdict: JudgeVerdict, body: bytes) -> None:
        """Note completions that another node has as well; a failure here leaves the verdict as it is."""
        accepted = verdict.outcome == "accepted"
        if not accepted and not verdict.fraud:
            return
        try:
            rows = await trio.to_thread.run_sync(self._rows_of, row, body if accepted else None)
        except InvalidDataError as error:
            logger.info("unit %d/%d: not compared with others: %s", row.version, row.unit_index, error)
            return
        unit = judgement.unit_of(row)
        note = self._duplicates.remark(unit, rows)
        if accepted:
            self._duplicates.add(unit, rows)
        if note is not None:
            await self._store.write(
                partial(submissions.add_findings, submission_id=row.id, job_id=job.id, notes=[note])
            )

    def _rows_of(self, row: Record, batch: bytes | None) -> Sequence[Tokens]:
        """Rows of an accepted unit's batch file, or of the rollout file of another one."""
        limits = self.file_limits()
        if batch is not None:
            return read_batch(batch, limits).rows
        file = self._blobs.get(row.file_hash, max_bytes=limits.max_file_bytes)
        return [] if file is None else read_unit(file, limits).rows

    def _accept_batch(self, row: Record, verdict: JudgeVerdict, validator: str, body: bytes) -> None:
        """Check a batch file against the verdict and the rollout file, and hand it to the trainer."""
        limits = self.file_limits()
        unit = judgement.unit_of(row)
        try:
            if sha256(body) != verdict.batch_hash:
                raise InvalidDataError("the batch file does not have the hash in the verdict")
            batch = read_batch(body, limits)
            check_batch(batch, unit, self._run_id, row.checkpoint_hash, row.file_hash, validator)
            if batch.meta.audited != verdict.is_audited:
                raise InvalidDataError("the batch file and the verdict differ about the audit")
            file = self._blobs.get(row.file_hash, max_bytes=limits.max_file_bytes)
            if file is None:
                raise InvalidDataError("the rollout file is gone from the disk")
            check_rows(batch, read_unit(file, limits))
            tokens = sum(len(each.completion_tokens) for each in batch.rows)
            if (len(batch.rows), tokens) != (verdict.rows, verdict.tokens):
                raise InvalidDataError("the verdict counts other rows or tokens than the batch file has")
        except InvalidDataError as error:
            raise RefusedError("bad_batch", str(error)) from error
        self._batches.put(unit, body)

    async def _take_signature(self, job: Record, validator: str, message: Verdict) -> None:
        """A case or root verdict. An abstention puts the job off instead of ending it."""
        if job.kind == JobKind.CASE:
            case = decode_canonical(message.content, CaseVerdict)
            decision, outcome = case.signature, "uphold" if case.uphold else "dismiss"
        else:
            root = decode_canonical(message.content, RootVerdict)
            decision, outcome = root.signature, "signed"
            if root.data_hash != job.data_hash:
                raise RefusedError("bad_verdict", "the verdict is about another work file")
        if decision and len(decision) != 65:
            raise RefusedError("bad_verdict", "a signature has 65 bytes")

        def step(connection: Connection) -> None:
            current = jobs.get(connection, job.id)
            assert current is not None
            self._check_holder(current, validator)
            if not decision:
                jobs.postpone(connection, job.id, self._clock_ms() + _POSTPONE_MS)
                return
            self._keep(connection, job, validator, message, outcome, decision)
            jobs.finish(connection, job.id)

        await self._store.write(step)

    def _keep(
        self,
        connection: Connection,
        job: Record,
        validator: str,
        message: Verdict,
        outcome: str,
        decision: bytes | None = None,
    ) -> None:
        connection.execute(
            insert(schema.verdicts).values(
                job_id=job.id,
                submission_id=job.submission_id,
                evidence_hash=job.evidence_hash,
                data_hash=job.data_hash,
                validator=validator,
                outcome=outcome,
                content=message.content,
                signature=message.signature,
                decision=decision,
                at_ms=self._clock_ms(),
            )
        )

    def file_limits(self) -> FileLimits:
        """Bounds within which rollout and batch files are opened here."""
        terms = self._config.terms
        return FileLimits(
            max_rows=terms.sampling.prompts_per_unit * terms.sampling.samples_per_prompt,
            max_prompt_tokens=terms.model.max_positions,
            max_completion_tokens=terms.model.max_positions,
            max_file_bytes=self._config.revision.window.max_submission_bytes,
        )


def _must_audit(row: Record, job: Record) -> bool:
    """Whether checks 10 to 12 must run: the unit was drawn, or somebody who looked found it suspect."""
    return bool(row.audit) or job.kind == JobKind.REVIEW


def _job_and_verdict(connection: Connection, job_id: bytes) -> tuple[Record | None, Record | None]:
    known = connection.execute(
        select(schema.verdicts).where(schema.verdicts.c.job_id == job_id)
    ).one_or_none()
    return jobs.get(connection, job_id), known
