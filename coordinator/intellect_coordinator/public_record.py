"""What anybody can know about a run's owners: the ledger's events and the published work files.

Validators check with it that a version was audited as its draws demand before they sign its root, and
`intellect-coordinator audit-draws` does the same for everybody else. Nothing here asks the coordinator for
anything but files that the ledger names by their hash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Protocol

import msgspec
import trio

from intellect_protocol.errors import InvalidDataError, UnreachableError
from intellect_protocol.ledger.events import CheckpointRecorded, LedgerEvent, SetAppointed
from intellect_protocol.ledger.records import Block, CourtTerms
from intellect_protocol.network.work_files import (
    FetchWorkFile,
    open_work_files,
    standing_hashes,
    voided_work,
    without_voided,
)
from intellect_protocol.run import RunConfig
from intellect_protocol.validation.audit_draws import DrawReport, OwnerFacts, check_draws
from intellect_protocol.work_file import VersionWork, WorkFile, read_work_file

from .stake_book import StakeBook


class PublicLedger(Protocol):
    """What is needed of `ledger.Ledger`."""

    async def block(self, number: int | str = "latest") -> Block: ...

    async def events(
        self, from_block: int, to_block: int, *kinds: type[LedgerEvent]
    ) -> list[LedgerEvent]: ...

    async def court_terms(self) -> CourtTerms: ...


class _Credits(msgspec.Struct, frozen=True):
    """One version of a published file: how many units of each node were accepted."""

    version: int
    revision: int
    accepted: dict[str, int]


class PublicRecord:
    """Follows the ledger and reads each published work file once."""

    def __init__(self, config: RunConfig, ledger: PublicLedger, fetch: FetchWorkFile) -> None:
        self._config = config
        self._ledger = ledger
        self._fetch = fetch
        self._events: list[LedgerEvent] = []
        self._book = StakeBook()
        self._recorded: dict[int, int] = {}  # version -> block
        self._next_block = 0
        self._caps: CourtTerms | None = None
        self._credits: dict[bytes, list[_Credits]] = {}
        self._lock = trio.Lock()

    async def check(self, work: VersionWork) -> DrawReport:
        """Repeat the draws of a version whose file need not be on the ledger yet.

        Raises:
            UnreachableError: the chain does not answer, or nobody gives a work file that is needed.
            InvalidDataError: a published file is malformed.
        """
        if self._config.audit_of(work.version) is None:
            return check_draws(self._config, work, {})
        nodes = {judged.leaf.node for judged in work.leaves} | {unit.node for unit in work.unjudged}
        facts = await self.owner_facts(work.version, nodes)
        return await trio.to_thread.run_sync(check_draws, self._config, work, facts)

    async def owner_facts(self, version: int, nodes: Collection[str]) -> dict[str, OwnerFacts]:
        """What was public about the owners of these nodes when a version was recorded; a node that had none
        is left out. Errors as `check`."""
        async with self._lock:
            await self._sync()
            block = self._recorded.get(version)
            if block is None or self._caps is None:
                return {}
            closed = version - self._config.revision.window.async_level - 1
            accepted = self._accepted(await self._standing_credits(), closed)
            owners = {node: self._book.owner_at(node, block) for node in nodes}
            return {
                node: OwnerFacts(owner, accepted[owner], self._book.slashable(owner, self._caps, block))
                for node, owner in owners.items()
                if owner is not None
            }

    async def published(self) -> list[VersionWork]:
        """All work that stands on the ledger, by version. Errors as `check`."""
        async with self._lock:
            await self._sync()
            files = [await self._file(digest) for digest in standing_hashes(self._events, self._run_id)]
        works = [work for file in files for work in without_voided(file, self._events).versions]
        return sorted(works, key=lambda work: work.version)

    @property
    def _run_id(self) -> bytes:
        return self._config.run_id

    async def _sync(self) -> None:
        if self._caps is None:
            self._caps = await self._ledger.court_terms()
        newest = (await self._ledger.block()).number
        if newest < self._next_block:
            return
        found = await self._ledger.events(self._next_block, newest)
        self._book.apply(found)
        for event in found:
            if isinstance(event, CheckpointRecorded) and event.run_id == self._run_id:
                self._recorded.setdefault(event.version, event.block_number)
        self._events += found
        self._next_block = newest + 1

    async def _standing_credits(self) -> list[_Credits]:
        found = []
        for digest in standing_hashes(self._events, self._run_id):
            if digest not in self._credits:
                file = await self._file(digest)
                self._credits[digest] = [
                    _Credits(
                        work.version,
                        work.revision,
                        Counter(each.leaf.node for each in work.leaves if each.leaf.accepted),
                    )
                    for work in file.versions
                ]
            found += self._credits[digest]
        voided = voided_work(self._events, self._run_id)
        return [credit for credit in found if (credit.version, credit.revision) not in voided]

    def _accepted(self, credits: list[_Credits], last: int) -> Counter[str]:
        """Accepted units by owner in versions up to `last`; a node's units count for whose it was then."""
        accepted: Counter[str] = Counter()
        for credit in credits:
            block = self._recorded.get(credit.version)
            if credit.version <= last and block is not None:
                for node, count in credit.accepted.items():
                    owner = self._book.owner_at(node, block)
                    if owner is not None:
                        accepted[owner] += count
        return accepted

    async def _file(self, digest: bytes) -> WorkFile:
        content = await self._fetch(digest)
        if content is None:
            raise UnreachableError(f"nobody gives the published work file {digest.hex()}")
        members = {
            member for event in self._events if isinstance(event, SetAppointed) for member in event.members
        }
        return await trio.to_thread.run_sync(read_work_file, content, self._run_id, members)


async def published_draws(config: RunConfig, version: int | None = None) -> list[DrawReport]:
    """Repeat the draws of all published versions, or of one, over the chain and the peers the run names.

    Raises:
        UnreachableError: the chain or all peers do not answer, or a published file cannot be had.
        InvalidDataError: a published file is malformed, or the version is not published.
    """
    from intellect_protocol.ledger.client import Ledger
    from intellect_protocol.ledger.deployment import Deployment

    terms = config.terms.ledger
    ledger = Ledger(
        config.revision.rpc_urls, Deployment(terms.chain_id, dict(terms.contracts), block=0), None
    )
    try:
        async with open_work_files(config) as fetch:
            record = PublicRecord(config, ledger, fetch)
            works = await record.published()
            if version is not None:
                works = [work for work in works if work.version == version]
                if not works:
                    raise InvalidDataError(f"the work of version {version} is not on the ledger")
            return [await record.check(work) for work in works]
    finally:
        ledger.close()
