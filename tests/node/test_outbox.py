"""The outbox against a coordinator that fails in every way; verdicts; nothing lost, nothing sent twice."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.lowlevel
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from intellect_node.config import NodeConfig
from intellect_node.entries import REFUSED, SIGNED, Entry
from intellect_node.history import History
from intellect_node.outbox import Outbox, Verdicts
from intellect_protocol.errors import (
    DeadlineError,
    RefusedError,
    SlashedError,
    UnreachableError,
    UpgradeRequiredError,
    WireError,
)
from intellect_protocol.keys import LocalSigner, receipt_digest
from intellect_protocol.messages import (
    Abandon,
    AbandonResult,
    GetVerdicts,
    GetVerdictsResult,
    Precommit,
    PrecommitResult,
    Receipt,
    SubmissionState,
    Submit,
    TrainingState,
    WorkStatus,
)
from intellect_protocol.wire import sha256

RUN = bytes(range(32))
CHECKPOINT = b"\xcc" * 32
NODE = LocalSigner(b"\x07" * 32)
COORDINATOR = LocalSigner(b"\x11" * 32)
SETTINGS = NodeConfig(retry_first_s=1.0, retry_max_s=8.0, precommit_bytes=5)


class Coordinator:
    """Keeps what it receipts, as the real one does; `faults` says how each call goes wrong."""

    def __init__(self, faults: list[Exception | str] | None = None) -> None:
        self.faults = list(faults or [])
        self.stored: dict[tuple[int, int], bytes] = {}
        self.calls: list[str] = []
        self.statuses: list[WorkStatus] = []

    async def __call__(self, message, result_type, *, body=None, deadline_s=0.0, max_body_bytes=0):
        await trio.lowlevel.checkpoint()
        self.calls.append(type(message).__name__)
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        answer = self._answer(message, body)
        if fault == "answer lost":
            raise DeadlineError("no answer")
        if fault == "forged receipt" and isinstance(answer, Receipt):
            answer = self._receipt(message, LocalSigner(b"\x66" * 32))
        if fault == "other receipt" and isinstance(answer, Receipt):
            other = Submit(message.version, CHECKPOINT, message.index, bytes(32), 1, b"")
            answer = self._receipt(other, COORDINATOR)
        return answer, b""

    def _answer(self, message, path: Path | None):
        if isinstance(message, Precommit):
            if (message.version, message.index) in self.stored:
                raise RefusedError("already_submitted", "submitted already")
            return PrecommitResult(deadline_ms=1 << 60)
        if isinstance(message, Abandon):
            return AbandonResult(left=1)
        if isinstance(message, GetVerdicts):
            page = self.statuses[message.cursor : message.cursor + 2]
            cursor = message.cursor + len(page)
            return GetVerdictsResult(page, cursor, cursor < len(self.statuses))
        assert isinstance(message, Submit)
        body = path.read_bytes()
        assert sha256(body) == message.file_hash
        stored = self.stored.setdefault((message.version, message.index), body)
        if stored != body:
            raise AssertionError("two different files for one unit")
        return self._receipt(message, COORDINATOR)

    def _receipt(self, message: Submit, signer: LocalSigner) -> Receipt:
        fields = (RUN, message.version, message.index, NODE.address_bytes, message.file_hash, 5_000)
        return Receipt(*fields, signer.sign_digest(receipt_digest(*fields)))


def make_outbox(history: History, coordinator: Coordinator, clock_ms=None, **callbacks: Callable) -> Outbox:
    return Outbox(
        history,
        coordinator,
        run_id=RUN,
        node=NODE.address,
        coordinator=COORDINATOR.address,
        settings=SETTINGS,
        on_settled=callbacks.get("on_settled", lambda entry: None),
        on_refused=callbacks.get("on_refused", lambda entry, error: None),
        clock_ms=clock_ms or (lambda: int(trio.current_time() * 1000)),
        rng=random.Random(0),
    )


def sign(history: History, version: int, index: int, content: bytes = b"rollouts") -> Entry:
    return history.sign_work(NODE, RUN, version, CHECKPOINT, index, content, 0)


def open_history(folder: Path) -> History:
    return History(folder, RUN, NODE.address)


async def deliver_all(history: History, coordinator: Coordinator, units: int, **callbacks: Callable) -> None:
    """Run an outbox until so many units were settled."""
    settled = []

    def on_settled(entry: Entry) -> None:
        settled.append(entry)
        if len(settled) == units:
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        outbox = make_outbox(history, coordinator, on_settled=on_settled, **callbacks)
        nursery.start_soon(outbox.run)


async def fail_once(history: History, call, now_ms: int = 0) -> Entry:
    """Run an outbox until the oldest unit has one more failed attempt; the unit."""
    first = history.entries()[-1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(make_outbox(history, call, lambda: now_ms).run)
        while (entry := history.entry(first.version, first.index)).attempts == first.attempts:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    return entry


def states(history: History) -> dict[tuple[int, int], str]:
    return {(e.version, e.index): e.state for e in history.entries()}


FAULTS = st.lists(
    st.sampled_from(
        [
            None,
            "answer lost",
            "forged receipt",
            "other receipt",
            UnreachableError("gone"),
            WireError("nonsense"),
            RefusedError("busy", "later", retry_after_s=3.0),
            RefusedError("internal", "a bug over there"),
        ]
    ),
    max_size=12,
)


@given(FAULTS)
@settings(max_examples=12, deadline=None)
def test_whatever_goes_wrong_on_the_way_every_unit_is_receipted_once(tmp_path_factory, faults) -> None:
    history = open_history(tmp_path_factory.mktemp("outbox"))
    coordinator = Coordinator(faults)
    units = [(1, 0), (1, 1), (2, 0)]
    for unit in units:
        sign(history, *unit, content=repr(unit).encode())
    trio.run(deliver_all, history, coordinator, 3, clock=MockClock(autojump_threshold=0))
    assert coordinator.stored == {unit: repr(unit).encode() for unit in units}
    assert set(states(history).values()) == {SubmissionState.RECEIVED}
    history.close()


@pytest.mark.parametrize(
    ("fault", "text"), [("forged receipt", "not signed"), ("other receipt", "another unit")]
)
async def test_a_receipt_of_somebody_else_or_for_something_else_is_no_receipt(
    tmp_path: Path, fault: str, text: str
) -> None:
    history = open_history(tmp_path)
    sign(history, 1, 0)
    failed = await fail_once(history, Coordinator([None, fault]))
    assert failed.state == SIGNED
    assert text in failed.error


async def test_a_receipt_lost_before_a_restart_is_asked_for_again_with_the_same_file(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    history = open_history(tmp_path)
    sign(history, 1, 0)
    coordinator = Coordinator([None, "answer lost"])
    await fail_once(history, coordinator)
    history.close()
    await deliver_all(open_history(tmp_path), coordinator, 1)
    assert states(open_history(tmp_path)) == {(1, 0): SubmissionState.RECEIVED}


async def test_a_refusal_for_good_is_final_and_later_versions_go_on(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    history = open_history(tmp_path)
    sign(history, 1, 0)
    sign(history, 2, 0)
    refused = []
    coordinator = Coordinator([None, RefusedError("stale_version", "too old")])
    await deliver_all(history, coordinator, 2, on_refused=lambda entry, error: refused.append(error.code))
    assert states(history) == {(1, 0): REFUSED, (2, 0): SubmissionState.RECEIVED}
    assert refused == ["stale_version"]
    assert history.refusals() == {"stale_version": 1}


async def test_a_later_index_is_not_sent_before_an_earlier_one(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    history = open_history(tmp_path)
    sign(history, 1, 0, b"first")
    sign(history, 1, 1, b"second")
    coordinator = Coordinator([UnreachableError("gone")])
    await fail_once(history, coordinator)
    assert coordinator.stored == {}
    assert coordinator.calls == ["Precommit"]
    await deliver_all(history, coordinator, 2)
    assert list(coordinator.stored.values()) == [b"first", b"second"]


async def test_a_small_file_is_sent_without_holding_its_deadline_first(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    history = open_history(tmp_path)
    sign(history, 1, 0, b"1234")
    sign(history, 1, 1, b"12345")
    coordinator = Coordinator()
    await deliver_all(history, coordinator, 2)
    assert coordinator.calls == ["Submit", "Precommit", "Submit"]


async def test_an_abandoned_unit_is_told_and_never_submitted(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    history = open_history(tmp_path)
    history.sign_abandon(1, 0, 0)
    sign(history, 1, 1)
    coordinator = Coordinator()
    await deliver_all(history, coordinator, 2)
    assert coordinator.calls == ["Abandon", "Precommit", "Submit"]


async def test_a_lost_file_ends_its_unit_and_blocks_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    history = open_history(tmp_path)
    history.path_of(sign(history, 1, 0, b"lost")).unlink()
    sign(history, 2, 0)
    await deliver_all(history, Coordinator(), 2)
    assert states(history) == {(1, 0): REFUSED, (2, 0): SubmissionState.RECEIVED}


@pytest.mark.parametrize(
    ("fault", "ends_with"),
    [
        (RefusedError("slashed", "a fraud was upheld"), SlashedError),
        (UpgradeRequiredError("needs protocol 2"), UpgradeRequiredError),
    ],
)
async def test_being_slashed_or_outdated_ends_the_service(tmp_path: Path, fault, ends_with) -> None:
    history = open_history(tmp_path)
    sign(history, 1, 0)
    with pytest.raises(ends_with):
        await make_outbox(history, Coordinator([fault])).run()
    assert states(history) == {(1, 0): SIGNED}
    with pytest.raises(ends_with):
        await Verdicts(history, Coordinator([fault]), SETTINGS, lambda entry: None).run()


async def test_waiting_between_attempts_grows_and_is_bounded(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    sign(history, 1, 0)
    pauses, now_ms = [], 0
    for _ in range(8):
        entry = await fail_once(history, Coordinator([UnreachableError("gone")]), now_ms)
        pauses.append((entry.retry_at_ms - now_ms) / 1000)
        now_ms = entry.retry_at_ms
    assert pauses[0] <= SETTINGS.retry_first_s
    assert max(pauses) <= SETTINGS.retry_max_s
    assert min(pauses[4:]) >= SETTINGS.retry_max_s / 2


async def test_a_coordinator_that_says_when_is_not_asked_before(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    sign(history, 1, 0)
    busy = Coordinator([None, RefusedError("busy", "later", retry_after_s=100.0)])
    assert (await fail_once(history, busy)).retry_at_ms >= 100_000


async def test_verdicts_are_fetched_page_by_page_and_told_once(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    coordinator = Coordinator()
    for index in range(5):
        entry = sign(history, 1, index, bytes([index]))
        coordinator.statuses.append(
            WorkStatus(
                1, index, entry.file_hash, SubmissionState.ACCEPTED, TrainingState.NONE, {"accepted": 9}, []
            )
        )
    told = []
    verdicts = Verdicts(history, coordinator, SETTINGS, lambda entry: told.append(entry.index))
    await verdicts.poll()
    await verdicts.poll()
    assert told == [0, 1, 2, 3, 4]
    assert set(states(history).values()) == {SubmissionState.ACCEPTED}


@pytest.mark.parametrize(("cursor", "more"), [(-1, False), (0, True)])
async def test_a_cursor_that_does_not_advance_is_no_endless_loop(
    tmp_path: Path, cursor: int, more: bool
) -> None:
    async def lying(message, result_type, **options):
        return GetVerdictsResult([], cursor, more), b""

    with pytest.raises(WireError, match="cursor"):
        await Verdicts(open_history(tmp_path), lying, SETTINGS, lambda entry: None).poll()
