"""The door: what a node hands in is admitted, stored, and only then receipted.

Order of a submission's checks, cheapest first and each with its own code: shape and size, the same content
again (same receipt), another content for the same unit (`conflicting_submission`), hash, work signature,
the recorded checkpoint, the window, standing, the order of indices, the owner's cap, room on disk. What
can change between the checks and the commit (order, cap, a twin of the same unit) is checked again inside
the transaction that admits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec
import trio
from sqlalchemy import Connection, func, insert, select

from intellect_protocol.errors import RefusedError
from intellect_protocol.keys import Signer, address_bytes, receipt_digest
from intellect_protocol.ledger.records import RecordedCheckpoint
from intellect_protocol.messages import (
    Abandon,
    AbandonResult,
    Announcement,
    GetVerdicts,
    GetVerdictsResult,
    Precommit,
    PrecommitResult,
    Receipt,
    Submit,
)
from intellect_protocol.run import RunConfig
from intellect_protocol.validation.admission import WindowState, check_window, check_work_signature
from intellect_protocol.validation.findings import Finding
from intellect_protocol.wire import sha256

from . import jobs, precommits, schema, submissions
from .audit_desk import AuditDesk
from .blobs import BlobStore
from .standing import Standing
from .store import Record, Store
from .submissions import NewSubmission, Unit

_PRECOMMITS_AHEAD = 8  # units of a node and version whose upload may be under way at once
_MAX_STATUSES = 500
_SOON_S = 1.0


def now_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000


class Versions(Protocol):
    """Which versions there are; `network.head.HeadTracker` has it."""

    head: Announcement | None

    async def recorded(self, version: int) -> RecordedCheckpoint | None: ...


class IntakeLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the coordinator takes in before it says that it is busy."""

    pending_submissions: int = 4096
    busy_retry_s: float = 5.0


class Intake:
    """Requests by which nodes hand in work. `node` is always the verified signer of the request."""

    def __init__(
        self,
        store: Store,
        blobs: BlobStore,
        standing: Standing,
        versions: Versions,
        config: RunConfig,
        signer: Signer,
        bell: jobs.Bell,
        audits: AuditDesk,
        *,
        limits: IntakeLimits | None = None,
        clock_ms: Callable[[], int] = now_ms,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._standing = standing
        self._versions = versions
        self._run_id = config.run_id
        self._window = config.revision.window
        self._signer = signer
        self._limits = limits or IntakeLimits()
        self._clock_ms = clock_ms
        self._bell = bell
        self._audits = audits

    async def precommit(self, node: str, message: Precommit) -> PrecommitResult:
        """Hold the deadline of a unit whose upload is under way.

        Raises:
            RefusedError: no standing, out of window or order, or the unit is taken.
        """
        self._check_shape(message.version, message.index, message.file_hash, message.size_bytes)
        unit = Unit(address_bytes(node), message.version, message.index)
        recorded = await self._recorded(message.version)
        owner = await self._standing.check(node, recorded)
        return PrecommitResult(
            await self._store.write(partial(self._hold, unit=unit, owner=owner, message=message))
        )

    def _hold(self, connection: Connection, unit: Unit, owner: str, message: Precommit) -> int:
        now = self._clock_ms()
        if submissions.find(connection, unit) is not None:
            raise RefusedError("already_submitted", f"unit {unit.version}/{unit.index} is submitted already")
        held = precommits.held(connection, unit, now)
        if held is not None:
            if (held.file_hash, held.size_bytes) != (message.file_hash, message.size_bytes):
                raise RefusedError(
                    "conflicting_precommit",
                    f"unit {unit.version}/{unit.index} is promised to another file",
                    retry_after_s=(held.deadline_ms - now) / 1000,
                )
            return int(held.deadline_ms)
        self._check_open(connection, unit.version)
        expected = submissions.next_index(connection, unit.node, unit.version)
        ahead = unit.index - expected
        # Uploads may overlap, so a promise may run a little ahead of the order.
        self._check_window(unit, unit.index if 0 <= ahead < _PRECOMMITS_AHEAD else expected)
        self._check_cap(connection, owner, unit.version, ahead=max(ahead, 0))
        deadline = now + int(self._window.precommit_ttl_s * 1000)
        precommits.hold(connection, unit, message.file_hash, message.size_bytes, deadline)
        return deadline

    async def submit(self, node: str, message: Submit, body: bytes) -> Receipt:
        """Admit one unit of work; it is on disk when this returns.

        Raises:
            RefusedError: not admitted; the code says which check refused.
        """
        self._check_shape(message.version, message.index, message.file_hash, message.size_bytes)
        unit = Unit(address_bytes(node), message.version, message.index)
        earlier = await self._store.read(partial(submissions.find, unit=unit))
        if earlier is not None:
            return self._same(earlier, message)
        if len(body) != message.size_bytes:
            raise RefusedError("wrong_size", f"the file has {len(body)} bytes, not {message.size_bytes}")
        if await trio.to_thread.run_sync(sha256, body) != message.file_hash:
            raise RefusedError("wrong_hash", "the file does not have the hash that was announced")
        recorded = await self._recorded(message.version)
        if message.checkpoint_hash != recorded.checkpoint_hash:
            raise RefusedError(
                "wrong_checkpoint",
                f"made with another checkpoint than the recorded version {message.version}",
            )
        refuse(
            check_work_signature(
                self._run_id,
                message.version,
                message.checkpoint_hash,
                message.index,
                message.file_hash,
                message.size_bytes,
                message.work_signature,
                unit.node,
            )
        )
        owner = await self._standing.check(node, recorded)
        new = NewSubmission(
            unit=unit,
            owner=owner,
            checkpoint_hash=message.checkpoint_hash,
            block_hash=recorded.block_hash,
            file_hash=message.file_hash,
            size_bytes=message.size_bytes,
            work_signature=message.work_signature,
        )
        # Refused before the file is kept, where it will be; a twin may have come in since.
        given = await self._store.read(partial(self._receipt_or_check, new=new, message=message))
        if given is not None:
            return given
        if not await trio.to_thread.run_sync(self._blobs.has_room, len(body)):
            raise RefusedError("no_room", "the coordinator's disk is full", self._limits.busy_retry_s)
        await trio.to_thread.run_sync(self._blobs.put, body)
        slashable = self._audits.slashable(owner, recorded)
        receipt = await self._store.write(partial(self._admit, new=new, message=message, slashable=slashable))
        self._bell.ring()
        return receipt

    def _receipt_or_check(
        self, connection: Connection, new: NewSubmission, message: Submit
    ) -> Receipt | None:
        twin = submissions.find(connection, new.unit)
        if twin is not None:
            return self._same(twin, message)
        self._check_admission(connection, new, self._clock_ms())
        return None

    def _admit(self, connection: Connection, new: NewSubmission, message: Submit, slashable: int) -> Receipt:
        given = self._receipt_or_check(connection, new, message)
        if given is not None:
            return given
        now, unit = self._clock_ms(), new.unit
        received = self._audits.receipt_time(connection, new, now)
        digest = receipt_digest(self._run_id, unit.version, unit.index, unit.node, new.file_hash, received)
        signature = self._signer.sign_digest(digest)
        audit = self._audits.is_drawn(connection, new, slashable)
        submission_id = submissions.add(connection, new, received, signature, audit=audit)
        jobs.add_judge(connection, self._run_id, unit, new.file_hash, submission_id, attempt=0, now_ms=now)
        return Receipt(self._run_id, unit.version, unit.index, unit.node, new.file_hash, received, signature)

    def _same(self, row: Record, message: Submit) -> Receipt:
        """The receipt given before, if the content is the same.

        Raises:
            RefusedError: it is not.
        """
        if row.file_hash != message.file_hash:
            raise RefusedError(
                "conflicting_submission",
                f"unit {row.version}/{row.unit_index} was submitted with another file",
            )
        return Receipt(
            self._run_id,
            row.version,
            row.unit_index,
            row.node,
            row.file_hash,
            row.received_at_ms,
            row.receipt_signature,
        )

    def _check_admission(self, connection: Connection, new: NewSubmission, now: int) -> None:
        unit = new.unit
        held = precommits.held(connection, unit, now)
        if held is not None and (held.file_hash, held.size_bytes) != (new.file_hash, new.size_bytes):
            raise RefusedError(
                "conflicting_precommit",
                f"unit {unit.version}/{unit.index} is promised to another file",
                retry_after_s=(held.deadline_ms - now) / 1000,
            )
        self._check_open(connection, unit.version)
        expected = submissions.next_index(connection, unit.node, unit.version)
        self._check_window(unit, expected, promised=held is not None)
        self._check_cap(connection, new.owner, unit.version)
        if submissions.pending_count(connection) >= self._limits.pending_submissions:
            raise RefusedError("busy", "too many submissions wait for a verdict", self._limits.busy_retry_s)

    async def abandon(self, node: str, message: Abandon) -> AbandonResult:
        """Close one index without work.

        Raises:
            RefusedError: no standing, out of window or order, or too many are abandoned.
        """
        if message.version < 0 or message.index < 0:
            raise RefusedError("malformed", "version and index are not negative")
        recorded = await self._recorded(message.version)
        owner = await self._standing.check(node, recorded)
        unit = Unit(address_bytes(node), message.version, message.index)
        return AbandonResult(await self._store.write(partial(self._close, unit=unit, owner=owner)))

    def _close(self, connection: Connection, unit: Unit, owner: str) -> int:
        table = schema.abandons
        mine = (table.c.node == unit.node) & (table.c.version == unit.version)
        used = int(connection.scalar(select(func.count()).where(mine)) or 0)
        left = self._window.abandons_per_version - used
        if connection.scalar(select(func.count()).where(mine & (table.c.unit_index == unit.index))):
            return left  # the same word again
        if submissions.find(connection, unit) is not None:
            raise RefusedError("already_submitted", f"unit {unit.version}/{unit.index} is submitted already")
        self._check_window(unit, submissions.next_index(connection, unit.node, unit.version))
        if left <= 0:
            raise RefusedError(
                "abandons_exhausted", f"{used} units of version {unit.version} are abandoned already"
            )
        self._check_cap(connection, owner, unit.version)
        connection.execute(
            insert(table).values(
                node=unit.node,
                owner=owner,
                version=unit.version,
                unit_index=unit.index,
                at_ms=self._clock_ms(),
            )
        )
        return left - 1

    async def verdicts(self, node: str, message: GetVerdicts) -> GetVerdictsResult:
        """The caller's units that changed since its cursor."""
        limit = min(max(message.limit, 1), _MAX_STATUSES)
        step = partial(
            submissions.statuses_since, node=address_bytes(node), cursor=message.cursor, limit=limit
        )
        entries, cursor, more = await self._store.read(step)
        return GetVerdictsResult(entries, cursor, more)

    async def next_index(self, node: str) -> int:
        """The index expected next of a node for the head version; 0 while there is none."""
        head = self._versions.head
        if head is None:
            return 0
        step = partial(submissions.next_index, node=address_bytes(node), version=head.version)
        return await self._store.read(step)

    def _check_shape(self, version: int, index: int, file_hash: bytes, size_bytes: int) -> None:
        if not 0 <= version < 1 << 63 or not 0 <= index < 1 << 32 or len(file_hash) != 32:
            raise RefusedError("malformed", "version, index or file hash out of range")
        if not 0 < size_bytes <= self._window.max_submission_bytes:
            raise RefusedError(
                "too_large",
                f"{size_bytes} bytes; a submission has at most {self._window.max_submission_bytes}",
            )

    async def _recorded(self, version: int) -> RecordedCheckpoint:
        recorded = await self._versions.recorded(version)
        if recorded is None:
            raise RefusedError(
                "unknown_version", f"version {version} is not recorded on the ledger", retry_after_s=1.0
            )
        return recorded

    def _check_window(self, unit: Unit, next_index: int, *, promised: bool = False) -> None:
        """Check 3; the version of a unit under an open precommit counts as the precommit found it."""
        head = self._versions.head
        newest = -1 if head is None else head.version
        state = WindowState(
            head=unit.version if promised else newest,
            async_level=self._window.async_level,
            recorded_hash=b"",
            next_index=next_index,
        )
        refuse(check_window(unit.version, b"", unit.index, state))

    def _check_open(self, connection: Connection, version: int) -> None:
        """A version whose draws are revealed takes nothing more, whatever this process knows of the head."""
        last = connection.scalar(select(func.max(schema.roots.c.version))) if self._audits.reveals else None
        if last is not None and version <= last:
            raise RefusedError("stale_version", f"version {version} is closed: its work file is published")

    def _check_cap(self, connection: Connection, owner: str, version: int, *, ahead: int = 0) -> None:
        used = submissions.units_of_owner(connection, owner, version) + ahead
        if used >= self._window.units_per_version:
            raise RefusedError(
                "unit_cap",
                f"{owner} has used its {self._window.units_per_version} units of version {version}",
            )


def refuse(findings: list[Finding]) -> None:
    """
    Raises:
        RefusedError: there is a finding; the first one gives code and text.
    """
    for finding in findings:
        retry_after_s = _SOON_S if finding.code == "future_version" else None
        raise RefusedError(finding.code, finding.text, retry_after_s)
