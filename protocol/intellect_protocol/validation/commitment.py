"""Check 10: the rows' TOPLOC proofs against the validator's own hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from ..engines.base import RowScore
from ..errors import ProofError
from ..rollouts import Rollout
from ..run import Limit, Thresholds
from ..top_entries import TOP_K
from ..toploc import ChunkReport, check_form
from .findings import Check, Finding, Kind
from .limits import grade

COLLISIONS = Limit(suspect=4, fraud=8)
"""Entries of the validator's top 128 that may coincide modulo the proof's m.

The worker chooses m so that *its* entries do not coincide. The validator's top differs from it in a handful
of entries, each of which meets another with a chance of 128 / m = 0.002; more than a pair is no accident.
"""
MIN_NEGATIVE = 32
"""Draws below which the negative check abstains: by chance a few of very few may look like real values."""
MIN_UNIT_CHUNKS = 8


def check_proof_form(rows: Sequence[Rollout], hidden_size: int) -> list[Finding]:
    """The part that needs no model: number, length, modulus, coefficients and degree of all proofs."""
    findings = []
    for number, row in enumerate(rows):
        try:
            check_form(len(row.completion_tokens), hidden_size, row.proofs)
        except ProofError as error:
            text = f"row {number}: {error}"
            findings.append(Finding(Check.COMMITMENT, "proof_form", Kind.FRAUD, text, number))
    return findings


def _scaled(count: int, report: ChunkReport) -> float:
    """A count among the compared entries, brought to 128 where a chunk has fewer."""
    return count * TOP_K / report.compared if report.compared else float(TOP_K)


class ChunkMeasure(NamedTuple):
    """One quantity of a chunk that has a limit."""

    code: str
    what: str
    measure: Callable[[ChunkReport], float]
    limit_of: Callable[[Thresholds], Limit]


CHUNK_MEASURES = {
    "exponent_mismatches": ChunkMeasure(
        "commitment_exponents",
        "exponents of the hidden states that differ, of 128",
        lambda report: _scaled(report.exponent_mismatches, report),
        lambda limits: limits.exponent_mismatches,
    ),
    "sign_mismatches": ChunkMeasure(
        "commitment_signs",
        "signs of the hidden states that differ, of 128",
        lambda report: _scaled(report.sign_mismatches, report),
        lambda limits: limits.sign_mismatches,
    ),
    "mantissa_mean": ChunkMeasure(
        "commitment_mantissa_mean",
        "mean mantissa error of the hidden states",
        lambda report: report.mantissa_mean,
        lambda limits: limits.mantissa_mean,
    ),
    "mantissa_median": ChunkMeasure(
        "commitment_mantissa_median",
        "median mantissa error of the hidden states",
        lambda report: report.mantissa_median,
        lambda limits: limits.mantissa_median,
    ),
    "negative_share": ChunkMeasure(
        "commitment_negative",
        "share of random places where the proof looks like real hidden states",
        lambda report: report.negative_share if report.negative_tested >= MIN_NEGATIVE else 0.0,
        lambda limits: limits.negative_share,
    ),
    "collisions": ChunkMeasure(
        "commitment_collisions",
        "hidden states that the proof's modulus cannot tell apart",
        lambda report: report.collisions,
        lambda limits: COLLISIONS,
    ),
}
"""By the name of the limit in `Thresholds`, where it has one there."""


def check_commitments(scores: Sequence[RowScore], limits: Thresholds) -> list[Finding]:
    """Every chunk of every row against the limits; per row and measure the worst chunk is reported."""
    findings = []
    for number, score in enumerate(scores):
        if score.proof_error:
            text = f"row {number}: {score.proof_error}"
            findings.append(Finding(Check.COMMITMENT, "proof_form", Kind.FRAUD, text, number))
        else:
            findings.extend(_row_findings(number, score.chunk_reports, limits))
    return findings + _unit_findings(scores, limits)


def _row_findings(number: int, reports: Sequence[ChunkReport], limits: Thresholds) -> Iterator[Finding]:
    for code, what, measure, limit_of in CHUNK_MEASURES.values():
        values = [measure(report) for report in reports]
        chunk = max(range(len(values)), key=values.__getitem__)
        graded = grade(values[chunk], limit_of(limits))
        if graded:
            kind, limit = graded
            text = f"row {number}, chunk {chunk}: {what}: {values[chunk]:.4g}, limit {limit:.4g}"
            yield Finding(Check.COMMITMENT, code, kind, text, number, values[chunk], limit)


def unit_mantissa(scores: Sequence[RowScore]) -> float | None:
    """Median over a unit's chunks of their mean mantissa error; None where there are too few to judge."""
    means = [report.mantissa_mean for score in scores for report in score.chunk_reports]
    return median(means) if len(means) >= MIN_UNIT_CHUNKS else None


def _unit_findings(scores: Sequence[RowScore], limits: Thresholds) -> list[Finding]:
    """The unit's median chunk: steadier than any single one, it tells quantised weights from honest noise."""
    middle = unit_mantissa(scores)
    graded = None if middle is None else grade(middle, limits.mantissa_mean_unit)
    if not graded:
        return []
    kind, limit = graded
    text = f"mean mantissa error of the unit's median chunk: {middle:.4g}, limit {limit:.4g}"
    return [Finding(Check.COMMITMENT, "commitment_unit", kind, text, None, middle, limit)]
