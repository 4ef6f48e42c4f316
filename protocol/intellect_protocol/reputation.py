"""Reputation: a pure function of the ledger's events and the published work files; anybody recomputes it.

Work counts by version and fades: version v has weight 2^(-(latest - v) / HALF_LIFE_VERSIONS). With a and r
the weighted accepted and refused units of all nodes the owner ever bound,

    quality = (a + 1) / (a + r + 2)             mean of the Beta(a + 1, r + 1) posterior (Laplace's rule)
    volume  = 1 - exp(-a / FULL_VOLUME_UNITS)   little work says little
    score   = 100 * quality * volume, and 0 for an owner whose fraud was upheld

Stake and age are shown beside the score and are no part of it: neither can be earned by working. Abandoned
units are shown too. The score is never an input to a transfer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from .ledger.events import (
    CaseDismissed,
    CaseExpired,
    CaseOpened,
    CaseUpheld,
    LedgerEvent,
    NodeBound,
    NodeUnbound,
    OwnerBarred,
    Rebonded,
    Staked,
    StakeSeized,
    UnbondRequested,
    Withdrawn,
)
from .work_file import VersionWork, WorkFile

HALF_LIFE_VERSIONS = 64
FULL_VOLUME_UNITS = 16.0
_TOKEN_UNIT = 10**18


class VersionCredit(msgspec.Struct, frozen=True):
    """An owner's units of one version."""

    version: int
    accepted: int
    rejected: int
    abandoned: int
    rows: int  # units of credit


class ReputationEvent(msgspec.Struct, frozen=True):
    """A ledger event behind the number, in plain words."""

    block: int
    text: str


class Reputation(msgspec.Struct, frozen=True):
    """An owner's record. Stake in 10^-18 token; `first_block` is where its first node was bound."""

    owner: str
    score: float
    accepted: int
    rejected: int
    abandoned: int
    barred: bool
    cases_upheld: int
    stake: int
    first_block: int | None
    nodes: list[str]
    versions: list[VersionCredit]
    events: list[ReputationEvent]


def compute_reputation(
    owner: str, events: Sequence[LedgerEvent], work_files: Sequence[WorkFile]
) -> Reputation:
    """The record of an owner (wallet address, EIP-55).

    Args:
        events: of the deployment, in ledger order; those about others are ignored.
        work_files: of the run; where a version is in several, the last one with the highest revision counts.
    """
    nodes, first_block = _nodes(owner, events)
    versions = _credits(set(nodes), work_files)
    latest = max((work.version for file in work_files for work in file.versions), default=0)
    accepted = rejected = 0.0
    for credit in versions:
        weight = 2.0 ** (-(latest - credit.version) / HALF_LIFE_VERSIONS)
        accepted += weight * credit.accepted
        rejected += weight * credit.rejected
    barred = any(isinstance(event, OwnerBarred) and event.owner == owner for event in events)
    quality = (accepted + 1) / (accepted + rejected + 2)
    volume = 1 - math.exp(-accepted / FULL_VOLUME_UNITS)
    told = [text for event in events if (text := _told(owner, event)) is not None]
    return Reputation(
        owner=owner,
        score=0.0 if barred else round(100 * quality * volume, 2),
        accepted=sum(credit.accepted for credit in versions),
        rejected=sum(credit.rejected for credit in versions),
        abandoned=sum(credit.abandoned for credit in versions),
        barred=barred,
        cases_upheld=sum(isinstance(event, CaseUpheld) and event.accused == owner for event in events),
        stake=_stake(owner, events),
        first_block=first_block,
        nodes=nodes,
        versions=versions,
        events=told,
    )


def _nodes(owner: str, events: Sequence[LedgerEvent]) -> tuple[list[str], int | None]:
    bound = [event for event in events if isinstance(event, NodeBound) and event.owner == owner]
    nodes = list(dict.fromkeys(event.node for event in bound))
    return nodes, min((event.block_number for event in bound), default=None)


def _credits(nodes: set[str], work_files: Sequence[WorkFile]) -> list[VersionCredit]:
    newest: dict[int, VersionWork] = {}
    for file in work_files:
        for work in file.versions:
            known = newest.get(work.version)
            if known is None or work.revision >= known.revision:
                newest[work.version] = work
    found = []
    for version in sorted(newest):
        work = newest[version]
        leaves = [each.leaf for each in work.leaves if each.leaf.node in nodes]
        accepted = [leaf for leaf in leaves if leaf.accepted]
        abandoned = sum(unit.node in nodes for unit in work.abandoned)
        if leaves or abandoned:
            found.append(
                VersionCredit(
                    version=version,
                    accepted=len(accepted),
                    rejected=len(leaves) - len(accepted),
                    abandoned=abandoned,
                    rows=sum(leaf.units for leaf in accepted),
                )
            )
    return found


def _stake(owner: str, events: Sequence[LedgerEvent]) -> int:
    """Active and unbonding stake after all events."""
    total = 0
    for event in events:
        if isinstance(event, Staked) and event.owner == owner:
            total += event.amount
        elif isinstance(event, Withdrawn | StakeSeized) and event.owner == owner:
            total -= event.amount
    return total


def _told(owner: str, event: LedgerEvent) -> ReputationEvent | None:
    """An event about the owner in plain words, or None."""
    if owner not in (getattr(event, "owner", None), getattr(event, "accused", None)):
        return None
    match event:
        case Staked(amount=amount):
            text = f"staked {amount / _TOKEN_UNIT:g}"
        case UnbondRequested(amount=amount):
            text = f"asked to take out {amount / _TOKEN_UNIT:g}"
        case Rebonded(amount=amount):
            text = f"staked {amount / _TOKEN_UNIT:g} again"
        case Withdrawn(amount=amount):
            text = f"took out {amount / _TOKEN_UNIT:g}"
        case NodeBound(node=node):
            text = f"bound node {node}"
        case NodeUnbound(node=node):
            text = f"unbound node {node}"
        case CaseOpened(case_id=case_id, node=node):
            text = f"case {case_id} opened for node {node}"
        case CaseUpheld(case_id=case_id, seized=seized):
            text = f"case {case_id} upheld: lost {seized / _TOKEN_UNIT:g}"
        case CaseDismissed(case_id=case_id):
            text = f"case {case_id} dismissed"
        case CaseExpired(case_id=case_id):
            text = f"case {case_id} expired without a decision"
        case OwnerBarred():
            text = "barred from binding nodes"
        case _:
            return None
    return ReputationEvent(event.block_number, text)
