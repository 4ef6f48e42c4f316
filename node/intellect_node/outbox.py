"""Getting signed units to the coordinator, and its verdicts back.

`Outbox` sends what `history` holds until each unit has a receipt that the run's coordinator signed.
`Verdicts` then follows what becomes of the units. Both are services: they run until cancelled, survive
an unreachable coordinator, and start again from the database after a crash.

Precommit comes first so that a long upload holds its deadline, but only the answer to Submit decides: a
unit whose receipt was lost is refused as closed by Precommit, and acknowledged by Submit. A small file
is sent at once: it is there as soon as a Precommit would be.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import trio

from intellect_protocol.errors import (
    HistoryError,
    InvalidDataError,
    RefusedError,
    SlashedError,
    UnreachableError,
    WireError,
)
from intellect_protocol.keys import address_bytes
from intellect_protocol.messages import (
    Abandon,
    AbandonResult,
    GetVerdicts,
    GetVerdictsResult,
    Message,
    Precommit,
    PrecommitResult,
    Receipt,
    Submit,
)

from .bell import Bell
from .config import NodeConfig
from .entries import Entry, Kind
from .history import History

R = TypeVar("R")

_VERDICTS_PER_CALL = 100
# The coordinator's own fault, not its word on the unit: tried again like an unreachable one.
_OWN_FAULTS = frozenset({"internal", "unavailable", "busy", "clock", "replayed"})
_SLASHED = "slashed"

logger = logging.getLogger(__name__)


class CallCoordinator(Protocol):
    """`Swarm.call_coordinator`: a signed request, its typed answer and the answer's body."""

    async def __call__(
        self,
        message: Message,
        result_type: type[R],
        *,
        body: bytes | Path | None = None,
        deadline_s: float = ...,
        max_body_bytes: int = ...,
    ) -> tuple[R, bytes]: ...


def now_ms() -> int:
    """Unix time in milliseconds."""
    return time.time_ns() // 1_000_000


def raise_if_slashed(error: RefusedError) -> None:
    """Turn the coordinator's word that the owner was slashed into the error that ends a node.

    Raises:
        SlashedError: it is that word.
    """
    if error.code == _SLASHED:
        raise SlashedError(error.code, error.text) from error


class Outbox:
    """Sends signed units until they are receipted or refused for good."""

    def __init__(
        self,
        history: History,
        call: CallCoordinator,
        *,
        run_id: bytes,
        node: str,
        coordinator: str,
        settings: NodeConfig,
        on_settled: Callable[[Entry], None],
        on_refused: Callable[[Entry, RefusedError], None],
        clock_ms: Callable[[], int] = now_ms,
        rng: random.Random | None = None,
    ) -> None:
        """
        Args:
            node, coordinator: addresses of the node key and of the run's coordinator key.
            on_settled: called with each unit that was receipted or refused for good.
            on_refused: called with every refusal, also one that is to be tried again.
        """
        self._history = history
        self._call = call
        self._run_id = run_id
        self._node = address_bytes(node)
        self._coordinator = coordinator
        self._settings = settings
        self._on_settled = on_settled
        self._on_refused = on_refused
        self._clock_ms = clock_ms
        self._rng = rng or random.Random()
        self._bell = Bell()
        self.last_error = ""

    def wake(self) -> None:
        """There may be something new to send."""
        self._bell.ring()

    async def run(self) -> None:
        """Deliver for ever.

        Raises:
            SlashedError: the coordinator says that the node is barred or lost its stake.
            UpgradeRequiredError: the coordinator no longer speaks this protocol version.
        """
        while True:
            heard = self._bell.listen()
            ready, next_ms = await trio.to_thread.run_sync(self._history.due, self._clock_ms())
            if not ready:
                pause_s = float("inf") if next_ms is None else max(0.0, (next_ms - self._clock_ms()) / 1000)
                with trio.move_on_after(pause_s):
                    await heard.wait()
                continue
            stopped: set[int] = set()
            for entry in ready:
                if entry.version not in stopped and not await self._attempt(entry):
                    stopped.add(entry.version)

    async def _attempt(self, entry: Entry) -> bool:
        """One delivery; False if it is to be tried again, so that later indices must wait."""
        try:
            await self._deliver(entry)
        except RefusedError as error:
            raise_if_slashed(error)
            self._on_refused(entry, error)
            if error.retry_after_s is None and error.code not in _OWN_FAULTS:
                await self._refused(entry, error.code, error.text)
                return True
            await self._failed(entry, str(error), error.retry_after_s or 0.0)
            return False
        except HistoryError as error:
            await self._refused(entry, "file_lost", str(error))
            return True
        except (UnreachableError, InvalidDataError) as error:
            await self._failed(entry, str(error), 0.0)
            return False
        self.last_error = ""
        self._on_settled(entry)
        return True

    async def _deliver(self, entry: Entry) -> None:
        settings = self._settings
        if entry.kind is Kind.ABANDON:
            await self._call(
                Abandon(entry.version, entry.index), AbandonResult, deadline_s=settings.request_deadline_s
            )
            await _in_thread(self._history.mark_received, entry, None, self._clock_ms())
            return
        await _in_thread(self._history.content, entry)
        is_large = entry.size_bytes >= settings.precommit_bytes
        if is_large and entry.precommit_until_ms <= self._clock_ms():
            await self._precommit(entry)
        receipt, _ = await self._call(
            Submit(
                version=entry.version,
                checkpoint_hash=entry.checkpoint_hash,
                index=entry.index,
                file_hash=entry.file_hash,
                size_bytes=entry.size_bytes,
                work_signature=entry.signature,
            ),
            Receipt,
            body=self._history.path_of(entry),
            deadline_s=settings.submit_deadline_s,
        )
        self._check(receipt, entry)
        await _in_thread(self._history.mark_received, entry, receipt, self._clock_ms())

    async def _precommit(self, entry: Entry) -> None:
        request = Precommit(entry.version, entry.index, entry.file_hash, entry.size_bytes)
        try:
            held, _ = await self._call(request, PrecommitResult, deadline_s=self._settings.request_deadline_s)
        except RefusedError as error:
            raise_if_slashed(error)
            logger.debug("precommit of %d/%d refused: %s", entry.version, entry.index, error)
            return
        await _in_thread(self._history.mark_precommitted, entry, held.deadline_ms)

    def _check(self, receipt: Receipt, entry: Entry) -> None:
        """
        Raises:
            WireError: the receipt is for something else or not signed by the coordinator.
        """
        said = (receipt.run_id, receipt.version, receipt.index, receipt.node, receipt.file_hash)
        if said != (self._run_id, entry.version, entry.index, self._node, entry.file_hash):
            raise WireError("the receipt is for another unit")
        if not receipt.is_signed_by(self._coordinator):
            raise WireError("the receipt is not signed by the run's coordinator")

    async def _refused(self, entry: Entry, code: str, text: str) -> None:
        await _in_thread(self._history.mark_refused, entry, code, text)
        self._on_settled(entry)

    async def _failed(self, entry: Entry, text: str, at_least_s: float) -> None:
        self.last_error = text
        doubled = self._settings.retry_first_s * 2.0 ** min(entry.attempts, 30)
        # Jitter in [0.5, 1): nodes that lost the coordinator together do not return together.
        pause_s = min(doubled, self._settings.retry_max_s) * self._rng.uniform(0.5, 1.0)
        retry_ms = self._clock_ms() + int(1000 * max(pause_s, at_least_s))
        await _in_thread(self._history.mark_failed, entry, text, retry_ms)


class Verdicts:
    """Follows the coordinator's verdicts on this node's units."""

    def __init__(
        self,
        history: History,
        call: CallCoordinator,
        settings: NodeConfig,
        on_verdict: Callable[[Entry], None],
    ) -> None:
        """
        Args:
            on_verdict: called with each unit whose state changed.
        """
        self._history = history
        self._call = call
        self._settings = settings
        self._on_verdict = on_verdict
        self._bell = Bell()

    def wake(self) -> None:
        """There may be a verdict to fetch."""
        self._bell.ring()

    async def run(self) -> None:
        """Ask again and again; an unreachable coordinator is asked later."""
        while True:
            heard = self._bell.listen()
            try:
                await self.poll()
            except RefusedError as error:
                raise_if_slashed(error)
                logger.debug("verdicts: %s", error)
            except (UnreachableError, InvalidDataError) as error:
                logger.debug("verdicts: %s", error)
            with trio.move_on_after(self._settings.verdict_poll_s):
                await heard.wait()

    async def poll(self) -> None:
        """Fetch all that changed since the last time.

        Raises:
            UnreachableError, InvalidDataError, RefusedError: as the request failed.
        """
        more = True
        while more:
            cursor = await _in_thread(_cursor, self._history)
            result, _ = await self._call(
                GetVerdicts(cursor, _VERDICTS_PER_CALL),
                GetVerdictsResult,
                deadline_s=self._settings.request_deadline_s,
            )
            if result.cursor < cursor or (result.more and result.cursor == cursor):
                raise WireError("the coordinator's cursor does not advance")
            for entry in await _in_thread(self._history.apply_verdicts, result):
                self._on_verdict(entry)
            more = result.more


def _cursor(history: History) -> int:
    return history.cursor


async def _in_thread(call: Callable[..., R], *arguments: Any) -> R:
    """Run a database call in a thread. It is never abandoned: what it wrote must be known."""
    return await trio.to_thread.run_sync(call, *arguments)
