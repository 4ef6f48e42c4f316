"""From a verdict of fraud to a seized stake, in steps that survive a kill at any point.

    found -> built -> open -> upheld | dismissed | expired
      |                ^
      v                | (ledger)
    recorded

`found`     a validator's verdict of fraud is stored; one per owner goes on, further ones wait here
`built`     the evidence bundle is on disk and hashed
`open`      the court has the case and has frozen the amount; every validator but the reporter replays it
`recorded`  the owner was barred by another case: nothing more to gain

The ledger's word wins: what a case is, is read from the court before anything is done about it, and each
transaction is named by its content, so a repeated step joins the first. The coordinator only reports and
carries signatures; it has no vote.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

import trio
from sqlalchemy import Connection, func, insert, select, update

from intellect_protocol.checkpoint import Manifest, SignedManifest
from intellect_protocol.errors import IntellectError, InvalidDataError, LedgerError
from intellect_protocol.keys import Signer, checksum_address
from intellect_protocol.ledger.records import Case, CaseStatus, Offence, RecordedCheckpoint, ValidatorSetState
from intellect_protocol.ledger.typed_data import decision_typed_data, order_signatures, recover_typed
from intellect_protocol.run import RunConfig

from . import evidence, jobs, schema, submissions
from .blobs import BlobStore
from .store import Record, Store, add_event

_CASES = schema.cases
_POLL_S = 1.0
_TOO_EARLY = ("SlashCourtWindowOpen", "SlashCourtVotingOpen")
_TOKEN_UNIT = 10**18
# The court clips what a case puts at risk to its own cap, whose largest value this is.
_ALL = 2**96 - 1

logger = logging.getLogger(__name__)


class CaseState(StrEnum):
    """Where a case of ours stands; see the module."""

    FOUND = "found"
    BUILT = "built"
    OPEN = "open"
    UPHELD = "upheld"
    DISMISSED = "dismissed"
    EXPIRED = "expired"
    RECORDED = "recorded"


UNDER_WAY = (CaseState.BUILT, CaseState.OPEN)
_ENDS = {
    CaseStatus.UPHELD: CaseState.UPHELD,
    CaseStatus.DISMISSED: CaseState.DISMISSED,
    CaseStatus.EXPIRED: CaseState.EXPIRED,
}


class Court(Protocol):
    """What is needed of `ledger.Ledger`."""

    async def open_case(
        self,
        reporter: Signer,
        accused_owner: str,
        node: str,
        amount: int,
        kind: Offence,
        evidence_hash: bytes,
    ) -> int: ...

    async def case(self, case_id: int) -> Case: ...

    async def decide(
        self, signer: Signer, case_id: int, uphold: bool, signatures: tuple[bytes, ...]
    ) -> object: ...

    async def expire(self, signer: Signer, case_id: int) -> object: ...

    async def validator_set(self, set_id: int | None = None) -> ValidatorSetState: ...

    async def is_barred(self, owner: str) -> bool: ...

    async def block_time(self) -> int: ...


class Manifests(Protocol):
    """What is needed of `network.head.HeadTracker`."""

    async def recorded(self, version: int) -> RecordedCheckpoint | None: ...

    async def manifest(self, checkpoint: bytes) -> tuple[SignedManifest, Manifest]: ...


def note_fraud(connection: Connection, row: Record, job_id: bytes, code: str, now_ms: int) -> None:
    """Write down a fraud; call in the transaction that stores its verdict."""
    connection.execute(
        insert(_CASES).values(
            submission_id=row.id,
            job_id=job_id,
            owner=row.owner,
            node=row.node,
            code=code,
            state=CaseState.FOUND,
            seized="0",
            found_at_ms=now_ms,
        )
    )


class Slashing:
    """Carries cases through the court."""

    def __init__(
        self,
        store: Store,
        blobs: BlobStore,
        ledger: Court,
        manifests: Manifests,
        config: RunConfig,
        signer: Signer,
        bell: jobs.Bell,
        *,
        concluded: Callable[[int], Awaitable[None]],
        clock_ms: Callable[[], int],
    ) -> None:
        """
        Args:
            concluded: called with a submission's id when its case has been opened or has ended.
        """
        self._store = store
        self._blobs = blobs
        self._ledger = ledger
        self._manifests = manifests
        self._config = config
        self._run_id = config.run_id
        self._signer = signer
        self._bell = bell
        self._concluded = concluded
        self._clock_ms = clock_ms
        self._failures: dict[int, str] = {}

    async def run(self) -> None:
        """Carry all cases forward until cancelled."""
        while True:
            await self.step()
            await trio.sleep(_POLL_S)

    async def step(self) -> None:
        """One step for every unfinished case; one that cannot go on now does not stop the others."""
        for row in await self._store.read(_unfinished):
            try:
                await self._advance(row)
                self._failures.pop(row.id, None)
            except IntellectError as error:
                # Said once per reason: the step is repeated every second.
                if self._failures.get(row.id) != str(error):
                    self._failures[row.id] = str(error)
                    logger.warning("case of %s does not go on: %s", row.owner, error)

    async def _advance(self, row: Record) -> None:
        if row.state == CaseState.FOUND:
            if await self._ledger.is_barred(row.owner):
                await self._set(row, state=CaseState.RECORDED)
            elif not await self._store.read(partial(_has_case_under_way, owner=row.owner)):
                digest = await self._build(row)
                await self._set(row, state=CaseState.BUILT, evidence_hash=digest)
        elif row.state == CaseState.BUILT:
            await self._open(row)
        else:
            await self._follow(row)

    async def _build(self, row: Record) -> bytes:
        submission, verdict, job = await self._store.read(partial(_facts, row=row))
        recorded = await self._manifests.recorded(submission.version)
        if recorded is None or recorded.checkpoint_hash != submission.checkpoint_hash:
            raise InvalidDataError(f"version {submission.version} is not on the ledger as it was worked on")
        signed, _ = await self._manifests.manifest(submission.checkpoint_hash)

        def build() -> bytes:
            file = self._blobs.get(submission.file_hash, max_bytes=submission.size_bytes)
            if file is None:
                raise InvalidDataError("the rollout file is gone from the disk")
            content = evidence.write_evidence(
                evidence.Evidence(
                    format=evidence.FORMAT,
                    run_config=self._config.to_toml().encode(),
                    manifest=signed.manifest,
                    manifest_signature=signed.signature,
                    block_number=recorded.block_number,
                    block_hash=recorded.block_hash,
                    node=submission.node,
                    owner=submission.owner,
                    version=submission.version,
                    index=submission.unit_index,
                    file_hash=submission.file_hash,
                    size_bytes=submission.size_bytes,
                    work_signature=submission.work_signature,
                    file=file,
                    attempt=job.attempt,
                    validator=verdict.validator,
                    verdict=verdict.content,
                    verdict_signature=verdict.signature,
                )
            )
            evidence.read_evidence(content)
            return self._blobs.put(content)

        return await trio.to_thread.run_sync(build)

    async def _open(self, row: Record) -> None:
        node = checksum_address(row.node)
        case_id = await self._ledger.open_case(
            self._signer, row.owner, node, _ALL, Offence.FRAUD, row.evidence_hash
        )
        text = f"case {case_id} opened against {row.owner} for node 0x{row.node.hex()}: {row.code}"

        def step(connection: Connection) -> None:
            _update(connection, row.id, state=CaseState.OPEN, case_id=case_id, opened_at_ms=self._clock_ms())
            submissions.set_case(connection, row.submission_id, case_id)
            add_event(connection, self._clock_ms(), text)

        await self._store.write(step)
        await self._concluded(row.submission_id)
        await self._follow(await self._store.read(partial(_case_row, case=row.id)))

    async def _follow(self, row: Record) -> None:
        case = await self._ledger.case(row.case_id)
        if not case.status.ongoing:
            await self._end(row, case)
            return
        members = await self._ledger.validator_set(case.set_id)
        voters = [member for member in members.members if member != case.reporter]
        if row.defence_hash != case.defence_hash:
            await self._store.write(partial(self._ask, row=row, case=case, voters=voters))
            self._bell.ring()
        now_s = max(await self._ledger.block_time(), self._clock_ms() // 1000)
        try:
            if now_s > case.decide_by:
                await self._ledger.expire(self._signer, case.case_id)
            else:
                await self._try_to_decide(row, case, voters, members.threshold, now_s)
        except LedgerError as error:
            if error.name not in _TOO_EARLY:
                raise
        case = await self._ledger.case(row.case_id)
        if not case.status.ongoing:
            await self._end(row, case)

    def _ask(self, connection: Connection, row: Record, case: Case, voters: list[str]) -> None:
        """Queue the replay for every voter; after an appeal, anew: it changes what they sign."""
        attempt = 0 if case.defence_hash == bytes(32) else 1
        jobs.withdraw_case(connection, row.evidence_hash)
        for voter in voters:
            jobs.add_case(connection, self._run_id, row.evidence_hash, voter, attempt, self._clock_ms())
        _update(connection, row.id, defence_hash=case.defence_hash)

    async def _try_to_decide(
        self, row: Record, case: Case, voters: list[str], quorum: int, now_s: int
    ) -> None:
        terms = self._config.terms.ledger
        court = terms.contracts["SlashCourt"]
        decisions = await self._store.read(partial(_decisions, evidence_hash=row.evidence_hash))
        for uphold in (False, True):
            if uphold and case.status is not CaseStatus.APPEALED and now_s <= case.window_ends_at:
                continue
            typed = decision_typed_data(terms.chain_id, court, case, uphold)
            valid = [each for each in decisions if recover_typed(typed, each) in voters]
            signatures = order_signatures(typed, valid)
            if len(signatures) >= quorum:
                await self._ledger.decide(self._signer, case.case_id, uphold, signatures)
                return

    async def _end(self, row: Record, case: Case) -> None:
        tokens = case.seized / _TOKEN_UNIT
        text = {
            CaseStatus.UPHELD: f"node 0x{row.node.hex()} slashed {tokens:.1f}: {row.code}",
            CaseStatus.DISMISSED: f"case {case.case_id} dismissed: {row.owner} keeps its stake",
            CaseStatus.EXPIRED: f"case {case.case_id} expired without a decision",
        }[case.status]

        def step(connection: Connection) -> None:
            _update(
                connection,
                row.id,
                state=_ENDS[case.status],
                seized=str(case.seized),
                ended_at_ms=self._clock_ms(),
            )
            jobs.withdraw_case(connection, row.evidence_hash)
            submissions.set_case(connection, row.submission_id, case.case_id)
            add_event(connection, self._clock_ms(), text)

        await self._store.write(step)
        await self._concluded(row.submission_id)

    async def _set(self, row: Record, **values: Any) -> None:
        await self._store.write(lambda connection: _update(connection, row.id, **values))


def _unfinished(connection: Connection) -> list[Record]:
    states = (CaseState.FOUND, *UNDER_WAY)
    return list(connection.execute(select(_CASES).where(_CASES.c.state.in_(states)).order_by(_CASES.c.id)))


def _case_row(connection: Connection, case: int) -> Record:
    return connection.execute(select(_CASES).where(_CASES.c.id == case)).one()


def _has_case_under_way(connection: Connection, owner: str) -> bool:
    return bool(
        connection.scalar(select(func.count()).where(_CASES.c.owner == owner, _CASES.c.state.in_(UNDER_WAY)))
    )


def _update(connection: Connection, case: int, **values: Any) -> None:
    connection.execute(update(_CASES).where(_CASES.c.id == case).values(**values))


def _facts(connection: Connection, row: Record) -> tuple[Record, Record, Record]:
    """Submission, verdict and job behind a case."""
    submission = submissions.get(connection, row.submission_id)
    verdict = connection.execute(select(schema.verdicts).where(schema.verdicts.c.job_id == row.job_id)).one()
    job = jobs.get(connection, row.job_id)
    assert submission is not None
    assert job is not None
    return submission, verdict, job


def _decisions(connection: Connection, evidence_hash: bytes) -> list[bytes]:
    table = schema.verdicts
    found = connection.scalars(
        select(table.c.decision).where(table.c.evidence_hash == evidence_hash, table.c.decision.is_not(None))
    )
    return [bytes(decision) for decision in found]
