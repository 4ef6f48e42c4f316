"""The generator: policy by policy and unit by unit, and what it waits for in between.

    waiting for a policy --ready--> loading --probe right--> generating <--> paused (says for what)
                                       └--probe wrong, twice--> not ready (until the next policy)
    generating --engine failed--> loading; after `engine_failures` on one unit it is abandoned

With `self_check` a unit is judged by the validators' own checks before it is signed, on the engine that made
it: a unit that they would refuse is a failure of the engine like any other, and costs nothing but its work.

One unit is in the making at a time. When a newer policy is ready it is taken after the current unit, which
is still submitted: it was made within the run's async level.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import trio

from intellect_protocol.errors import EngineError, InvalidDataError, UnreachableError
from intellect_protocol.keys import address_bytes
from intellect_protocol.rollouts import write_unit
from intellect_protocol.run import RunConfig

from .bell import Bell
from .entries import REFUSED, SIGNED
from .history import History
from .outbox import Outbox, now_ms
from .own_checks import self_check
from .prepare import PreparedNode
from .rollout import Policy, PolicyEngine, Tasks, UnitBuilder
from .status import NodeStatus, Speed
from .weights import PolicyFollower

if TYPE_CHECKING:
    from intellect_protocol.engines.supervisor import EngineOptions

BuilderFactory = Callable[[RunConfig, bytes, PolicyEngine, Tasks], UnitBuilder]

_CLOSED_VERSIONS_KEPT = 64


class Generator:
    """The service that makes units."""

    def __init__(
        self,
        node: PreparedNode,
        history: History,
        follower: PolicyFollower,
        outbox: Outbox,
        status: NodeStatus,
        *,
        changed: Bell,
        say: Callable[[str], None],
        builder_factory: BuilderFactory,
    ) -> None:
        """
        Args:
            changed: rung by others when anything this service may wait for has changed.
            say: tells the operator what happened.
        """
        self._node = node
        self._settings = node.settings
        self._run = node.run
        self._history = history
        self._follower = follower
        self._outbox = outbox
        self._status = status
        self._changed = changed
        self._say = say
        self._factory = builder_factory
        self._closed: dict[int, str] = {}  # version -> why no more units of it can be made
        self._expected: tuple[int, int] | None = None
        self._extra = 0  # units of the loaded version beyond `max_units_ahead`
        self.speed = Speed()

    def close_version(self, version: int, reason: str) -> None:
        """No more units of this version can be made."""
        self._closed[version] = reason
        while len(self._closed) > _CLOSED_VERSIONS_KEPT:
            del self._closed[min(self._closed)]

    def expect(self, version: int, index: int) -> None:
        """The coordinator expects unit `index` of `version` next; lower ones are never made again."""
        self._expected = (version, index)

    async def run(self) -> None:
        """Generate for ever.

        Raises:
            PreflightError, ConfigError: no engine can be run here as asked.
            HistoryError: another answer was signed for a unit.
        """
        from intellect_protocol.engines.supervisor import open_engine
        from intellect_protocol.environments.tasks import load_tasks

        async with open_engine(self._engine_options()) as engine:
            policy = await self._first_policy()
            tasks = await trio.to_thread.run_sync(load_tasks, self._run.terms, policy.folder)
            node = address_bytes(self._node.identity.node.address)
            await self.generate_with(self._factory(self._run, node, engine, tasks))

    async def _first_policy(self) -> Policy:
        while True:
            heard = self._changed.listen()
            if self._follower.ready is not None:
                return self._follower.ready
            self._state("waiting", self._follower.problem or "the first policy")
            await heard.wait()

    def _engine_options(self) -> EngineOptions:
        from intellect_protocol.engines.supervisor import EngineOptions

        settings = self._settings
        return EngineOptions(
            engine=settings.engine,
            device=settings.device,
            dtype=self._run.terms.model.dtype,
            threads=settings.engine_threads or default_threads(os.environ),
            max_rows=settings.engine_rows,
            stall_s=settings.stall_s,
        )

    async def generate_with(self, builder: UnitBuilder) -> None:
        """Make unit after unit with a builder whose engine is open, for ever."""
        loaded: Policy | None = None
        unfit: int | None = None  # version whose weights this engine could not prove
        failures: dict[tuple[int, int], int] = {}
        while True:
            heard = self._changed.listen()
            ready = self._follower.ready
            if (
                ready is not None
                and ready.version != unfit
                and (loaded is None or loaded.version != ready.version)
            ):
                loaded = await self._load(builder, ready)
                unfit = ready.version if loaded is None else None
            if loaded is None:
                self._state("not ready", f"policy {(unfit or 0) + 1}: policy {unfit} does not pass its probe")
                await heard.wait()
                continue
            index, reason = await self._next_unit(loaded)
            if reason:
                self._state("paused", reason)
                pause_s = self._settings.ahead_pause_s
                with trio.move_on_after(math.inf if pause_s is None else pause_s):
                    await heard.wait()
                    continue
                # The head has not moved for a while: the trainer may find too few groups of use.
                self._extra += 1
                continue
            self._state("generating", "")
            try:
                await self._make(builder, loaded, index)
            except EngineError as error:
                key = (loaded.version, index)
                failures = {key: failures.get(key, 0) + 1}
                self._say(f"engine failed on unit {key[0]}/{index} ({failures[key]}): {error}")
                if failures[key] >= self._settings.engine_failures:
                    await self._abandon(loaded.version, index)
                loaded = None

    async def _load(self, builder: UnitBuilder, policy: Policy) -> Policy | None:
        """The policy, loaded and proven; None if it cannot be."""
        self._state("loading", "")
        self._follower.use(policy)
        try:
            await builder.adopt(policy)
        except EngineError as error:
            self._say(f"policy {policy.version}: {error}; fetching and loading it again")
            try:
                await builder.engine.unload()
                policy = await self._follower.refetch(policy.version)
                await builder.adopt(policy)
            except (EngineError, UnreachableError, InvalidDataError) as second:
                self._say(f"policy {policy.version} is not usable here: {second}")
                self._status.version = -1
                return None
        self._status.version = policy.version
        self._extra = 0
        self._status.device, self._status.dtype = builder.engine.info.device, builder.engine.info.dtype
        return policy

    async def _next_unit(self, policy: Policy) -> tuple[int, str]:
        """Index of the next unit of a policy, and why it must wait ("" if it need not)."""
        version, settings = policy.version, self._settings
        head = self._follower.head_version
        if version < head - self._run.revision.window.async_level:
            return 0, f"policy {head}" + (f" ({self._follower.problem})" if self._follower.problem else "")
        upcoming = max(head, version + 1)
        if version in self._closed:
            return 0, f"policy {upcoming}: {self._closed[version]}"
        if self._node.entitled_since >= policy.block_number:
            return 0, f"policy {upcoming}: this node was registered after policy {version} was recorded"
        if self._status.coordinator_seen_ms is None:
            return 0, "the coordinator, to learn which unit it expects"
        made, waiting, index = await trio.to_thread.run_sync(self._progress, version)
        if self._expected is not None and self._expected[0] == version:
            index = max(index, self._expected[1])
        if index >= self._run.revision.window.units_per_version:
            return index, f"policy {upcoming}: all units of policy {version} are made"
        if waiting >= settings.max_unreceipted:
            return index, f"the coordinator: {waiting} units are not receipted ({self._outbox.last_error})"
        if self._is_ahead(version, made):
            return index, f"policy {upcoming}: {made} units of policy {version} are made; training goes on"
        return index, ""

    def _is_ahead(self, version: int, made: int) -> bool:
        settings = self._settings
        if not settings.pause_when_ahead or version != self._follower.head_version:
            return False
        return made >= settings.max_units_ahead + self._extra

    def _progress(self, version: int) -> tuple[int, int, int]:
        """Units of a version that were made; units of all versions not receipted; next index."""
        of_version = self._history.counts(version)
        made = sum(count for state, count in of_version.items() if state != REFUSED)
        return made, self._history.counts().get(SIGNED, 0), self._history.next_index(version)

    async def _make(self, builder: UnitBuilder, policy: Policy, index: int) -> None:
        unit = await builder.build(policy, index)
        self.speed.add(sum(len(row.completion_tokens) for row in unit.rows))
        content = await trio.to_thread.run_sync(write_unit, unit)
        if self._settings.self_check:
            await self._check(builder, policy, index, content)
        await trio.to_thread.run_sync(
            self._history.sign_work,
            self._node.identity.node,
            self._run.run_id,
            policy.version,
            policy.checkpoint_hash,
            index,
            content,
            now_ms(),
        )
        self._outbox.wake()
        reward = sum(row.reward for row in unit.rows) / len(unit.rows)
        self._say(f"made unit {policy.version}/{index}: {len(unit.rows)} rollouts, mean reward {reward:.3f}")

    async def _check(self, builder: UnitBuilder, policy: Policy, index: int, content: bytes) -> None:
        """
        Raises:
            EngineError: a validator would refuse the unit; it is made again like one whose engine failed.
        """
        doubt = await self_check(
            self._run, builder.tasks, builder.node, policy, index, content, builder.engine
        )
        if doubt:
            self._say(f"unit {policy.version}/{index} is near a limit: {doubt}")

    async def _abandon(self, version: int, index: int) -> None:
        await trio.to_thread.run_sync(self._history.sign_abandon, version, index, now_ms())
        self._say(f"abandoned unit {version}/{index}: the engine fails on it again and again")
        self._outbox.wake()

    def _state(self, state: str, waiting_for: str) -> None:
        if waiting_for and (state, waiting_for) != (self._status.state, self._status.waiting_for):
            self._say(
                f"waiting for {waiting_for}" if state == "waiting" else f"{state}: waiting for {waiting_for}"
            )
        self._status.state, self._status.waiting_for = state, waiting_for


def default_threads(environ: Mapping[str, str]) -> int:
    """OMP_NUM_THREADS where it is set, as for every program that computes; else one per physical core."""
    named = environ.get("OMP_NUM_THREADS", "")
    if named.isdecimal() and int(named) > 0:
        return int(named)
    import psutil

    return psutil.cpu_count(logical=False) or 1
