"""`intellect-coordinator validate`: a validator in a process of its own, with its own key, anywhere.

It claims jobs from the coordinator and brings back signed verdicts: judging submissions (if asked to),
reviewing what another found suspect, replaying the evidence of cases, checking work files. Two workers share
one engine, so that the checks without a model of one unit run while the engine scores the other.

    claimed -> working -> verdict sent          a lease that is lost ends the work; somebody else does it
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from intellect_protocol.engines.supervisor import EngineOptions
from intellect_protocol.errors import IntellectError, RefusedError, UsageError
from intellect_protocol.file_lock import try_lock
from intellect_protocol.keys import LocalSigner, PeerKey, checksum_address, verdict_digest
from intellect_protocol.messages import (
    CaseVerdict,
    GetWorkFile,
    GetWorkFileResult,
    JobHeartbeat,
    JobHeartbeatResult,
    JobKind,
    JudgeJob,
    JudgeVerdict,
    RootVerdict,
    ShowReceipt,
    ShowReceiptResult,
    ValidatorJob,
    ValidatorJobResult,
    Verdict,
    VerdictResult,
)
from intellect_protocol.run import RunConfig
from intellect_protocol.wire import encode, sha256
from intellect_protocol.work_file import MAX_WORK_FILE_BYTES, judge_job_id

from .evidence import MAX_EVIDENCE_BYTES
from .judging import Judge, UnitClaims
from .public_record import PublicRecord
from .reviews import Reviewer
from .status import head_of, write_status
from .validator_log import JudgedUnit, ShownReceipt, ValidatorLog
from .weight_keeper import WeightKeeper

if TYPE_CHECKING:
    from intellect_protocol.network.rpc_server import Call, Reply
    from intellect_protocol.network.swarm import Swarm

_WORKERS = 2
_CLAIM_DEADLINE_S = 60.0
_SEND_DEADLINE_S = 60.0
_SEND_TRIES = 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_UPKEEP_S = 1.0

logger = logging.getLogger(__name__)


class ValidatorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `validate` needs to know."""

    run: RunConfig
    signer: LocalSigner
    data_dir: Path
    listen: list[str]
    judge: bool = True  # take fresh submissions; reviews, cases and roots always
    spot_checks: float = 0.0  # share of the units not drawn that are audited nevertheless
    engine: EngineOptions


class Validator:
    """The duties of one validator key over an open swarm."""

    def __init__(self, options: ValidatorOptions, swarm: Swarm, judge: Judge, log: ValidatorLog) -> None:
        self._options = options
        self._swarm = swarm
        self._judge = judge
        self._log = log
        self._run_id = options.run.run_id
        record = PublicRecord(options.run, swarm.ledger, self._fetch_work_file)
        self._reviewer = Reviewer(options.run, swarm.ledger, options.signer, judge, log, record)
        self._weights = WeightKeeper(swarm, judge, options.run.revision.window.async_level)
        self._chance = random.SystemRandom()
        self._done: dict[str, int] = {}

    def register(self) -> None:
        """Serve a validator's requests on the swarm."""
        self._swarm.server.register(ShowReceipt, self._show_receipt, signed=True)

    async def run(self) -> None:
        """Work until cancelled."""
        kinds = [JobKind.CASE, JobKind.ROOT, JobKind.REVIEW]
        if self._options.judge:
            kinds.append(JobKind.JUDGE)
        async with trio.open_nursery() as nursery:
            for _ in range(_WORKERS if self._options.judge else 1):
                nursery.start_soon(self._work, kinds)
            nursery.start_soon(self._upkeep)
            nursery.start_soon(self._weights.hold_refused)
            if self._options.judge:
                nursery.start_soon(self._weights.prefetch)

    # --- jobs ------------------------------------------------------------------------------------

    async def _work(self, kinds: list[JobKind]) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                job, body = await self._swarm.call_coordinator(
                    ValidatorJob(kinds),
                    ValidatorJobResult,
                    deadline_s=_CLAIM_DEADLINE_S,
                    max_body_bytes=MAX_EVIDENCE_BYTES,
                )
                if job.job_id:
                    await self._do(job, body)
                pause_s = _FIRST_PAUSE_S
            except IntellectError as error:
                logger.warning("claiming or answering a job: %s", error)
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _do(self, job: ValidatorJobResult, body: bytes) -> None:
        answer: tuple[bytes, bytes] | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_lease, job, nursery.cancel_scope)
            answer = await self._answer(job, body)
            nursery.cancel_scope.cancel()
        if answer is not None:
            await self._send(job.job_id, *answer)

    async def _keep_lease(self, job: ValidatorJobResult, work: trio.CancelScope) -> None:
        lease_s = max(job.lease_s, 1.0)
        while True:
            await trio.sleep(lease_s / 3)
            try:
                await self._swarm.call_coordinator(
                    JobHeartbeat(job.job_id), JobHeartbeatResult, deadline_s=lease_s / 3
                )
            except RefusedError as error:
                if error.code == "lease_lost":
                    logger.info("job %s was taken back", job.job_id.hex()[:16])
                    work.cancel()
                    return
            except IntellectError as error:
                logger.debug("heartbeat of a job: %s", error)

    async def _answer(self, job: ValidatorJobResult, body: bytes) -> tuple[bytes, bytes] | None:
        """Content and body of the verdict; None if the job is not one to be answered."""
        if job.judge is not None:
            return await self._answer_judge(job.job_id, job.judge, body)
        if job.case is not None:
            try:
                case = await self._reviewer.review_case(job.case, body)
            except IntellectError as error:
                case = CaseVerdict(job.case.case_id, False, b"", str(error)[:500])
            said = "abstains" if not case.signature else "upholds" if case.uphold else "dismisses"
            logger.info("case %d: %s (%s)", case.case_id, said, case.text)
            self._count(f"case {said}")
            return encode(case), b""
        if job.root is not None:
            try:
                root = await self._reviewer.review_root(job.root, body)
            except IntellectError as error:
                root = RootVerdict(job.root.data_hash, b"", str(error)[:500])
            if not root.signature:
                logger.warning("work root not signed: %s", root.text)
            self._count("root signed" if root.signature else "root refused")
            return encode(root), b""
        return None

    async def _answer_judge(self, job_id: bytes, job: JudgeJob, body: bytes) -> tuple[bytes, bytes] | None:
        expected = judge_job_id(self._run_id, job.version, job.node, job.index, job.file_hash, job.attempt)
        if job_id != expected:
            logger.warning("the coordinator named a job otherwise than its unit says; not answered")
            return None
        with self._weights.using(job.version):
            verdict, batch = await self._judged(job, body)
        node = checksum_address(job.node)
        note = JudgedUnit(job.version, node, job.index, job.file_hash, job.attempt, verdict.outcome)
        await trio.to_thread.run_sync(self._log.add_verdict, note)
        self._count(verdict.outcome)
        return encode(verdict), batch

    async def _judged(self, job: JudgeJob, body: bytes) -> tuple[JudgeVerdict, bytes]:
        fault = await self._misled(job, body)
        if fault is not None:
            logger.warning("unit %d/%d: %s", job.version, job.index, fault)
            return JudgeVerdict("inconclusive", False, [], b"", 0, 0, 0.0), b""
        claims = UnitClaims(
            version=job.version,
            checkpoint_hash=job.checkpoint_hash,
            block_hash=job.block_hash,
            node=job.node,
            index=job.index,
            file_hash=job.file_hash,
            size_bytes=job.size_bytes,
            work_signature=job.work_signature,
        )
        # The coordinator knows what is drawn and could tell a friend; of this choice it knows nothing.
        audit = job.audit or self._chance.random() < self._options.spot_checks
        return await self._judge.verdict(body, claims, self._options.signer.address, audit=audit)

    async def _misled(self, job: JudgeJob, body: bytes) -> str | None:
        """What the coordinator got wrong about a unit, which must not be blamed on its node; or None."""
        if len(body) != job.size_bytes or sha256(body) != job.file_hash:
            return "the coordinator sent another file than the node signed"
        try:
            recorded = await self._swarm.heads.recorded(job.version)
        except IntellectError as error:
            return str(error)
        if recorded is None:
            return "the version is not on the ledger"
        if (recorded.checkpoint_hash, recorded.block_hash) != (job.checkpoint_hash, job.block_hash):
            return "the coordinator names another checkpoint or block than the ledger"
        return None

    async def _send(self, job_id: bytes, content: bytes, body: bytes) -> None:
        signature = self._options.signer.sign_digest(verdict_digest(self._run_id, job_id, content))
        verdict = Verdict(job_id, content, signature)
        pause_s = _FIRST_PAUSE_S
        for attempt in range(_SEND_TRIES):
            try:
                await self._swarm.call_coordinator(
                    verdict, VerdictResult, body=body or None, deadline_s=_SEND_DEADLINE_S
                )
                return
            except RefusedError as error:
                if error.retry_after_s is None or attempt == _SEND_TRIES - 1:
                    logger.warning("verdict refused: %s", error)
                    return
            except IntellectError:
                if attempt == _SEND_TRIES - 1:
                    raise
            await trio.sleep(pause_s)
            pause_s *= 2

    async def _fetch_work_file(self, digest: bytes) -> bytes | None:
        _, content = await self._swarm.call_coordinator(
            GetWorkFile(digest),
            GetWorkFileResult,
            deadline_s=_SEND_DEADLINE_S,
            max_body_bytes=MAX_WORK_FILE_BYTES,
        )
        return content if sha256(content) == digest else None

    def _count(self, what: str) -> None:
        self._done[what] = self._done.get(what, 0) + 1

    # --- receipts --------------------------------------------------------------------------------

    async def _show_receipt(self, call: Call[ShowReceipt]) -> Reply:
        from intellect_protocol.network.rpc_server import Reply

        receipt = call.payload.receipt
        if receipt.run_id != self._run_id or not receipt.is_signed_by(
            self._options.run.terms.keys.coordinator
        ):
            raise RefusedError("bad_signature", "that is no receipt of this run's coordinator")
        node = checksum_address(receipt.node)
        if call.signer != node:
            raise RefusedError("not_yours", "only a unit's own node shows its receipt")
        shown = ShownReceipt(receipt.version, node, receipt.index, receipt.file_hash)
        return Reply(ShowReceiptResult(await trio.to_thread.run_sync(self._log.add_receipt, shown)))

    # --- upkeep ----------------------------------------------------------------------------------

    async def _upkeep(self) -> None:
        while True:
            self._weights.retain()
            await trio.to_thread.run_sync(write_status, self._options.data_dir, self._view())
            await trio.sleep(_UPKEEP_S)

    def _view(self) -> dict[str, Any]:
        policies = self._swarm.policies
        judge = self._judge
        return {
            "role": "validator",
            "address": self._options.signer.address,
            "judge": self._options.judge,
            "head": head_of(self._swarm.heads.head),
            "version": judge.placed,
            "verdicts": dict(self._done),
            "judged": judge.judged,
            "tokens_per_s": round(judge.tokens / judge.busy_s, 1) if judge.busy_s else 0.0,
            "seconds_per_unit": round(judge.busy_s / judge.judged, 3) if judge.judged else 0.0,
            "bytes_from_origin": policies.bytes_from_origin if policies else 0,
            "bytes_from_peers": policies.bytes_from_peers if policies else 0,
        }


@asynccontextmanager
async def open_validator(options: ValidatorOptions) -> AsyncIterator[Validator]:
    """Open log, swarm and engine; leaving the block closes all of them.

    Raises:
        UsageError: another validator uses the data directory.
        UnreachableError: no known peer answers.
    """
    from intellect_protocol.network.swarm import SwarmOptions, open_swarm

    options.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = try_lock(options.data_dir / "lock")
    if lock is None:
        raise UsageError(f"{options.data_dir}: another validator runs here")
    with lock:
        log = ValidatorLog(options.data_dir / "validator.sqlite")
        try:
            swarm_options = SwarmOptions(
                role="validator",
                data_dir=options.data_dir,
                config=options.run,
                peer_key=PeerKey.load_or_create(options.data_dir / "peer.key"),
                signer=options.signer,
                listen=options.listen,
                weights=True,
            )
            async with open_swarm(swarm_options) as swarm:
                assert swarm.policies is not None
                async with Judge(options.run, swarm.policies, options.engine) as judge:
                    validator = Validator(options, swarm, judge, log)
                    validator.register()
                    yield validator
        finally:
            log.close()


async def validate(options: ValidatorOptions) -> None:
    """Run a validator until cancelled. Errors as `open_validator`."""
    async with open_validator(options) as validator:
        logger.info("validator %s is up", options.signer.address)
        await validator.run()
