"""Whether a published version was audited as its revealed seed demands: a pure function of public data.

The work file has every receipted unit, the time of its receipt and the verdict as its validator signed it;
the ledger has owners and stakes; earlier work files say who is a newcomer. So every draw can be repeated.
The check looks one way only: whoever audits more than the rule asks for does no wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from ..keys import address_bytes
from ..messages import JudgeVerdict
from ..run import AuditTerms, RunConfig
from ..wire import decode_canonical
from ..work_file import AuditReveal, VersionWork
from .audit_share import audit_share, draw, is_committed, unverified_gain


class OwnerFacts(msgspec.Struct, frozen=True):
    """What is public about a node's owner before a version.

    Attributes:
        accepted: accepted units of all its nodes in versions that were closed when the version was new.
        slashable: what a case of fraud could take at the end of the block in which the version was recorded,
            in 10^-18 token.
    """

    owner: str
    accepted: int
    slashable: int


class DrawReport(msgspec.Struct, frozen=True):
    """What the check found. `drawn` units had to be audited; `audited` counts accepted units that were."""

    version: int
    units: int
    drawn: int
    audited: int
    problems: list[str]


class _Unit(NamedTuple):
    received_at_ms: int
    node: str
    unit_index: int
    file_hash: bytes
    accepted: bool
    audited: bool

    @property
    def name(self) -> str:
        return f"unit {self.unit_index} of {self.node}"


def check_draws(config: RunConfig, work: VersionWork, facts: Mapping[str, OwnerFacts]) -> DrawReport:
    """Repeat the draws of a version.

    Args:
        work: as `work_file.read_work_file` returns it.
        facts: by node key, of every node with a unit in the version.
    """
    terms = config.audit_of(work.version)
    reveal = work.reveal
    if terms is None:
        return _all_audited(work)
    if not isinstance(reveal, AuditReveal):
        return DrawReport(work.version, 0, 0, 0, ["the seed of the draws is not revealed"])
    if not is_committed(terms, work.version, reveal.seed):
        return DrawReport(work.version, 0, 0, 0, ["the revealed seed is not the one that was committed to"])
    units = _units(work, reveal.received_at_ms)
    problems = _disorder(units)
    by_owner: dict[str, list[_Unit]] = defaultdict(list)
    for unit in units:
        if unit.node in facts:
            by_owner[facts[unit.node].owner].append(unit)
        else:
            problems.append(f"{unit.name}: the node had no owner when the version was recorded")
    drawn = 0
    for mine in by_owner.values():
        mine.sort()
        for position, unit in enumerate(mine, start=1):
            if not _is_drawn(config, terms, work.version, reveal.seed, unit, position, facts[unit.node]):
                continue
            drawn += 1
            if unit.accepted and not unit.audited:
                problems.append(f"{unit.name}: drawn for an audit, and accepted without one")
    audited = sum(unit.accepted and unit.audited for unit in units)
    return DrawReport(work.version, len(units), drawn, audited, problems)


def _is_drawn(
    config: RunConfig,
    terms: AuditTerms,
    version: int,
    seed: bytes,
    unit: _Unit,
    position: int,
    facts: OwnerFacts,
) -> bool:
    gain = unverified_gain(terms, position, config.revision.window.async_level + 1)
    share = audit_share(terms, accepted=facts.accepted, gain=gain, slashable=facts.slashable)
    node = address_bytes(unit.node)
    return draw(config.run_id, seed, version, node, unit.unit_index, unit.file_hash) < share


def _units(work: VersionWork, received_at_ms: list[int]) -> list[_Unit]:
    units = []
    for at, judged in zip(received_at_ms, work.leaves, strict=False):
        leaf = judged.leaf
        audited = decode_canonical(judged.verdict, JudgeVerdict).is_audited
        units.append(_Unit(at, leaf.node, leaf.index, leaf.work_hash, leaf.accepted, audited))
    for at, unjudged in zip(received_at_ms[len(work.leaves) :], work.unjudged, strict=True):
        units.append(_Unit(at, unjudged.node, unjudged.index, unjudged.work_hash, False, False))
    return units


def _disorder(units: list[_Unit]) -> list[str]:
    """Receipts of a node that are not in the order of its indices: then somebody moved a unit forward."""
    problems = []
    last: dict[str, _Unit] = {}
    for unit in sorted(units, key=lambda unit: (unit.node, unit.unit_index)):
        before = last.get(unit.node)
        if before is not None and before.received_at_ms >= unit.received_at_ms:
            problems.append(f"{unit.name}: received no later than unit {before.unit_index}")
        last[unit.node] = unit
    return problems


def _all_audited(work: VersionWork) -> DrawReport:
    """A version before which no seed was committed to: nothing may be left out."""
    verdicts = [decode_canonical(judged.verdict, JudgeVerdict) for judged in work.leaves]
    problems = [
        f"unit {judged.leaf.index} of {judged.leaf.node}: accepted without an audit, which every unit needs"
        for judged, verdict in zip(work.leaves, verdicts, strict=True)
        if judged.leaf.accepted and not verdict.is_audited
    ]
    units = len(work.leaves) + len(work.unjudged)
    audited = sum(judged.leaf.accepted for judged in work.leaves) - len(problems)
    if work.reveal is not msgspec.UNSET:
        problems.append("a seed is revealed that nobody committed to")
    return DrawReport(work.version, units, units, audited, problems)
