"""The largest value of everything that checks 10 to 12 grade, also where nothing exceeds its limit.

Findings say what is wrong. Whoever looks at his own work, or at honest work, wants to know how far from wrong
it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..engines.base import RowScore
from ..rollouts import Rollout
from ..run import Limit, Thresholds
from .commitment import CHUNK_MEASURES, unit_mantissa
from .drift import row_drift
from .findings import Check
from .sampling import SUSPECT_FAR_TOKENS, Positions


class Measurement(msgspec.Struct, frozen=True):
    """The worst value of one quantity over a unit.

    Attributes:
        code: of the finding that it becomes above a limit.
        row: where it was measured; None for a prompt's group or the unit.
        suspect, fraud: above these values a unit goes to a second validator, or is refused as fraud (None:
            this quantity alone is never fraud).
    """

    check: Check
    code: str
    what: str
    row: int | None
    measured: float
    suspect: float
    fraud: float | None


def measure_scores(
    rows: Sequence[Rollout], scores: Sequence[RowScore], group_size: int, limits: Thresholds
) -> list[Measurement]:
    """Measure a scored unit.

    Args:
        scores: of all rows, in the order of the file; a row whose proofs could not be read has no chunks.
        group_size: samples per prompt.

    Raises:
        ValueError: there are no rows.
    """
    return [
        *_commitments(scores, limits),
        *_of_rows(scores, limits),
        *_of_groups(scores, group_size, limits),
        _drift(rows, scores, limits),
    ]


def _commitments(scores: Sequence[RowScore], limits: Thresholds) -> list[Measurement]:
    measured = []
    chunks = [(number, report) for number, score in enumerate(scores) for report in score.chunk_reports]
    for each in CHUNK_MEASURES.values() if chunks else ():
        value, row = max((each.measure(report), number) for number, report in chunks)
        measured.append(_made(Check.COMMITMENT, each.code, each.what, row, value, each.limit_of(limits)))
    middle = unit_mantissa(scores)
    if middle is not None:
        what = "mean mantissa error of the unit's median chunk"
        measured.append(
            _made(Check.COMMITMENT, "commitment_unit", what, None, middle, limits.mantissa_mean_unit)
        )
    return measured


def _of_rows(scores: Sequence[RowScore], limits: Thresholds) -> list[Measurement]:
    rows = [Positions([score], limits) for score in scores]
    distances = [float(row.distances.max()) for row in rows]
    far, mean = [_far_share(row) for row in rows], [row.mean_distance for row in rows]
    return [
        _worst(
            "sampling_distance",
            "distance of a token from what the seed draws",
            distances,
            limits.max_distance,
        ),
        _worst("sampling_far_row", "share of a row's tokens far from their draw", far, limits.far_share_row),
        _worst("sampling_mean_row", "mean distance of a row", mean, limits.mean_distance_row),
    ]


def _of_groups(scores: Sequence[RowScore], group_size: int, limits: Thresholds) -> list[Measurement]:
    starts = range(0, len(scores), group_size)
    groups = [Positions(scores[start : start + group_size], limits) for start in starts]
    columns = [
        ("sampling_far_group", "share of a prompt's tokens far from their draw", limits.far_share_group),
        ("sampling_mean_group", "mean distance of a prompt's tokens", limits.mean_distance_group),
        ("sampling_inexact_group", "share of tokens that are not the draw", limits.inexact_share_group),
    ]
    values = [
        [_far_share(group) for group in groups],
        [group.mean_distance for group in groups],
        [group.inexact_share for group in groups],
    ]
    return [
        msgspec.structs.replace(_worst(code, what, own, limit), row=None)
        for (code, what, limit), own in zip(columns, values, strict=True)
    ]


def _far_share(positions: Positions) -> float:
    """As it is graded: a single far token is no share of anything."""
    return positions.far_share if positions.far >= SUSPECT_FAR_TOKENS else 0.0


def _drift(rows: Sequence[Rollout], scores: Sequence[RowScore], limits: Thresholds) -> Measurement:
    drifts = [row_drift(row.logprobs, score) for row, score in zip(rows, scores, strict=True)]
    row = max(range(len(drifts)), key=drifts.__getitem__)
    limit = limits.logprob_drift_row
    what = "mean log-prob difference of a row, nats"
    return Measurement(Check.DRIFT, "drift", what, row, drifts[row], limit.suspect, None)


def _worst(code: str, what: str, values: Sequence[float], limit: Limit) -> Measurement:
    row = max(range(len(values)), key=values.__getitem__)
    return _made(Check.SAMPLING, code, what, row, values[row], limit)


def _made(check: Check, code: str, what: str, row: int | None, measured: float, limit: Limit) -> Measurement:
    return Measurement(check, code, what, row, float(measured), limit.suspect, limit.fraud)
