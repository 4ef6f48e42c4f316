"""What a validator signs under EIP-712: decisions of the court and work roots. Only after looking itself.

Nothing the coordinator says is taken on trust: the case is read from the court, checkpoint and owner from the
ledger, thresholds from the run configuration this validator was started with, and the fraud is judged again
by its own engine under its own copy of the weights.
"""

from __future__ import annotations

from typing import Protocol

import trio

from intellect_protocol.errors import InvalidDataError
from intellect_protocol.keys import Signer, checksum_address
from intellect_protocol.ledger.client import Ledger
from intellect_protocol.ledger.events import NodeBound, NodeUnbound
from intellect_protocol.ledger.records import Case, RecordedCheckpoint, WorkCommit
from intellect_protocol.ledger.typed_data import decision_typed_data, work_typed_data
from intellect_protocol.messages import CaseJob, CaseVerdict, RootJob, RootVerdict
from intellect_protocol.run import RunConfig
from intellect_protocol.validation.findings import Outcome
from intellect_protocol.validation.pipeline import Judgement
from intellect_protocol.wire import sha256
from intellect_protocol.work_file import VersionWork, WorkFile, read_work_file, work_entries

from .evidence import CheckedEvidence, read_evidence
from .judging import UnitClaims
from .public_record import PublicRecord
from .stake_book import StakeBook
from .validator_log import ValidatorLog

FINAL_OUTCOMES = ("accepted", "rejected", "suspect")


class UnitJudge(Protocol):
    """What is needed of `judging.Judge`."""

    async def judge(self, file: bytes, claims: UnitClaims, secret: bytes) -> Judgement: ...


def claims_of(checked: CheckedEvidence) -> UnitClaims:
    """The unit that a bundle accuses."""
    evidence = checked.evidence
    return UnitClaims(
        version=evidence.version,
        checkpoint_hash=checked.checkpoint_hash,
        block_hash=evidence.block_hash,
        node=evidence.node,
        index=evidence.index,
        file_hash=evidence.file_hash,
        size_bytes=evidence.size_bytes,
        work_signature=evidence.work_signature,
    )


class Reviewer:
    """Decides cases and checks work files for one validator key."""

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        signer: Signer,
        judge: UnitJudge,
        log: ValidatorLog,
        record: PublicRecord,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._signer = signer
        self._judge = judge
        self._log = log
        self._record = record

    async def review_case(self, job: CaseJob, bundle: bytes) -> CaseVerdict:
        """Decide a case, or abstain where the fault is ours.

        Raises:
            UnreachableError: the chain does not answer.
        """
        case = await self._ledger.case(job.case_id)
        if not case.status.ongoing:
            return self._abstain(job, "the case has ended")
        if sha256(bundle) != case.evidence_hash:
            return self._abstain(job, "the bundle is not the evidence of the case")
        try:
            checked = await trio.to_thread.run_sync(read_evidence, bundle)
        except InvalidDataError as error:
            return self._decide(case, False, str(error))
        if checked.config.run_id != self._config.run_id:
            return self._decide(case, False, "the evidence is of another run")
        objection = await self._objection(case, checked)
        if objection is not None:
            return self._decide(case, False, objection)
        judgement = await self._judge.judge(checked.evidence.file, claims_of(checked), checked.verdict.secret)
        if judgement.outcome is Outcome.INCONCLUSIVE:
            return self._abstain(job, judgement.fault)
        if not judgement.fraud:
            return self._decide(case, False, f"judged again: {judgement.outcome.value}, no fraud")
        codes = sorted({finding.code for finding in judgement.findings})
        return self._decide(case, True, f"judged again: {', '.join(codes)}")

    async def _objection(self, case: Case, checked: CheckedEvidence) -> str | None:
        """Why the ledger does not bear the accusation out, or None."""
        evidence = checked.evidence
        node = checksum_address(evidence.node)
        if case.node != node:
            return "the case accuses another node key than the evidence"
        recorded = await self._ledger.checkpoint(self._config.run_id, evidence.version)
        if recorded is None or recorded.checkpoint_hash != checked.checkpoint_hash:
            return f"version {evidence.version} is recorded with another checkpoint"
        if recorded.block_hash != evidence.block_hash:
            return f"version {evidence.version} was recorded in another block"
        if await self._owner_at(node, recorded) != case.accused:
            return "the node key was not the accused's when the version was recorded"
        return None

    async def _owner_at(self, node: str, recorded: RecordedCheckpoint) -> str | None:
        binding = await self._ledger.node(node)
        if binding is not None and binding.bound_block < recorded.block_number:
            return binding.owner
        # Unbound or bound anew since: only the events tell whose it was.
        book = StakeBook()
        book.apply(await self._ledger.events(0, recorded.block_number, NodeBound, NodeUnbound))
        return book.owner_at(node, recorded.block_number)

    def _decide(self, case: Case, uphold: bool, text: str) -> CaseVerdict:
        terms = self._config.terms.ledger
        typed = decision_typed_data(terms.chain_id, terms.contracts["SlashCourt"], case, uphold)
        return CaseVerdict(case.case_id, uphold, self._signer.sign_typed(typed), text[:500])

    @staticmethod
    def _abstain(job: CaseJob, text: str) -> CaseVerdict:
        return CaseVerdict(job.case_id, False, b"", text[:500])

    async def review_root(self, job: RootJob, content: bytes) -> RootVerdict:
        """Sign a work file's roots, or say why not.

        Raises:
            UnreachableError: the chain does not answer.
        """
        members = await self._ledger.validator_set()
        try:
            if sha256(content) != job.data_hash:
                raise InvalidDataError("the file does not have the announced hash")
            file = await trio.to_thread.run_sync(
                read_work_file, content, self._config.run_id, members.members
            )
            for work in file.versions:
                await self._check_on_ledger(work)
                await trio.to_thread.run_sync(self._check_against_memory, work)
                report = await self._record.check(work)
                if report.problems:
                    raise InvalidDataError(f"audits of version {work.version}: {report.problems[0]}")
        except InvalidDataError as error:
            return RootVerdict(job.data_hash, b"", str(error)[:500])
        return RootVerdict(job.data_hash, self._sign_root(file, job.data_hash, members.set_id), "")

    async def _check_on_ledger(self, work: VersionWork) -> None:
        if await self._ledger.checkpoint(self._config.run_id, work.version) is None:
            raise InvalidDataError(f"version {work.version} is not on the ledger")
        record = await self._ledger.work(self._config.run_id, work.version)
        if record.committed_at != 0 or record.revision != work.revision:
            raise InvalidDataError(
                f"the work of version {work.version} is committed, or has another revision"
            )

    def _check_against_memory(self, work: VersionWork) -> None:
        """Nothing we judged or were shown may be missing or turned around."""
        for receipt in self._log.receipts(work.version):
            if not work.names(receipt.node, receipt.index, receipt.file_hash):
                raise InvalidDataError(
                    f"unit {receipt.version}/{receipt.index} of {receipt.node} has a receipt and is missing"
                )
        attempts = {(each.leaf.node, each.leaf.index): each.attempt for each in work.leaves}
        for mine in self._log.verdicts(work.version):
            if mine.outcome not in FINAL_OUTCOMES:
                continue
            name = f"unit {mine.version}/{mine.index} of {mine.node}"
            if not work.names(mine.node, mine.index, mine.file_hash):
                raise InvalidDataError(f"{name}: judged here and missing")
            # A later attempt than ours may decide otherwise; an earlier one was superseded by ours.
            if attempts.get((mine.node, mine.index), mine.attempt) < mine.attempt:
                raise InvalidDataError(f"{name}: our later verdict is left out")

    def _sign_root(self, file: WorkFile, data_hash: bytes, set_id: int) -> bytes:
        terms = self._config.terms.ledger
        commit = WorkCommit(self._config.run_id, set_id, work_entries(file, data_hash))
        return self._signer.sign_typed(work_typed_data(terms.chain_id, terms.contracts["WorkLedger"], commit))
