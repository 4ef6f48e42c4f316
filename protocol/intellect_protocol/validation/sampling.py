"""Check 11: the tokens are those that the unit's seeds draw from the validator's probabilities.

Each position has a *distance*: how far its uniform lies from the interval of its token (see `..sampling`).
Honest noise gives many tiny distances, a cheat a few large ones, so there are three kinds of limits:

- one on every single distance, however short the row or confident the position;
- one on the share of distances above `far_distance`, per row and per group. Shares of a few tokens mean
  little (one far token is a tenth of a row of ten): it takes two far tokens to be suspect and four to be
  fraud;
- one on the mean distance, per row and per group, and on the share of tokens that differ from the validator's
  own draw, per group. Both look only at informative positions (top probability at most 0.99), and abstain
  where there are fewer than `min_informative` of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..engines.base import RowScore
from ..run import Limit, Thresholds
from .findings import Check, Finding
from .limits import grade

SUSPECT_FAR_TOKENS = 2
FRAUD_FAR_TOKENS = 4


class Positions:
    """Scored positions of a row or a group.

    Attributes:
        far: distances above `far_distance`.
        abstains: fewer informative positions than `min_informative`; the mean and the share are then 0.
    """

    def __init__(self, scores: Sequence[RowScore], limits: Thresholds) -> None:
        self.distances: npt.NDArray[np.float64] = np.concatenate([score.distances for score in scores])
        exact = np.concatenate([np.asarray(score.exact, dtype=np.bool_) for score in scores])
        top_prob = np.concatenate([score.top_prob for score in scores])
        self.far = int((self.distances > limits.far_distance).sum())
        self.informative = top_prob <= limits.informative_top_probability
        self.abstains = int(self.informative.sum()) < limits.min_informative
        self.inexact_share = 0.0 if self.abstains else 1.0 - float(exact[self.informative].mean())

    @property
    def far_share(self) -> float:
        return self.far / len(self.distances)

    @property
    def mean_distance(self) -> float:
        return 0.0 if self.abstains else float(self.distances[self.informative].mean())


def check_sampling(scores: Sequence[RowScore], group_size: int, limits: Thresholds) -> list[Finding]:
    """Judge the scores of a unit.

    Args:
        scores: of all rows, in the order of the file.
        group_size: samples per prompt; rows [g * group_size, (g + 1) * group_size) are group g.
    """
    findings: list[Finding] = []
    for number, score in enumerate(scores):
        findings += _row_findings(number, score, limits)
    for start in range(0, len(scores), group_size):
        group = Positions(scores[start : start + group_size], limits)
        name = f"prompt {start // group_size}"
        findings += _shares(name, None, group, limits.far_share_group, limits.mean_distance_group, "group")
        findings += _graded(
            "sampling_inexact_group",
            f"{name}: share of tokens that the seeds do not draw",
            None,
            group.inexact_share,
            limits.inexact_share_group,
        )
    return findings


def _row_findings(number: int, score: RowScore, limits: Thresholds) -> list[Finding]:
    row = Positions([score], limits)
    worst = int(row.distances.argmax())
    findings = _graded(
        "sampling_distance",
        f"row {number}, token {worst}: distance from what the seed draws",
        number,
        float(row.distances[worst]),
        limits.max_distance,
    )
    name = f"row {number}"
    return findings + _shares(name, number, row, limits.far_share_row, limits.mean_distance_row, "row")


def _shares(
    name: str, row: int | None, positions: Positions, far: Limit, mean: Limit, scope: str
) -> list[Finding]:
    far_text = f"{name}: share of tokens far from what the seeds draw"
    if positions.far < SUSPECT_FAR_TOKENS:
        far = Limit(1.0, 1.0)
    elif positions.far < FRAUD_FAR_TOKENS:
        far = Limit(far.suspect, 1.0)
    mean_text = f"{name}: mean distance from what the seeds draw"
    return [
        *_graded(f"sampling_far_{scope}", far_text, row, positions.far_share, far),
        *_graded(f"sampling_mean_{scope}", mean_text, row, positions.mean_distance, mean),
    ]


def _graded(code: str, text: str, row: int | None, measured: float, limit: Limit) -> list[Finding]:
    graded = grade(measured, limit)
    if not graded:
        return []
    kind, exceeded = graded
    text = f"{text}: {measured:.4g}, limit {exceeded:.4g}"
    return [Finding(Check.SAMPLING, code, kind, text, row, measured, exceeded)]
