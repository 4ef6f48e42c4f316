"""Work roots: what was judged for a version goes on the ledger once nothing can be added to it.

A version is closed when the head has left its window, no submission of it waits for a verdict and no upload
is promised. The closed versions of an interval share one work file, one round of signatures and one
transaction, because a commitment costs nearly the same whatever it covers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec
import trio
from sqlalchemy import Connection, func, insert, select, update

from intellect_protocol.errors import IntellectError, LedgerError
from intellect_protocol.keys import Signer, checksum_address
from intellect_protocol.ledger.merkle import WorkLeaf
from intellect_protocol.ledger.records import ValidatorSetState, WorkCommit, WorkEntry, WorkRecord
from intellect_protocol.ledger.typed_data import order_signatures, recover_typed, work_typed_data
from intellect_protocol.messages import SubmissionState
from intellect_protocol.run import RunConfig
from intellect_protocol.work_file import (
    MAX_VERSIONS,
    AbandonedUnit,
    AuditReveal,
    JudgedLeaf,
    UnjudgedUnit,
    VersionWork,
    read_work_file,
    work_entries,
    write_work_file,
)

from . import jobs, schema, submissions
from .audit_desk import AuditDesk
from .blobs import BlobStore
from .intake import Versions
from .root_state import RootState
from .store import Record, Store, add_event

_ROOTS = schema.roots
_SUBMISSIONS = schema.submissions

logger = logging.getLogger(__name__)


class WorkChain(Protocol):
    """What is needed of `ledger.Ledger`."""

    async def work(self, run_id: bytes, version: int) -> WorkRecord: ...

    async def validator_set(self, set_id: int | None = None) -> ValidatorSetState: ...

    async def commit_work(
        self, signer: Signer, commit: WorkCommit, signatures: tuple[bytes, ...]
    ) -> object: ...


class Roots:
    """Proposes work roots and commits those that a quorum signed."""

    def __init__(
        self,
        store: Store,
        blobs: BlobStore,
        ledger: WorkChain,
        versions: Versions,
        config: RunConfig,
        signer: Signer,
        bell: jobs.Bell,
        audits: AuditDesk,
        *,
        interval_s: float = 10.0,
        clock_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._ledger = ledger
        self._versions = versions
        self._config = config
        self._run_id = config.run_id
        self._signer = signer
        self._bell = bell
        self._audits = audits
        self._interval_s = interval_s
        self._clock_ms = clock_ms
        self._last_problem = ""

    async def run(self) -> None:
        """Propose and commit until cancelled."""
        last_proposal = -self._interval_s
        while True:
            try:
                await self.commit_signed()
                if trio.current_time() - last_proposal >= self._interval_s:
                    last_proposal = trio.current_time()
                    await self.propose()
                self._last_problem = ""
            except IntellectError as error:
                if str(error) != self._last_problem:
                    self._last_problem = str(error)
                    logger.warning("work roots do not go on: %s", error)
            await trio.sleep(min(1.0, self._interval_s))

    async def propose(self) -> bytes | None:
        """Put all closed versions into one work file and ask the validators to sign it.

        Returns:
            The file's hash, or None if there is nothing to propose.
        """
        head = self._versions.head
        if head is None:
            return None
        last = head.version - self._config.revision.window.async_level - 1
        # A seed tells those of all versions before it.
        in_order = self._audits.reveals
        step = partial(closed_versions, last=last, now_ms=self._clock_ms(), in_order=in_order)
        versions = await self._store.read(step)
        works = []
        for version in versions[:MAX_VERSIONS]:
            record = await self._ledger.work(self._run_id, version)
            if record.committed_at == 0:
                seed = self._audits.seed(version)
                read = partial(version_work, version=version, revision=record.revision, seed=seed)
                works.append(await self._store.read(read))
            else:
                logger.warning("version %d is committed on the ledger but not here", version)
        if not works:
            return None
        members = await self._ledger.validator_set()
        content = write_work_file(self._run_id, works)
        digest = await trio.to_thread.run_sync(self._blobs.put, content)
        # The validators will be as strict: better to fail here.
        file = await trio.to_thread.run_sync(read_work_file, content, self._run_id, members.members)
        entries = work_entries(file, digest)
        await self._store.write(partial(self._insert, entries=entries, members=members))
        self._bell.ring()
        return digest

    def _insert(
        self, connection: Connection, entries: tuple[WorkEntry, ...], members: ValidatorSetState
    ) -> None:
        for entry in entries:
            connection.execute(
                insert(_ROOTS).values(
                    data_hash=entry.data_hash,
                    version=entry.version,
                    revision=entry.revision,
                    root=entry.root,
                    accepted=entry.accepted,
                    rejected=entry.rejected,
                    units=entry.units,
                    set_id=members.set_id,
                    attempt=0,
                    state=RootState.PROPOSED,
                    at_ms=self._clock_ms(),
                )
            )
        for member in members.members:
            jobs.add_root(connection, self._run_id, entries[0].data_hash, member, 0, self._clock_ms())

    async def commit_signed(self) -> None:
        """Commit every proposal that has a quorum's signatures."""
        for digest in await self._store.read(_proposed):
            await self._try_to_commit(digest)

    async def _try_to_commit(self, digest: bytes) -> None:
        rows, decisions = await self._store.read(partial(_proposal, data_hash=digest))
        members = await self._ledger.validator_set()
        if rows[0].set_id != members.set_id:
            await self._store.write(partial(self._ask_again, rows=rows, members=members))
            self._bell.ring()
            return
        commit = WorkCommit(self._run_id, members.set_id, tuple(_entry(row) for row in rows))
        terms = self._config.terms.ledger
        typed = work_typed_data(terms.chain_id, terms.contracts["WorkLedger"], commit)
        valid = [each for each in decisions if recover_typed(typed, each) in members.members]
        signatures = order_signatures(typed, valid)
        if len(signatures) < members.threshold:
            return
        try:
            await self._ledger.commit_work(self._signer, commit, signatures)
        except LedgerError as error:
            if error.name not in ("WorkLedgerAlreadyCommitted", "WorkLedgerWrongRevision"):
                raise
        state = RootState.COMMITTED
        for row in rows:
            # A kill between sending and this line, or another sender, makes the ledger the only judge.
            if (await self._ledger.work(self._run_id, row.version)).data_hash != digest:
                state = RootState.DROPPED
        await self._store.write(partial(self._conclude, rows=rows, state=state))

    def _ask_again(self, connection: Connection, rows: list[Record], members: ValidatorSetState) -> None:
        """Another validator set is in force: its members sign, under its id."""
        digest, attempt = rows[0].data_hash, rows[0].attempt + 1
        connection.execute(
            update(_ROOTS).where(_ROOTS.c.data_hash == digest).values(set_id=members.set_id, attempt=attempt)
        )
        jobs.withdraw_root(connection, digest)
        for member in members.members:
            jobs.add_root(connection, self._run_id, digest, member, attempt, self._clock_ms())

    def _conclude(self, connection: Connection, rows: list[Record], state: RootState) -> None:
        digest = rows[0].data_hash
        connection.execute(update(_ROOTS).where(_ROOTS.c.data_hash == digest).values(state=state))
        jobs.withdraw_root(connection, digest)
        versions = f"{rows[0].version}" if len(rows) == 1 else f"{rows[0].version} to {rows[-1].version}"
        accepted = sum(row.accepted for row in rows)
        rejected = sum(row.rejected for row in rows)
        text = (
            f"work of version {versions} is on the ledger: {accepted} accepted, {rejected} refused"
            if state is RootState.COMMITTED
            else f"work of version {versions} is on the ledger with other contents than ours"
        )
        add_event(connection, self._clock_ms(), text)


def closed_versions(connection: Connection, last: int, now_ms: int, *, in_order: bool = False) -> list[int]:
    """Versions up to `last` with work, nothing pending or promised, and no root proposed yet; ascending.

    Args:
        in_order: only those that no open version precedes.
    """
    settled = select(_ROOTS.c.version)
    pending = select(_SUBMISSIONS.c.version).where(_SUBMISSIONS.c.state.in_(submissions.PENDING))
    promises = schema.precommits
    submitted = (
        select(func.count())
        .where(
            _SUBMISSIONS.c.node == promises.c.node,
            _SUBMISSIONS.c.version == promises.c.version,
            _SUBMISSIONS.c.unit_index == promises.c.unit_index,
        )
        .scalar_subquery()
    )
    promised = select(promises.c.version).where(promises.c.deadline_ms >= now_ms, submitted == 0)
    query = (
        select(_SUBMISSIONS.c.version)
        .distinct()
        .where(
            _SUBMISSIONS.c.version <= last,
            _SUBMISSIONS.c.version.not_in(settled),
            _SUBMISSIONS.c.version.not_in(pending),
            _SUBMISSIONS.c.version.not_in(promised),
        )
        .order_by(_SUBMISSIONS.c.version)
    )
    closed = [int(version) for version in connection.scalars(query)]
    if in_order:
        still_open = [*connection.scalars(pending), *connection.scalars(promised)]
        closed = [version for version in closed if version < min(still_open, default=last + 1)]
    return closed


def version_work(
    connection: Connection, version: int, revision: int, seed: bytes | None = None
) -> VersionWork:
    """The work of a closed version, each leaf with the verdict that decided.

    Args:
        seed: of the version's audit draws; None where every unit is audited.
    """
    leaves, unjudged = [], []
    times: tuple[list[int], list[int]] = [], []
    rows = connection.execute(
        select(_SUBMISSIONS)
        .where(_SUBMISSIONS.c.version == version)
        .order_by(_SUBMISSIONS.c.unit_index, _SUBMISSIONS.c.node)
    ).all()
    for row in rows:
        node = checksum_address(row.node)
        if row.state == SubmissionState.INCONCLUSIVE:
            unjudged.append(UnjudgedUnit(node, row.unit_index, row.file_hash))
            times[1].append(row.received_at_ms)
            continue
        attempt, verdict = _deciding_verdict(connection, row.id)
        accepted = row.state == SubmissionState.ACCEPTED
        leaf = WorkLeaf(
            version=version,
            index=row.unit_index,
            node=node,
            work_hash=row.file_hash,
            accepted=accepted,
            units=row.rows if accepted else 0,
        )
        leaves.append(JudgedLeaf(leaf, attempt, verdict.content, verdict.signature))
        times[0].append(row.received_at_ms)
    table = schema.abandons
    abandoned = connection.execute(
        select(table.c.node, table.c.unit_index)
        .where(table.c.version == version)
        .order_by(table.c.unit_index, table.c.node)
    ).all()
    return VersionWork(
        version=version,
        revision=revision,
        leaves=leaves,
        abandoned=[AbandonedUnit(checksum_address(row.node), row.unit_index) for row in abandoned],
        unjudged=unjudged,
        reveal=msgspec.UNSET if seed is None else AuditReveal(seed, times[0] + times[1]),
    )


def _deciding_verdict(connection: Connection, submission_id: int) -> tuple[int, Record]:
    verdicts, table = schema.verdicts, schema.jobs
    row = connection.execute(
        select(verdicts, table.c.attempt)
        .join(table, table.c.id == verdicts.c.job_id)
        .where(verdicts.c.submission_id == submission_id, verdicts.c.outcome != "inconclusive")
        .order_by(table.c.attempt.desc())
        .limit(1)
    ).one()
    return row.attempt, row


def _proposed(connection: Connection) -> list[bytes]:
    query = select(_ROOTS.c.data_hash).distinct().where(_ROOTS.c.state == RootState.PROPOSED)
    return [bytes(digest) for digest in connection.scalars(query)]


def _proposal(connection: Connection, data_hash: bytes) -> tuple[list[Record], list[bytes]]:
    rows = connection.execute(
        select(_ROOTS).where(_ROOTS.c.data_hash == data_hash).order_by(_ROOTS.c.version)
    ).all()
    table = schema.verdicts
    decisions = connection.scalars(
        select(table.c.decision).where(table.c.data_hash == data_hash, table.c.decision.is_not(None))
    )
    return list(rows), [bytes(decision) for decision in decisions]


def _entry(row: Record) -> WorkEntry:
    return WorkEntry(
        version=row.version,
        revision=row.revision,
        root=row.root,
        data_hash=row.data_hash,
        accepted=row.accepted,
        rejected=row.rejected,
        units=row.units,
    )
