"""Following the head of the run: the newest version is fetched while the engine works on the last one.

    (nothing) -- head announced --> fetching v -- verified, on disk --> ready v --> fetching v' --> ready v'
                                       └-- no peer has it, bad data --> waiting (back-off) --> fetching

`ready` is the second buffer: the generating service takes it between two units. Versions in between are
skipped; what is being fetched is finished even if the head moves on meanwhile, because its chunks are what
other peers ask for and the base of the next patch.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import trio

from intellect_protocol.checkpoint import Manifest, SignedManifest
from intellect_protocol.errors import (
    InvalidDataError,
    ManifestError,
    PreflightError,
    RefusedError,
    UnreachableError,
)
from intellect_protocol.ledger.records import RecordedCheckpoint
from intellect_protocol.messages import Announcement

from .bell import Bell
from .rollout import Policy

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 15.0

logger = logging.getLogger(__name__)


class Heads(Protocol):
    """What of `network.head.HeadTracker` is used here."""

    head: Announcement | None

    async def wait_newer_than(self, version: int) -> Announcement: ...
    async def recorded(self, version: int) -> RecordedCheckpoint | None: ...
    async def manifest(
        self, checkpoint: bytes, *, deadline_s: float = ...
    ) -> tuple[SignedManifest, Manifest]: ...


class Policies(Protocol):
    """What of `network.policy.PolicyWeights` is used here."""

    async def obtain(self, version: int) -> Path: ...
    def retain(self, versions: list[int]) -> None: ...


class PolicyFollower:
    """Keeps the newest verified policy on disk."""

    def __init__(
        self,
        heads: Heads,
        policies: Policies,
        *,
        retain_versions: int,
        changed: Bell,
        tell: Callable[[str], None],
        rng: random.Random | None = None,
    ) -> None:
        """
        Args:
            changed: rung when a policy becomes ready or a fetch fails.
        """
        self._heads = heads
        self._policies = policies
        self._retain_versions = retain_versions
        self._changed = changed
        self._tell = tell
        self._rng = rng or random.Random()
        self._had: list[int] = []
        self._in_use: int | None = None
        self.ready: Policy | None = None
        self.problem = ""  # why the head is not here, "" while all goes well

    @property
    def head_version(self) -> int:
        """Newest version known to the swarm, -1 if none."""
        return -1 if self._heads.head is None else self._heads.head.version

    async def run(self) -> None:
        """Follow for ever; what peers or disk get wrong is told and tried again."""
        failures = 0
        while True:
            have = -1 if self.ready is None else self.ready.version
            head = await self._heads.wait_newer_than(have)
            try:
                policy = await self.obtain(head.version)
            except (UnreachableError, InvalidDataError, RefusedError, PreflightError) as error:
                failures += 1
                await self._pause(head.version, str(error), failures)
                continue
            failures, self.problem = 0, ""
            self.ready = policy
            self._had.append(policy.version)
            self._pin()
            self._changed.ring()

    async def obtain(self, version: int) -> Policy:
        """Fetch and verify a version; what is on disk already is checked and kept.

        Raises:
            UnreachableError: no peer has it, or the chain does not answer.
            ManifestError: it does not verify, or the ledger does not know it.
            PreflightError: the disk refuses.
        """
        recorded = await self._heads.recorded(version)
        if recorded is None:
            raise ManifestError(f"version {version} is not on the ledger")
        _, manifest = await self._heads.manifest(recorded.checkpoint_hash)
        folder = await self._policies.obtain(version)
        return Policy(
            version=version,
            checkpoint_hash=recorded.checkpoint_hash,
            block_hash=recorded.block_hash,
            block_number=recorded.block_number,
            folder=folder,
            probe=manifest.probe,
        )

    async def refetch(self, version: int) -> Policy:
        """Drop a version's files and make them anew from verified chunks.

        Raises:
            As `obtain`.
        """
        self._policies.retain(sorted(self._pinned() - {version}))
        policy = await self.obtain(version)
        self._pin()
        return policy

    def use(self, policy: Policy) -> None:
        """The engine is about to load this version: keep it."""
        self._in_use = policy.version
        self._pin()

    def _pin(self) -> None:
        self._had = self._had[-self._retain_versions :]
        self._policies.retain(sorted(self._pinned()))

    def _pinned(self) -> set[int]:
        return set(self._had) | ({self._in_use} if self._in_use is not None else set())

    async def _pause(self, version: int, text: str, failures: int) -> None:
        self.problem = f"cannot get policy {version}: {text}"
        self._changed.ring()
        if failures == 1:
            self._tell(self.problem)
        logger.info("%s", self.problem)
        longest = min(_FIRST_PAUSE_S * 2.0 ** min(failures, 20), _LONGEST_PAUSE_S)
        await trio.sleep(longest * self._rng.uniform(0.5, 1.0))
