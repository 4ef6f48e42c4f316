"""Who owned which node key, and with how much stake, at any block: a projection of the ledger's events. Pure.

Standing needs more than the present state of the contracts: a unit's seed is safe from grinding only if
the node was bound and staked *before* the checkpoint hash C was recorded, and no view of a contract tells
the stake of an earlier block. Events do, and anybody who replays them comes to the same answer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from intellect_protocol.ledger.events import (
    LedgerEvent,
    NodeBound,
    NodeUnbound,
    OwnerBarred,
    Rebonded,
    Staked,
    StakeFrozen,
    StakeReleased,
    StakeSeized,
    UnbondRequested,
    Withdrawn,
)
from intellect_protocol.ledger.records import CourtTerms


@dataclass
class _Account:
    active: int = 0
    unbonding: int = 0
    frozen: int = 0
    seized: int = 0
    blocks: list[int] = field(default_factory=list)  # in which something changed, ascending
    # What it was after that block: active, frozen, and seized of old.
    pasts: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Binding:
    """A node key's owner, and where on the chain the binding is."""

    owner: str
    block: int
    log_index: int


class StakeBook:
    """Accounts and bindings as of the last event applied. Amounts in 10^-18 token."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._bindings: dict[str, Binding] = {}
        self._past_owners: dict[str, list[tuple[int, str | None]]] = {}
        self._nodes_of: dict[str, dict[str, Binding]] = {}
        self._barred: set[str] = set()

    def apply(self, events: Iterable[LedgerEvent]) -> None:
        """Take in events, in ledger order; kinds that say nothing about stake or nodes are skipped."""
        for event in events:
            match event:
                case Staked(owner=owner, amount=amount):
                    self._move(event, owner, active=amount)
                case UnbondRequested(owner=owner, amount=amount):
                    self._move(event, owner, active=-amount, unbonding=amount)
                case Rebonded(owner=owner, amount=amount):
                    self._move(event, owner, active=amount, unbonding=-amount)
                case Withdrawn(owner=owner, amount=amount):
                    self._move(event, owner, unbonding=-amount)
                case StakeSeized(owner=owner, amount=amount):
                    # StakeLedger.seize takes from the unbonding bucket first.
                    unbonding = min(amount, self._account(owner).unbonding)
                    self._account(owner).seized += amount
                    self._move(event, owner, active=unbonding - amount, unbonding=-unbonding)
                case StakeFrozen(owner=owner, amount=amount):
                    self._move(event, owner, frozen=amount)
                case StakeReleased(owner=owner, amount=amount):
                    self._move(event, owner, frozen=-amount)
                case NodeBound(owner=owner, node=node):
                    binding = Binding(owner, event.block_number, event.log_index)
                    self._bindings[node] = binding
                    self._nodes_of.setdefault(owner, {})[node] = binding
                    self._past_owners.setdefault(node, []).append((event.block_number, owner))
                case NodeUnbound(owner=owner, node=node):
                    self._bindings.pop(node, None)
                    self._nodes_of.get(owner, {}).pop(node, None)
                    self._past_owners.setdefault(node, []).append((event.block_number, None))
                case OwnerBarred(owner=owner):
                    self._barred.add(owner)

    def binding(self, node: str) -> Binding | None:
        """The node key's binding now, or None."""
        return self._bindings.get(node)

    def owner_at(self, node: str, block: int) -> str | None:
        """Who owned the node key at the end of `block`."""
        history = self._past_owners.get(node, [])
        position = bisect_left(history, block + 1, key=lambda entry: entry[0])
        return history[position - 1][1] if position else None

    def rank(self, node: str) -> int:
        """How many of its owner's present nodes were bound before it.

        Raises:
            KeyError: the node key is not bound.
        """
        own = self._bindings[node]
        nodes = self._nodes_of[own.owner].values()
        return sum((other.block, other.log_index) < (own.block, own.log_index) for other in nodes)

    def active(self, owner: str) -> int:
        """Active stake now, frozen or not."""
        return self._account(owner).active

    def unbonding(self, owner: str) -> int:
        """Stake on its way out."""
        return self._account(owner).unbonding

    def frozen(self, owner: str) -> int:
        """What open cases put at risk."""
        return self._account(owner).frozen

    def staked_since(self, owner: str, amount: int) -> int | None:
        """The block since whose end the active stake has been at least `amount` all along, or None."""
        account = self._account(owner)
        since = None
        for block, (active, _, _) in zip(account.blocks, account.pasts, strict=True):
            if active < amount:
                since = None
            elif since is None:
                since = block
        return since

    def slashable(self, owner: str, caps: CourtTerms, block: int | None = None) -> int:
        """What a case of fraud could take at the end of `block` (None: now), after open cases and caps.

        Stake on its way out is left out: it may be gone before a case is opened. What was ever seized counts
        against the cap per account, though the court forgets it after a while. So this may be too little,
        which means more audits, never too much.
        """
        account = self._account(owner)
        position = len(account.blocks) if block is None else bisect_left(account.blocks, block + 1)
        active, frozen, seized = account.pasts[position - 1] if position else (0, 0, 0)
        return max(0, min(active - frozen, caps.fraud_cap, caps.account_cap - seized))

    def is_barred(self, owner: str) -> bool:
        """Whether a fraud of the owner was upheld."""
        return owner in self._barred

    def owners(self) -> list[str]:
        """All owners that ever bound a node, in order of their first binding."""
        return list(self._nodes_of)

    def nodes_of(self, owner: str) -> list[str]:
        """Node keys bound to an owner now, oldest binding first."""
        nodes = self._nodes_of.get(owner, {})
        return sorted(nodes, key=lambda node: (nodes[node].block, nodes[node].log_index))

    def _account(self, owner: str) -> _Account:
        return self._accounts.setdefault(owner, _Account())

    def _move(
        self, event: LedgerEvent, owner: str, *, active: int = 0, unbonding: int = 0, frozen: int = 0
    ) -> None:
        account = self._account(owner)
        account.active += active
        account.unbonding += unbonding
        account.frozen += frozen
        past = (account.active, account.frozen, account.seized)
        if account.blocks and account.blocks[-1] == event.block_number:
            account.pasts[-1] = past
        else:
            account.blocks.append(event.block_number)
            account.pasts.append(past)
