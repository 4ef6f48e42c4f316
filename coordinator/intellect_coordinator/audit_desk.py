"""The coordinator's side of the audit share: who is drawn, and the seed that says so afterwards.

A unit is drawn in the transaction that admits it, so the draw is as durable as the receipt. The rule and its
reasons are in `intellect_protocol.validation.audit_share`; where the run has no audit terms, every unit is
audited and nothing is revealed.
"""

from __future__ import annotations

from typing import Protocol

import trio
from sqlalchemy import Connection, func, select

from intellect_protocol.errors import ConfigError
from intellect_protocol.keys import Signer
from intellect_protocol.ledger.records import CourtTerms, RecordedCheckpoint
from intellect_protocol.messages import SubmissionState
from intellect_protocol.run import AuditTerms, RunConfig
from intellect_protocol.validation.audit_share import SeedChain, audit_share, draw, unverified_gain

from . import schema
from .root_state import RootState
from .stake_book import StakeBook
from .submissions import NewSubmission

_SUBMISSIONS = schema.submissions


class Caps(Protocol):
    """What is needed of `ledger.Ledger`."""

    async def court_terms(self) -> CourtTerms: ...


class AuditDesk:
    """Draws units for audits and reveals the seeds of closed versions."""

    def __init__(self, config: RunConfig, signer: Signer, book: StakeBook, ledger: Caps) -> None:
        """
        Args:
            signer: the coordinator's key, from which the seeds follow.
            book: of the ledger's newest block, kept up to date by its owner.
        """
        self._config = config
        self._signer = signer
        self._book = book
        self._ledger = ledger
        self._chain: SeedChain | None = None
        self._caps: CourtTerms | None = None

    async def open(self) -> None:
        """Build the seeds and read the court's caps; nothing to do without audit terms.

        Raises:
            ConfigError: this key's seeds are not those that the run's anchor commits to.
            UnreachableError: the chain does not answer.
        """
        terms = self._config.revision.audit
        if not isinstance(terms, AuditTerms):
            return
        self._caps = await self._ledger.court_terms()
        chain = await trio.to_thread.run_sync(
            SeedChain, self._signer, self._config.run_id, terms.first_version
        )
        if chain.anchor != terms.anchor:
            raise ConfigError("the run's audit.anchor does not commit to the seeds of this coordinator's key")
        self._chain = chain

    @property
    def reveals(self) -> bool:
        """Whether seeds are revealed, which closes a version and all before it for good."""
        return isinstance(self._config.revision.audit, AuditTerms)

    def slashable(self, owner: str, recorded: RecordedCheckpoint) -> int:
        """What a case of fraud could take from an owner, in 10^-18 token: when the version was recorded, or
        now if that is less."""
        if self._caps is None:
            return 0
        at_record = self._book.slashable(owner, self._caps, recorded.block_number)
        return min(at_record, self._book.slashable(owner, self._caps))

    def receipt_time(self, connection: Connection, new: NewSubmission, now_ms: int) -> int:
        """The time of a unit's receipt: no two units of an owner and version share one, whatever the clock
        does, because their order counts."""
        if self._config.audit_of(new.unit.version) is None:
            return now_ms
        last = connection.scalar(
            select(func.max(_SUBMISSIONS.c.received_at_ms)).where(
                _SUBMISSIONS.c.owner == new.owner, _SUBMISSIONS.c.version == new.unit.version
            )
        )
        return now_ms if last is None else max(now_ms, int(last) + 1)

    def is_drawn(self, connection: Connection, new: NewSubmission, slashable: int) -> bool:
        """Whether a unit that is about to be admitted is to be audited."""
        unit = new.unit
        terms = self._config.audit_of(unit.version)
        if terms is None:
            return True
        if self._chain is None:
            raise RuntimeError("the audit desk is not open")
        open_versions = self._config.revision.window.async_level + 1
        mine = _SUBMISSIONS.c.owner == new.owner
        count = select(func.count()).where(mine)
        # Only what everybody can count: acceptances behind roots on the ledger.
        published = select(schema.roots.c.version).where(schema.roots.c.state == RootState.COMMITTED)
        accepted = connection.scalar(
            count.where(
                _SUBMISSIONS.c.state == SubmissionState.ACCEPTED,
                _SUBMISSIONS.c.version <= unit.version - open_versions,
                _SUBMISSIONS.c.version.in_(published),
            )
        )
        earlier = connection.scalar(count.where(_SUBMISSIONS.c.version == unit.version))
        share = audit_share(
            terms,
            accepted=int(accepted or 0),
            gain=unverified_gain(terms, int(earlier or 0) + 1, open_versions),
            slashable=slashable,
        )
        seed = self._chain.seed(unit.version)
        return draw(self._config.run_id, seed, unit.version, unit.node, unit.index, new.file_hash) < share

    def seed(self, version: int) -> bytes | None:
        """What the work file of a closed version reveals; None where every unit is audited."""
        if self._chain is None or self._config.audit_of(version) is None:
            return None
        return self._chain.seed(version)
