"""How often each cheat is noticed under given limits: per chunk, per group of samples, and per unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from intellect_protocol.rollouts import Rollout
from intellect_protocol.run import Thresholds
from intellect_protocol.toploc import ChunkReport
from intellect_protocol.validation.commitment import CHUNK_MEASURES, check_commitments
from intellect_protocol.validation.drift import check_drift
from intellect_protocol.validation.findings import Finding, Kind
from intellect_protocol.validation.sampling import check_sampling

from .bounds import upper_bound
from .values import UnitScores

INTELLECT_2 = {"exponent_mismatches": 38.0, "mantissa_mean": 10.0, "mantissa_median": 8.0}
"""Limits of the TOPLOC paper (arXiv 2501.16007) for bf16, which INTELLECT-2 (arXiv 2505.07291) ran with."""


class Rate(msgspec.Struct, frozen=True):
    """Share of a kind of work that is noticed.

    Attributes:
        of: how many were judged.
        suspect: share that was at least suspect; `fraud` of it, share that opened a case.
        fraud_bound: 95 % upper bound of the latter; for honest work the false positives.
    """

    of: int
    suspect: float
    fraud: float
    suspect_bound: float
    fraud_bound: float


class Detection(msgspec.Struct, frozen=True):
    """What was noticed of one cheat, or of honest work.

    Attributes:
        chunk: commitments alone, chunk by chunk.
        group: checks 10 to 12 on one prompt's samples.
        unit: checks 10 to 12 on whole units.
        intellect_2: share of chunks, and of units, over any of INTELLECT-2's three limits.
        codes: share of units with a finding of each reason code, fraud or suspect, the most frequent first.
    """

    cheat: str
    chunk: Rate
    group: Rate
    unit: Rate
    intellect_2_chunk: float
    intellect_2_unit: float
    codes: list[tuple[str, float]]


def findings_of(unit: UnitScores, limits: Thresholds) -> list[Finding]:
    """Findings of checks 10 to 12, none left out after a fatal one."""
    return [
        *check_commitments(unit.scores, limits),
        *check_sampling(unit.scores, unit.group, limits),
        *check_drift(_rollouts(unit), unit.scores, limits),
    ]


def _rollouts(unit: UnitScores) -> list[Rollout]:
    """The rows as the drift check reads them, which is their log-probs."""
    return [
        Rollout(
            prompt=0,
            sample=0,
            environment="",
            task_index=0,
            target_length=0,
            prompt_tokens=[],
            completion_tokens=one.tokens,
            logprobs=np.asarray(one.logprobs, dtype=np.float32),
            finish_reason=one.finish_reason,
            reward=0.0,
            proofs=one.proofs,
        )
        for one in unit.completions
    ]


def detection(cheat: str, units: Sequence[UnitScores], limits: Thresholds) -> Detection:
    """Judge units under limits.

    Raises:
        ValueError: no units.
    """
    if not units:
        raise ValueError(f"no units of {cheat or 'honest work'}")
    reports = [report for unit in units for score in unit.scores for report in score.chunk_reports]
    by_unit = [findings_of(unit, limits) for unit in units]
    codes: dict[str, int] = {}
    for findings in by_unit:
        for code in {finding.code for finding in findings}:
            codes[code] = codes.get(code, 0) + 1
    over = [
        [_over_intellect_2(report) for score in unit.scores for report in score.chunk_reports]
        for unit in units
    ]
    return Detection(
        cheat=cheat,
        chunk=_rate(_chunk_kinds(report, limits) for report in reports),
        group=_rate(_kinds(findings_of(group, limits)) for unit in units for group in unit.groups()),
        unit=_rate(map(_kinds, by_unit)),
        intellect_2_chunk=sum(map(sum, over)) / max(1, len(reports)),
        intellect_2_unit=sum(map(any, over)) / len(units),
        codes=[
            (code, count / len(units))
            for code, count in sorted(codes.items(), key=lambda item: (-item[1], item[0]))
        ],
    )


def _kinds(findings: Sequence[Finding]) -> set[Kind]:
    return {finding.kind for finding in findings}


def _chunk_kinds(report: ChunkReport, limits: Thresholds) -> set[Kind]:
    kinds = set()
    for measure in CHUNK_MEASURES.values():
        value, limit = measure.measure(report), measure.limit_of(limits)
        if value > limit.suspect:
            kinds.add(Kind.FRAUD if value > limit.fraud else Kind.SUSPECT)
    return kinds


def _over_intellect_2(report: ChunkReport) -> bool:
    return any(CHUNK_MEASURES[name].measure(report) > limit for name, limit in INTELLECT_2.items())


def _rate(kinds: Iterable[set[Kind]]) -> Rate:
    each = list(kinds)
    fraud = sum(Kind.FRAUD in one for one in each)
    noticed = sum(bool(one & {Kind.FRAUD, Kind.SUSPECT}) for one in each)
    total = len(each)
    if not total:
        return Rate(0, 0.0, 0.0, 1.0, 1.0)
    return Rate(total, noticed / total, fraud / total, upper_bound(noticed, total), upper_bound(fraud, total))
