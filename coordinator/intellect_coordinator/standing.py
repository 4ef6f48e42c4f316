"""Whether a node may work: bound, staked in time, free of cases, not barred.

The coordinator follows the ledger's events into its database and keeps a `StakeBook` over them, so that no
submission costs a round trip to the chain. The follower may be behind by a poll; a refusal is therefore
only given after it has caught up with the newest block.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Protocol

import msgspec
import trio
from sqlalchemy import Connection, insert, select

from intellect_protocol.errors import IntellectError, RefusedError, SlashedError, UnreachableError
from intellect_protocol.ledger.events import LedgerEvent
from intellect_protocol.ledger.records import Block, RecordedCheckpoint, ValidatorSetState
from intellect_protocol.validation import admission
from intellect_protocol.validation.admission import check_standing

from . import schema
from .stake_book import StakeBook
from .store import Store, cursor_value, set_cursor

_CURSOR = "ledger"
_MEMBERS_GOOD_FOR_S = 30.0
_NEXT_VERSION_S = 1.0  # what is too late for this version may be in time for the next
_CASE_S = 5.0


class EventSource(Protocol):
    """What is needed of `ledger.Ledger`."""

    async def block(self, number: int | str = "latest") -> Block: ...

    async def events(
        self, from_block: int, to_block: int, *kinds: type[LedgerEvent]
    ) -> list[LedgerEvent]: ...

    async def min_stake(self) -> int: ...

    async def validator_set(self, set_id: int | None = None) -> ValidatorSetState: ...


@cache
def _kinds() -> dict[str, type[LedgerEvent]]:
    return {kind.__name__: kind for kind in LedgerEvent.__subclasses__()}


def stored_events(connection: Connection) -> list[LedgerEvent]:
    """All ledger events taken in so far, in ledger order."""
    table = schema.ledger_events
    rows = connection.execute(
        select(table.c.kind, table.c.content).order_by(table.c.block_number, table.c.log_index)
    )
    return [_unpacked(row.kind, row.content) for row in rows]


def _packed(event: LedgerEvent) -> bytes:
    """JSON, because token amounts exceed the 64 bits of msgpack's integers."""
    return json.dumps(msgspec.to_builtins(event)).encode()


def _unpacked(kind: str, content: bytes) -> LedgerEvent:
    return msgspec.convert(json.loads(content), _kinds()[kind])


class Standing:
    """The ledger's word on owners and nodes, followed block by block."""

    def __init__(
        self,
        store: Store,
        ledger: EventSource,
        *,
        confirmations: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            confirmations: blocks that must lie on top of one before it is believed.
            clock: seconds, monotonic.
        """
        self.book = StakeBook()
        self._store = store
        self._ledger = ledger
        self._confirmations = confirmations
        self._clock = clock
        self._next_block = 0
        self._min_stake: int | None = None
        self._syncing = trio.Lock()
        self._members: tuple[ValidatorSetState, float] | None = None

    async def open(self) -> None:
        """Take up where the last process stopped.

        Raises:
            UnreachableError: the chain does not answer.
        """
        past = await self._store.read(stored_events)
        self.book.apply(past)
        cursor = await self._store.read(partial(cursor_value, name=_CURSOR))
        self._next_block = 0 if cursor is None else cursor + 1
        self._min_stake = await self._ledger.min_stake()
        await self.sync()

    async def sync(self) -> list[LedgerEvent]:
        """Take in what is new on the ledger, and return it.

        Raises:
            UnreachableError: the chain does not answer; nothing has changed.
        """
        async with self._syncing:
            newest = (await self._ledger.block()).number - self._confirmations
            if newest < self._next_block:
                return []
            found = await self._ledger.events(self._next_block, newest)
            await self._store.write(partial(_keep, events=found, newest=newest))
            self.book.apply(found)
            self._next_block = newest + 1
            return found

    @property
    def min_stake(self) -> int:
        """Active stake each node needs, in 10^-18 token."""
        if self._min_stake is None:
            raise UnreachableError("the ledger has not been read yet")
        return self._min_stake

    async def check(self, node: str, recorded: RecordedCheckpoint | None) -> str:
        """The owner of a node key that may work for a version now.

        Args:
            recorded: the version's checkpoint as recorded; None leaves out what must have held before it.

        Raises:
            SlashedError: a fraud of the owner was upheld.
            RefusedError: no standing; the code says why.
        """
        try:
            return self._judge(node, recorded)
        except SlashedError:
            raise
        except RefusedError:
            await self.sync()
            return self._judge(node, recorded)

    def _judge(self, node: str, recorded: RecordedCheckpoint | None) -> str:
        book = self.book
        binding = book.binding(node)
        owner = binding.owner if binding else ""
        # Every node needs a minimum stake of its own: earlier nodes of the owner have the first claim.
        taken = self.min_stake * book.rank(node) if binding else 0
        active = book.active(owner) - taken
        since = book.staked_since(owner, taken + self.min_stake)
        findings = check_standing(
            admission.Standing(
                stake=max(active, 0),
                min_stake=self.min_stake,
                unbonding=active < self.min_stake <= active + book.unbonding(owner),
                evicted=book.is_barred(owner),
                bound_at_block=max(binding.block, since or 0) if binding else None,
                recorded_at_block=recorded.block_number if recorded else 1 << 62,
                units=0,
                unit_cap=1,
            )
        )
        if any(finding.code == "evicted" for finding in findings):
            raise SlashedError("evicted", f"a fraud of {owner} was upheld; its nodes are barred from the run")
        for finding in findings:
            raise RefusedError(finding.code, finding.text, _NEXT_VERSION_S if binding else None)
        if active - book.frozen(owner) < self.min_stake:
            raise RefusedError("stake_frozen", f"an open case has frozen the stake of {owner}", _CASE_S)
        return owner

    async def validators(self) -> ValidatorSetState:
        """The validator set in force, at most half a minute old.

        Raises:
            UnreachableError: the chain does not answer and the set was never read.
        """
        now = self._clock()
        if self._members is None or now - self._members[1] > _MEMBERS_GOOD_FOR_S:
            try:
                self._members = (await self._ledger.validator_set(), now)
            except IntellectError:
                if self._members is None:
                    raise
        return self._members[0]

    async def check_validator(self, address: str) -> None:
        """
        Raises:
            RefusedError: not a member of the validator set in force.
        """
        if address not in (await self.validators()).members:
            raise RefusedError("not_a_validator", f"{address} is not in the validator set in force")


def _keep(connection: Connection, events: list[LedgerEvent], newest: int) -> None:
    if events:
        connection.execute(
            insert(schema.ledger_events),
            [
                {
                    "block_number": event.block_number,
                    "log_index": event.log_index,
                    "kind": type(event).__name__,
                    "content": _packed(event),
                }
                for event in events
            ],
        )
    set_cursor(connection, _CURSOR, newest)
