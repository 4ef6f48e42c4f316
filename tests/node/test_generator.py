"""What the generator makes, what it waits for, and what it does when the engine or the weights fail."""

import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
from example_run import COORDINATOR
from example_unit import CountingTasks, tiny_run

from intellect_node.bell import Bell
from intellect_node.config import NodeConfig
from intellect_node.entries import Entry, Kind
from intellect_node.generator import Generator
from intellect_node.history import History
from intellect_node.identity import open_identity
from intellect_node.outbox import Outbox
from intellect_node.prepare import PreparedNode
from intellect_node.rollout import UnitBuilder
from intellect_node.status import NodeStatus
from intellect_node.weights import PolicyFollower
from intellect_protocol.checkpoint import Manifest, Probe, SignedManifest
from intellect_protocol.engines.base import Completion, EngineInfo
from intellect_protocol.errors import EngineError, ManifestError, UnreachableError
from intellect_protocol.keys import LocalSigner
from intellect_protocol.ledger.records import RecordedCheckpoint
from intellect_protocol.messages import Announcement
from intellect_protocol.rollouts import FileLimits, read_unit

RUN = tiny_run(max_tokens=4)
LIMITS = FileLimits(max_rows=64, max_prompt_tokens=64, max_completion_tokens=64)


def hash_of(version: int) -> bytes:
    return bytes([version]) * 32


class Swarm:
    """Heads and weights of a run whose versions the test publishes; `broken` versions cannot be had."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.head: Announcement | None = None
        self.retained: list[int] = []
        self.obtained: list[int] = []
        self.broken: set[int] = set()
        self._changed = Bell()

    def publish(self, version: int) -> None:
        self.head = Announcement(RUN.run_id, version, hash_of(version), 1, b"")
        self._changed.ring()

    async def wait_newer_than(self, version: int) -> Announcement:
        while self.head is None or self.head.version <= version:
            await self._changed.listen().wait()
        return self.head

    async def recorded(self, version: int) -> RecordedCheckpoint | None:
        return RecordedCheckpoint(hash_of(version), 100 + version, hash_of(200 - version), 0)

    async def manifest(self, checkpoint: bytes, *, deadline_s: float = 0):
        probe = Probe([1, 2], [-float(checkpoint[0])])
        manifest = Manifest(1, RUN.run_id, checkpoint[0], None, [], 1, [], b"", b"", probe, [], 0, "")
        return SignedManifest(b"", b""), manifest

    async def obtain(self, version: int) -> Path:
        if version in self.broken:
            raise UnreachableError("nobody has it")
        self.obtained.append(version)
        return self.folder / str(version)

    def retain(self, versions: Iterable[int]) -> None:
        self.retained = list(versions)


class Engine:
    """Answers at once, unless told to fail, to wait, or to prove the wrong weights."""

    def __init__(self) -> None:
        self.loaded: Path | None = None
        self.failures: list[Exception] = []
        self.wrong: set[int] = set()
        self.gate: trio.Event | None = None
        self.entered = trio.Event()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("torch", "1", "float32", "eager", "cpu", "2", "qwen2", 1, 100, 64, 256, 8)

    async def update(self, checkpoint_dir: Path) -> EngineInfo:
        self.loaded = checkpoint_dir
        return self.info

    async def unload(self) -> None:
        self.loaded = None

    async def probe(self, prompt):
        assert self.loaded is not None
        version = int(self.loaded.name)
        return [0.0 if version in self.wrong else -float(version)]

    async def generate(self, requests, sampling):
        self.entered.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        await trio.lowlevel.checkpoint()
        return [[Completion([7, 1], [-0.5, -0.1], "stop", [bytes(258)]) for _ in r.seeds] for r in requests]


class Node:
    """A generator with everything around it, and what the test looks at."""

    def __init__(self, folder: Path, entitled_since: int = 0, seen: bool = True, **settings: object) -> None:
        self.settings = NodeConfig(**settings)
        self.told: list[str] = []
        self.identity = open_identity(folder, LocalSigner(b"\x55" * 32), self.told.append)
        node = PreparedNode(self.settings, RUN, folder, self.identity, entitled_since, 0, self.told.append)
        self.history = History(folder, RUN.run_id, self.identity.node.address)
        self.swarm, self.engine, self.changed = Swarm(folder), Engine(), Bell()
        self.status = NodeStatus(coordinator_seen_ms=1 if seen else None)
        self.follower = PolicyFollower(
            self.swarm,
            self.swarm,
            retain_versions=2,
            changed=self.changed,
            tell=self.told.append,
            rng=random.Random(0),
        )
        outbox = Outbox(
            self.history,
            _nobody,
            run_id=RUN.run_id,
            node=self.identity.node.address,
            coordinator=COORDINATOR.address,
            settings=self.settings,
            on_settled=lambda entry: None,
            on_refused=lambda entry, error: None,
        )
        self.generator = Generator(
            node,
            self.history,
            self.follower,
            outbox,
            self.status,
            changed=self.changed,
            say=self.told.append,
            builder_factory=UnitBuilder,
        )

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        builder = UnitBuilder(RUN, self.identity.node.address_bytes, self.engine, CountingTasks())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.follower.run)
            nursery.start_soon(self.generator.generate_with, builder)
            yield
            nursery.cancel_scope.cancel()
        self.history.close()
        self.identity.lock.release()

    def made(self) -> list[tuple[int, int]]:
        return sorted((entry.version, entry.index) for entry in self.history.entries())

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(30):
            while not condition():  # noqa: ASYNC110 - what is waited for is in a database, not an event
                await trio.sleep(0.002)

    async def paused(self, for_what: str) -> None:
        await self.until(lambda: self.status.state == "paused" and for_what in self.status.waiting_for)


async def _nobody(message, result_type, **options):
    raise UnreachableError("no coordinator in this test")


def settle(node: Node, entry: Entry) -> None:
    node.history.mark_received(entry, None, 1)
    node.changed.ring()


async def test_it_pauses_when_ahead_and_goes_on_with_the_next_policy(tmp_path: Path) -> None:
    node = Node(tmp_path, pause_when_ahead=True, max_units_ahead=3, max_unreceipted=100)
    async with node.working():
        node.swarm.publish(1)
        await node.paused("policy 2")
        assert node.made() == [(1, 0), (1, 1), (1, 2)]
        node.swarm.publish(2)
        await node.paused("policy 3")
        assert node.made() == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
        assert node.swarm.retained == [1, 2]


async def test_a_unit_under_way_when_the_head_moves_is_finished_and_signed_for_its_version(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, pause_when_ahead=True, max_units_ahead=1)
    node.engine.gate = trio.Event()
    async with node.working():
        node.swarm.publish(1)
        await node.engine.entered.wait()
        node.swarm.publish(2)
        await node.until(lambda: node.follower.ready is not None and node.follower.ready.version == 2)
        node.engine.gate.set()
        await node.paused("policy 3")
        assert node.made() == [(1, 0), (2, 0)]
        unit = read_unit(node.history.content(node.history.entry(1, 0)), LIMITS)
        assert (unit.meta.version, unit.meta.checkpoint_hash) == (1, hash_of(1))


async def test_it_stops_making_units_that_nobody_receipts(tmp_path: Path) -> None:
    node = Node(tmp_path, max_unreceipted=2)
    async with node.working():
        node.swarm.publish(1)
        await node.paused("coordinator: 2 units")
        assert node.made() == [(1, 0), (1, 1)]
        settle(node, node.history.entry(1, 0))
        await node.until(lambda: len(node.made()) == 3)


async def test_it_makes_no_unit_beyond_the_cap_of_the_run(tmp_path: Path) -> None:
    cap = RUN.revision.window.units_per_version
    node = Node(tmp_path, max_unreceipted=1000)
    node.generator.expect(1, cap - 1)
    async with node.working():
        node.swarm.publish(1)
        await node.paused("all units of policy 1 are made")
        assert node.made() == [(1, cap - 1)]


async def test_it_never_makes_a_unit_below_the_index_that_the_coordinator_expects(tmp_path: Path) -> None:
    node = Node(tmp_path, seen=False, max_unreceipted=1)
    async with node.working():
        node.swarm.publish(1)
        await node.paused("coordinator, to learn")
        assert node.made() == []
        node.status.coordinator_seen_ms = 1
        node.generator.expect(1, 5)  # this node's history was lost; units 0 to 4 are signed elsewhere
        node.changed.ring()
        await node.until(lambda: node.made() == [(1, 5)])


async def test_it_waits_for_a_policy_recorded_after_its_registration(tmp_path: Path) -> None:
    node = Node(tmp_path, entitled_since=101, max_unreceipted=1)
    async with node.working():
        node.swarm.publish(1)
        await node.paused("policy 2: this node was registered after")
        node.swarm.publish(2)
        await node.until(lambda: node.made() == [(2, 0)])


async def test_it_leaves_a_version_that_the_coordinator_has_closed(tmp_path: Path) -> None:
    node = Node(tmp_path, max_unreceipted=1)
    node.generator.close_version(1, "units_exhausted: the owner has used its units")
    async with node.working():
        node.swarm.publish(1)
        await node.paused("policy 2: units_exhausted")
        assert node.made() == []


@pytest.mark.parametrize("failures", [1, 2])
async def test_a_unit_whose_engine_died_is_made_again_after_a_fresh_proof(
    tmp_path: Path, failures: int
) -> None:
    node = Node(tmp_path, max_unreceipted=1, engine_failures=3)
    node.engine.failures = [EngineError("killed", "probably out of memory")] * failures
    async with node.working():
        node.swarm.publish(1)
        await node.until(lambda: len(node.made()) == 1)
        assert node.history.entry(1, 0).kind is Kind.WORK


async def test_a_unit_that_kills_the_engine_again_and_again_is_abandoned(tmp_path: Path) -> None:
    node = Node(tmp_path, max_unreceipted=2, engine_failures=3)
    node.engine.failures = [EngineError("crashed", "segmentation fault")] * 3
    async with node.working():
        node.swarm.publish(1)
        await node.until(lambda: len(node.made()) >= 2)
        assert node.history.entry(1, 0).kind is Kind.ABANDON
        assert node.history.entry(1, 1).kind is Kind.WORK
        assert any("segmentation fault" in text for text in node.told)


@pytest.mark.parametrize("checked", [True, False])
async def test_a_unit_that_validators_would_refuse_is_not_signed_where_it_is_checked_first(
    tmp_path: Path, checked: bool
) -> None:
    """The engine's commitments are malformed here: signed, this would cost the node its stake."""
    node = Node(tmp_path, max_unreceipted=1, engine_failures=2, self_check=checked)
    async with node.working():
        node.swarm.publish(1)
        await node.until(lambda: len(node.made()) == 1)
        entry = node.history.entry(1, 0)
        assert entry is not None
        assert entry.kind is (Kind.ABANDON if checked else Kind.WORK)
        assert any("a validator would refuse this unit" in text for text in node.told) is checked


async def test_weights_that_fail_their_probe_are_made_anew_once_and_then_left(tmp_path: Path) -> None:
    node = Node(tmp_path, max_unreceipted=1)
    node.engine.wrong = {1}
    async with node.working():
        node.swarm.publish(1)
        await node.until(lambda: node.status.state == "not ready")
        assert node.swarm.obtained == [1, 1]
        assert node.made() == []
        assert node.status.version == -1
        node.swarm.publish(2)
        await node.until(lambda: node.made() == [(2, 0)])


async def test_a_probe_that_passes_after_the_weights_were_made_anew_is_enough(tmp_path: Path) -> None:
    node = Node(tmp_path, max_unreceipted=1)
    node.engine.wrong = {1}
    async with node.working():
        node.swarm.publish(1)

        original = node.swarm.obtain

        async def repaired(version: int) -> Path:
            if node.swarm.obtained:
                node.engine.wrong.clear()
            return await original(version)

        node.swarm.obtain = repaired
        await node.until(lambda: node.made() == [(1, 0)])
        assert node.swarm.obtained == [1, 1]


async def test_a_policy_that_cannot_be_had_is_named_and_tried_again(tmp_path: Path) -> None:
    node = Node(tmp_path, max_unreceipted=100, pause_when_ahead=True, max_units_ahead=1)
    async with node.working():
        node.swarm.publish(1)
        await node.paused("policy 2")
        node.swarm.broken = {2, 9}
        node.swarm.publish(9)
        await node.until(lambda: "cannot get policy 9" in node.follower.problem)
        await node.paused("policy 9")  # policy 1 is too old by now to make more units of it
        assert node.made() == [(1, 0)]
        node.swarm.broken.clear()
        await node.until(lambda: (9, 0) in node.made())
        assert node.follower.problem == ""


async def test_a_version_that_is_not_on_the_ledger_is_no_policy(tmp_path: Path) -> None:
    node = Node(tmp_path)

    async def nothing(version: int) -> None:
        return None

    node.swarm.recorded = nothing
    with pytest.raises(ManifestError, match="not on the ledger"):
        await node.follower.obtain(1)
    assert msgspec.structs.asdict(node.settings)["engine"] == "torch"


async def test_a_pause_for_being_ahead_allows_one_unit_more_now_and_then(tmp_path: Path) -> None:
    """Rollouts that the trainer cannot use must not stop the run: the head would never move again."""
    node = Node(tmp_path, pause_when_ahead=True, max_units_ahead=1, ahead_pause_s=0.01, max_unreceipted=100)
    async with node.working():
        node.swarm.publish(1)
        await node.until(lambda: len(node.made()) >= 3)
        assert {version for version, _ in node.made()} == {1}
