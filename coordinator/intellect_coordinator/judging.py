"""A validator's own view of a unit: its engine, its copy of the weights, the checks.

The engine child is started for the first unit and swapped from version to version. What goes wrong on this
side (no weights, a dead engine, a full disk) makes a verdict inconclusive and is never held against a node.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import trio

from intellect_protocol.engines.base import EngineInfo, RowScore, Sampling, ScoreRow
from intellect_protocol.errors import IntellectError
from intellect_protocol.messages import JudgeVerdict
from intellect_protocol.rollouts import Batch, BatchMeta, write_batch
from intellect_protocol.run import RunConfig
from intellect_protocol.validation.context import Tasks, UnitContext
from intellect_protocol.validation.findings import Outcome, to_notes
from intellect_protocol.validation.pipeline import Judgement, validate_unit
from intellect_protocol.wire import sha256

if TYPE_CHECKING:
    from intellect_protocol.engines.supervisor import EngineClient, EngineOptions

_BATCH_FORMAT = 1
_SECRET_BYTES = 16
_SCORE_DEADLINE_S = 600.0

logger = logging.getLogger(__name__)


class UnitClaims(msgspec.Struct, frozen=True):
    """What is to be judged, apart from the file: as in a `JudgeJob` or an evidence bundle."""

    version: int
    checkpoint_hash: bytes
    block_hash: bytes
    node: bytes
    index: int
    file_hash: bytes
    size_bytes: int
    work_signature: bytes


class Policies(Protocol):
    """Where weights come from; `network.policy.PolicyWeights` is one."""

    async def obtain(self, version: int) -> Path: ...


class Judge:
    """Judges units under the weights of their version; used as an async context manager."""

    def __init__(self, config: RunConfig, policies: Policies, engine: EngineOptions) -> None:
        self._config = config
        self._policies = policies
        self._options = engine
        self._stack = AsyncExitStack()
        self._client: EngineClient | None = None
        self.placed: int | None = None  # version in the engine
        self._tasks: Tasks | None = None
        self._lock = trio.Lock()
        self.judged = 0
        self.tokens = 0
        self.busy_s = 0.0

    async def __aenter__(self) -> Judge:
        return self

    async def __aexit__(self, *exc: object) -> None:
        with trio.CancelScope(shield=True):
            await self._stack.aclose()

    @property
    def engine_info(self) -> EngineInfo | None:
        """What the engine says of itself; None while no unit has come as far as to need it."""
        return None if self._client is None or self.placed is None else self._client.info

    async def judge(self, file: bytes, claims: UnitClaims, secret: bytes, *, audit: bool = True) -> Judgement:
        """Run all checks on a unit, or all but the forward pass.

        Args:
            secret: chooses where the commitments' negative check looks; the same secret, the same verdict.
            audit: whether checks 10 to 12 run.
        """
        try:
            tasks = await self._obtain_tasks(claims.version)
        except (IntellectError, OSError) as error:
            return Judgement(Outcome.INCONCLUSIVE, fault=f"no weights of version {claims.version}: {error}")
        context = UnitContext(
            run=self._config,
            version=claims.version,
            checkpoint_hash=claims.checkpoint_hash,
            block_hash=claims.block_hash,
            node=claims.node,
            index=claims.index,
            file_hash=claims.file_hash,
            size_bytes=claims.size_bytes,
            work_signature=claims.work_signature,
            tasks=tasks,
            secret=secret,
        )
        return await validate_unit(file, context, _VersionScorer(self, claims.version) if audit else None)

    async def verdict(
        self, file: bytes, claims: UnitClaims, validator: str, *, audit: bool = True
    ) -> tuple[JudgeVerdict, bytes]:
        """A unit's verdict, and the batch file for the trainer if it is accepted (else b"")."""
        started = time.monotonic()
        secret = secrets.token_bytes(_SECRET_BYTES)
        judgement = await self.judge(file, claims, secret, audit=audit)
        if judgement.fault:
            logger.warning("unit %d/%d: %s", claims.version, claims.index, judgement.fault)
        batch = b""
        if judgement.outcome is Outcome.ACCEPTED:
            batch = await trio.to_thread.run_sync(self._batch, judgement, claims, validator, audit)
        seconds = time.monotonic() - started
        self.judged += 1
        self.tokens += judgement.tokens
        self.busy_s += seconds
        verdict = JudgeVerdict(
            outcome=judgement.outcome.value,
            fraud=judgement.fraud,
            findings=to_notes(judgement.findings),
            batch_hash=sha256(batch) if batch else b"",
            rows=len(judgement.rows) if batch else 0,
            tokens=judgement.tokens if batch else 0,
            seconds=round(seconds, 3),
            secret=secret,
            audited=msgspec.UNSET if audit else False,
        )
        return verdict, batch

    def _batch(self, judgement: Judgement, claims: UnitClaims, validator: str, audit: bool) -> bytes:
        meta = BatchMeta(
            format=_BATCH_FORMAT,
            run_id=self._config.run_id,
            version=claims.version,
            checkpoint_hash=claims.checkpoint_hash,
            node=claims.node,
            index=claims.index,
            file_hash=claims.file_hash,
            validator=validator,
            audited=audit,
        )
        return write_batch(Batch(meta, judgement.rows))

    async def _obtain_tasks(self, version: int) -> Tasks:
        """The run's environments with its tokenizer, which is the same in every checkpoint."""
        if self._tasks is None:
            from intellect_protocol.environments.tasks import load_tasks

            folder = await self._policies.obtain(version)
            self._tasks = await trio.to_thread.run_sync(load_tasks, self._config.terms, folder)
        assert self._tasks is not None
        return self._tasks

    async def prepare(self, version: int) -> None:
        """Start the engine with a version, so that the first unit does not wait for it.

        Raises:
            IntellectError: no weights, or an engine that does not come up.
        """
        await self._obtain_tasks(version)
        folder = await self._policies.obtain(version)
        async with self._lock:
            await self._place(version, folder)

    async def _place(self, version: int, folder: Path) -> EngineClient:
        client = await self._started()
        if self.placed != version:
            # Whatever happens from here on, the old version is no longer known to be in place.
            first, self.placed = self.placed is None, None
            await (client.load(folder) if first else client.update(folder))
            self.placed = version
        return client

    async def score(
        self, version: int, rows: Sequence[ScoreRow], sampling: Sampling, secret: bytes
    ) -> list[RowScore]:
        """Score rows under the weights of a version, fetching and placing them first where needed."""
        folder = await self._policies.obtain(version)
        async with self._lock:
            client = await self._place(version, folder)
            return await client.score(rows, sampling, secret=secret, deadline_s=_SCORE_DEADLINE_S)

    async def _started(self) -> EngineClient:
        if self._client is None:
            from intellect_protocol.engines.supervisor import open_engine

            self._client = await self._stack.enter_async_context(open_engine(self._options))
        return self._client


class _VersionScorer:
    """The judge's engine, bound to one version."""

    def __init__(self, judge: Judge, version: int) -> None:
        self._judge = judge
        self._version = version

    async def score(self, rows: Sequence[ScoreRow], sampling: Sampling, secret: bytes) -> list[RowScore]:
        return await self._judge.score(self._version, rows, sampling, secret)
