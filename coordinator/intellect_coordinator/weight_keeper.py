"""Which versions a validator holds: those that are judged now, and those whose evidence may be replayed.

Nobody else may have a version any more by the time a case about it is decided, so every validator fetches
the weights of refused work at once and keeps them for as long as a case may take to turn up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from intellect_protocol.errors import IntellectError
from intellect_protocol.messages import SubmissionState

from .judging import Judge

if TYPE_CHECKING:
    from intellect_protocol.network.swarm import Swarm

_HOLD_AFTER_REFUSAL_S = 900.0
_SPARE_VERSIONS = 3  # behind the oldest that is still accepted: uploads and verdicts lag

logger = logging.getLogger(__name__)


class WeightKeeper:
    """Fetches weights ahead of need and lets go of those nobody needs."""

    def __init__(self, swarm: Swarm, judge: Judge, async_level: int) -> None:
        self._swarm = swarm
        self._judge = judge
        self._async_level = async_level
        self._in_use: list[int] = []
        self._held: dict[int, float] = {}  # version -> until when (monotonic)
        self._retained: set[int] = set()

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Keep a version while it is judged."""
        self._in_use.append(version)
        try:
            yield
        finally:
            self._in_use.remove(version)

    async def prefetch(self) -> None:
        """Have each version's weights (and an engine that is up) before a unit made with it arrives."""
        version = -1
        while True:
            version = (await self._swarm.heads.wait_newer_than(version)).version
            await self._obtain(version)
            if self._judge.placed is None:
                try:
                    await self._judge.prepare(version)
                except IntellectError as error:
                    logger.warning("preparing the engine: %s", error)

    async def hold_refused(self) -> None:
        """Hold the weights of refused work."""
        async for notice in self._swarm.verdicts():
            if notice.state is SubmissionState.REJECTED:
                self._held[notice.version] = time.monotonic() + _HOLD_AFTER_REFUSAL_S
                await self._obtain(notice.version)

    def retain(self) -> None:
        """Let go of the weights that nobody needs."""
        keep = self._needed()
        policies = self._swarm.policies
        if policies is None or not keep or keep == self._retained:
            return
        try:
            policies.retain(keep)
            self._retained = keep
        except IntellectError as error:
            logger.warning("%s", error)

    def _needed(self) -> set[int]:
        head = self._swarm.heads.head
        if head is None:
            return set()
        now = time.monotonic()
        self._held = {version: until for version, until in self._held.items() if until > now}
        oldest = max(0, head.version - self._async_level - _SPARE_VERSIONS)
        keep = {*range(oldest, head.version + 1), *self._held, *self._in_use}
        if self._judge.placed is not None:
            keep.add(self._judge.placed)
        return keep

    async def _obtain(self, version: int) -> None:
        assert self._swarm.policies is not None
        try:
            await self._swarm.policies.obtain(version)
        except IntellectError as error:
            logger.info("weights of version %d: %s", version, error)
