"""The door: what is admitted, in which order, and what is refused with which code."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import trio
from coordinator_site import NODE, Site, plain_file
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from world import COORDINATOR, OWNER

from intellect_coordinator.intake import Intake, IntakeLimits
from intellect_coordinator.jobs import Bell
from intellect_protocol.errors import RefusedError
from intellect_protocol.ledger.devkeys import development_signer
from intellect_protocol.ledger.records import RecordedCheckpoint
from intellect_protocol.messages import Abandon, GetVerdicts, Precommit, SubmissionState

STRANGE_NODE = development_signer(11)


async def refused(site: Site, code: str, index: int, *, version: int = 0, body: bytes | None = None) -> None:
    body = plain_file(site, index, version) if body is None else body
    with pytest.raises(RefusedError) as caught:
        await site.submit(body, index, version=version)
    assert caught.value.code == code


async def test_a_receipt_is_signed_and_names_a_file_that_is_on_disk(site: Site) -> None:
    body = plain_file(site, 0)
    message = site.submission(body, 0)
    receipt = await site.intake.submit(NODE.address, message, body)
    assert receipt.is_signed_by(COORDINATOR.address)
    assert (receipt.version, receipt.index, receipt.node) == (0, 0, NODE.address_bytes)
    assert site.blobs.path(receipt.file_hash).read_bytes() == body


async def test_the_same_file_again_gets_the_same_receipt_and_makes_no_second_submission(site: Site) -> None:
    body = plain_file(site, 0)
    message = site.submission(body, 0)
    first = await site.intake.submit(NODE.address, message, body)
    site.pass_time(60)
    await site.restart()
    site.heads.set(4)  # the window is over: a receipt once given is given again all the same
    assert await site.intake.submit(NODE.address, message, body) == first
    answer = await site.intake.verdicts(NODE.address, GetVerdicts(cursor=0))
    assert len(answer.entries) == 1


async def test_another_file_for_the_same_unit_is_a_conflict(site: Site) -> None:
    await site.submit(plain_file(site, 0), 0)
    await refused(site, "conflicting_submission", 0, body=plain_file(site, 0, token=6))


async def test_indices_are_used_in_order_and_an_abandoned_one_closes_the_gap(site: Site) -> None:
    await refused(site, "index_gap", 1)
    await site.submit(plain_file(site, 0), 0)
    await refused(site, "index_gap", 2)
    assert (await site.intake.abandon(NODE.address, Abandon(0, 1))).left == 1
    assert (await site.intake.abandon(NODE.address, Abandon(0, 1))).left == 1  # said twice, counted once
    await site.submit(plain_file(site, 2), 2)
    await refused(site, "index_closed", 1)


async def test_only_so_many_units_may_be_abandoned(site: Site) -> None:
    for index in range(2):
        await site.intake.abandon(NODE.address, Abandon(0, index))
    with pytest.raises(RefusedError, match="abandons_exhausted"):
        await site.intake.abandon(NODE.address, Abandon(0, 2))


async def test_an_owners_nodes_share_one_cap(site: Site) -> None:
    for index in range(site.config.revision.window.units_per_version):
        await site.submit(plain_file(site, index), index)
    await refused(site, "unit_cap", 6)


async def test_versions_outside_the_window_are_refused(site: Site) -> None:
    await refused(site, "future_version", 0, version=1)
    site.heads.set(2)
    await site.submit(plain_file(site, 0), 0)
    site.heads.set(3)
    await refused(site, "stale_version", 1)


async def test_a_version_that_the_ledger_does_not_know_is_refused(site: Site) -> None:
    site.heads.set(77)
    message = msgspec.structs.replace(site.submission(b"x", 0), version=77)
    with pytest.raises(RefusedError, match="unknown_version"):
        await site.intake.submit(NODE.address, message, b"x")


async def test_a_promised_unit_counts_though_its_version_has_left_the_window(site: Site) -> None:
    body = plain_file(site, 0)
    message = site.submission(body, 0)
    promise = Precommit(0, 0, message.file_hash, message.size_bytes)
    deadline = (await site.intake.precommit(NODE.address, promise)).deadline_ms
    assert (await site.intake.precommit(NODE.address, promise)).deadline_ms == deadline
    site.heads.set(4)
    await refused(site, "conflicting_precommit", 0, body=plain_file(site, 0, token=9))
    await site.restart()
    assert (await site.intake.submit(NODE.address, message, body)).index == 0
    await refused(site, "stale_version", 1)


async def test_a_promise_that_was_not_kept_in_time_is_void(site: Site) -> None:
    body = plain_file(site, 0)
    message = site.submission(body, 0)
    promise = Precommit(0, 0, message.file_hash, message.size_bytes)
    await site.intake.precommit(NODE.address, promise)
    with pytest.raises(RefusedError, match="conflicting_precommit"):
        await site.intake.precommit(NODE.address, Precommit(0, 0, b"\1" * 32, 5))
    site.pass_time(int(site.config.revision.window.precommit_ttl_s) + 1)
    await site.intake.precommit(NODE.address, Precommit(0, 0, b"\1" * 32, 5))
    site.pass_time(int(site.config.revision.window.precommit_ttl_s) + 1)
    site.heads.set(4)
    await refused(site, "stale_version", 0, body=body)


async def test_damaged_and_dishonest_uploads_are_refused_by_name(site: Site) -> None:
    body = plain_file(site, 0)
    good = site.submission(body, 0)
    stranger = site.submission(body, 0, node=STRANGE_NODE)
    cases = [
        (good, body + b"\0", "wrong_size"),
        (good, bytes(len(body)), "wrong_hash"),
        (msgspec.structs.replace(good, checkpoint_hash=b"\7" * 32), body, "wrong_checkpoint"),
        (msgspec.structs.replace(good, work_signature=stranger.work_signature), body, "bad_work_signature"),
        (msgspec.structs.replace(good, work_signature=b""), body, "bad_work_signature"),
        (msgspec.structs.replace(good, size_bytes=1 << 40), body, "too_large"),
        (msgspec.structs.replace(good, size_bytes=0), b"", "too_large"),
        (msgspec.structs.replace(good, index=-1), body, "malformed"),
        (msgspec.structs.replace(good, version=-1), body, "malformed"),
        (msgspec.structs.replace(good, file_hash=b"short"), body, "malformed"),
    ]
    for message, data, code in cases:
        with pytest.raises(RefusedError) as caught:
            await site.intake.submit(NODE.address, message, data)
        assert caught.value.code == code
    with pytest.raises(RefusedError, match="not_bound"):
        await site.intake.submit(STRANGE_NODE.address, stranger, body)
    assert list(site.blobs.root.glob("??/*")) == []


async def test_a_full_queue_says_when_to_come_back(site: Site) -> None:
    busy = Intake(
        site.store,
        site.blobs,
        site.standing,
        site.heads,
        site.config,
        COORDINATOR,
        Bell(),
        site.audits,
        limits=IntakeLimits(pending_submissions=1),
    )
    body = plain_file(site, 0)
    await busy.submit(NODE.address, site.submission(body, 0), body)
    with pytest.raises(RefusedError, match="busy") as caught:
        await busy.submit(NODE.address, site.submission(body, 1), body)
    assert caught.value.retry_after_s is not None


async def test_verdicts_are_read_in_pages_and_only_ones_own(site: Site) -> None:
    for index in range(5):
        await site.submit(plain_file(site, index), index)
    seen, cursor = [], 0
    while True:
        page = await site.intake.verdicts(NODE.address, GetVerdicts(cursor=cursor, limit=2))
        seen += [entry.index for entry in page.entries]
        cursor = page.cursor
        if not page.more:
            break
    assert seen == [0, 1, 2, 3, 4]
    assert (await site.intake.verdicts(NODE.address, GetVerdicts(cursor=cursor))).entries == []
    await site.judge("inconclusive")
    changed = await site.intake.verdicts(NODE.address, GetVerdicts(cursor=cursor))
    assert [entry.index for entry in changed.entries] == [0]
    assert (await site.intake.verdicts(STRANGE_NODE.address, GetVerdicts(cursor=0))).entries == []


async def test_twins_that_arrive_at_once_make_one_submission(site: Site) -> None:
    body = plain_file(site, 0)
    message = site.submission(body, 0)
    receipts = []

    async def send() -> None:
        receipts.append(await site.intake.submit(NODE.address, message, body))

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(send)
    assert len(set(map(repr, receipts))) == 1


async def test_a_twin_that_overtakes_gives_its_receipt(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    body = plain_file(site, 0)
    message = site.submission(body, 0)
    receipts = []
    check = site.intake._standing.check

    async def overtaken(node: str, recorded: RecordedCheckpoint | None) -> str:
        monkeypatch.setattr(site.intake._standing, "check", check)
        receipts.append(await site.intake.submit(NODE.address, message, body))
        return await check(node, recorded)

    monkeypatch.setattr(site.intake._standing, "check", overtaken)
    receipts.append(await site.intake.submit(NODE.address, message, body))
    assert receipts[0] == receipts[1]


# --- any order of requests ----------------------------------------------------------------------


class AnyoneStands:
    """Standing has its own tests; here every node may work."""

    async def check(self, node: str, recorded: RecordedCheckpoint | None) -> str:
        return OWNER.address


@dataclass
class Expected:
    """The rules again, in the simplest form: per version, closed indices and what closed them."""

    head: int = 0
    now_s: int = 0
    closed: dict[int, list[bytes | None]] = field(default_factory=dict)
    promises: dict[tuple[int, int], tuple[bytes, int]] = field(default_factory=dict)

    def of(self, version: int) -> list[bytes | None]:
        return self.closed.setdefault(version, [])

    def in_window(self, version: int) -> bool:
        return self.head - 2 <= version <= self.head

    def promise(self, version: int, index: int) -> bytes | None:
        body, deadline = self.promises.get((version, index), (b"", -1))
        return body if deadline >= self.now_s else None

    def admits(self, version: int, index: int, body: bytes) -> bool:
        closed = self.of(version)
        if index < len(closed):
            return closed[index] == body
        promised = self.promise(version, index)
        if promised is not None and promised != body:
            return False
        return index == len(closed) < 6 and (promised is not None or self.in_window(version))


class AnyOrder(RuleBasedStateMachine):
    """Requests in any order do what the simplest reading of the rules says, restarts included."""

    template: Path
    model: Path

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        shutil.copytree(self.template, self.folder / "site")
        self.site = Site(self.folder / "site", self.model)
        self.bodies = [bytes([65 + number]) * 8 for number in range(2)]
        self.recorded = trio.run(self._all_recorded)
        self.site.heads.recorded = self._recorded  # type: ignore[method-assign]
        self.site.intake._standing = AnyoneStands()  # type: ignore[assignment]
        self.expected = Expected()
        self.receipts: dict[tuple[int, int], bytes] = {}

    async def _all_recorded(self) -> dict[int, RecordedCheckpoint | None]:
        return {version: await self.site.heads.recorded(version) for version in range(5)}

    async def _recorded(self, version: int) -> RecordedCheckpoint | None:
        return self.recorded[version]

    def _ask(self, step: object, *arguments: object) -> object | None:
        try:
            return trio.run(step, *arguments)  # type: ignore[arg-type]
        except RefusedError:
            return None

    @rule(version=st.integers(0, 4), index=st.integers(0, 6), which=st.integers(0, 1))
    def submit(self, version: int, index: int, which: int) -> None:
        body = self.bodies[which]
        message = self.site.submission(body, index, version=version)
        admitted = self.expected.admits(version, index, body)
        receipt = self._ask(self.site.intake.submit, NODE.address, message, body)
        assert (receipt is not None) == admitted
        if receipt is not None:
            assert self.receipts.setdefault((version, index), receipt.signature) == receipt.signature  # type: ignore[attr-defined]
            closed = self.expected.of(version)
            if index == len(closed):
                closed.append(body)

    @rule(version=st.integers(0, 4), index=st.integers(0, 6), which=st.integers(0, 1))
    def precommit(self, version: int, index: int, which: int) -> None:
        body = self.bodies[which]
        message = self.site.submission(body, index, version=version)
        promise = Precommit(version, index, message.file_hash, message.size_bytes)
        held = self.expected.promise(version, index)
        free = len(self.expected.of(version)) <= index < 6 and self.expected.in_window(version)
        open_ = index >= len(self.expected.of(version)) and (held == body if held is not None else free)
        answer = self._ask(self.site.intake.precommit, NODE.address, promise)
        assert (answer is not None) == open_
        if answer is not None and held is None:
            self.expected.promises[version, index] = (body, self.expected.now_s + 120)

    @rule(version=st.integers(0, 4), index=st.integers(0, 6))
    def abandon(self, version: int, index: int) -> None:
        closed = self.expected.of(version)
        again = index < len(closed) and closed[index] is None
        allowed = again or (
            index == len(closed) < 6 and self.expected.in_window(version) and closed.count(None) < 2
        )
        answer = self._ask(self.site.intake.abandon, NODE.address, Abandon(version, index))
        assert (answer is not None) == allowed
        if answer is not None and not again:
            closed.append(None)

    @precondition(lambda self: self.expected.head < 4)
    @rule()
    def publish(self) -> None:
        self.expected.head += 1
        self.site.heads.set(self.expected.head)

    @rule(seconds=st.integers(30, 130))
    def wait(self, seconds: int) -> None:
        self.expected.now_s += seconds
        self.site.now_ms += seconds * 1000

    @rule()
    def kill(self) -> None:
        self.site.store.close()
        self.site._open()
        self.site.intake._standing = AnyoneStands()  # type: ignore[assignment]

    @invariant()
    def every_receipt_is_kept(self) -> None:
        if not hasattr(self, "site"):
            return
        answer = trio.run(self.site.intake.verdicts, NODE.address, GetVerdicts(cursor=0, limit=500))
        kept = {(entry.version, entry.index) for entry in answer.entries}
        assert kept == set(self.receipts)
        assert all(entry.state is SubmissionState.QUEUED for entry in answer.entries)

    def teardown(self) -> None:
        if hasattr(self, "site"):
            self.site.close()
            shutil.rmtree(self.folder)


def test_any_order_of_requests_does_what_the_rules_say(populated_site: Path, model_folder: Path) -> None:
    machine = type("Machine", (AnyOrder,), {"template": populated_site, "model": model_folder})
    case = machine.TestCase
    case.settings = settings(
        max_examples=6,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    case("runTest").runTest()
