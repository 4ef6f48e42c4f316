"""Check 12: the worker's log-probs against the validator's.

Training uses the validator's numbers, so a wrong log-prob gains nothing; it is a sign of another policy or of
broken arithmetic, and sends the unit to a second validator.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..engines.base import RowScore
from ..rollouts import Rollout
from ..run import Thresholds
from .findings import Check, Finding, Kind

MIN_TOKENS = 8
"""Shorter rows are averaged as if they had this many tokens, so that one noisy token does not decide."""


def row_drift(logprobs: npt.NDArray[np.float32], score: RowScore) -> float:
    """Mean absolute difference, in nats, of a worker's log-probs [n] from the validator's."""
    difference = np.abs(logprobs.astype(np.float64) - np.asarray(score.logprobs, dtype=np.float64))
    return float(difference.sum()) / max(len(difference), MIN_TOKENS)


def check_drift(rows: Sequence[Rollout], scores: Sequence[RowScore], limits: Thresholds) -> list[Finding]:
    """Mean absolute log-prob difference of each row, in nats."""
    findings = []
    limit = limits.logprob_drift_row.suspect
    for number, (row, score) in enumerate(zip(rows, scores, strict=True)):
        drift = row_drift(row.logprobs, score)
        if not drift <= limit:
            text = f"row {number}: log-probs differ by {drift:.4g} nats on average, limit {limit:.4g}"
            findings.append(Finding(Check.DRIFT, "drift", Kind.SUSPECT, text, number, drift, limit))
    return findings
