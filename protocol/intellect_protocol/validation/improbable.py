"""Check 11, second half: tokens may not be less probable than chance allows.

Distances alone leave a gap. A token that the policy practically never says still has a place in the unit
interval, and at a limit of 0.05 one position in ten lies near enough to it: a worker could end any completion
early where the uniform happens to fall next to the stop token, at distances that honest noise has as well.
What gives such a choice away is the token's probability p: the seed draws it with chance p, the cheat takes
it with chance 0.1.

So each row gets a number e that is 1 on average, whatever the policy, if its tokens are drawn by the seeds:

    e = (any + stop) / 2
    any  = 1/n sum over tokens of 1 / (V p)     n: the run's max_tokens, V: size of the vocabulary
    stop = 1/(n s) * 1 / p                      of the stop token at the end, if there is one; s: stop ids

(each token's 1/p is 1 on average for every token that could be drawn, and there are V or s of these at each
of n positions). By Markov's inequality e exceeds x with a chance of at most 1/x. For a group the e of its
rows, each drawn from a stream of its own, are multiplied as bets of a share of the stake, prod (1 - a + a e)
with a = 1 / samples, which is 1 on average too (test martingales: Shafer et al., Statistical Science 26,
2011). So the limits need no calibration: they are chances of a false alarm. Numeric noise between two
machines scales p by a factor near 1, and the limits leave room for ten. With top-k or top-p the stop term
may be larger by one over the probability that is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..engines.base import RowScore
from ..rollouts import Rollout
from ..run import Limit, RunTerms
from .findings import Check, Finding
from .limits import grade

IMPROBABLE = Limit(suspect=6.0, fraud=9.0)
"""Decimal logarithm of e: an honest row or group is suspect once in a million times, fraud once in 10**9."""

_SMALLEST_LOGPROB = -600.0  # its inverse, summed over a row, is a float64


def evidence(row: Rollout, score: RowScore, terms: RunTerms) -> float:
    """e of one row, from the validator's log-probs."""
    inverse = np.exp(-np.maximum(np.asarray(score.logprobs, dtype=np.float64), _SMALLEST_LOGPROB))
    places = terms.sampling.max_tokens
    total = float(inverse.sum()) / terms.model.vocab_size
    if row.completion_tokens[-1] in terms.sampling.stop_ids:
        total += float(inverse[-1]) / len(terms.sampling.stop_ids)
    return total / (2 * places)


def check_improbable(rows: Sequence[Rollout], scores: Sequence[RowScore], terms: RunTerms) -> list[Finding]:
    """Every row, and every group of `samples_per_prompt` rows, against the limits."""
    samples = terms.sampling.samples_per_prompt
    values = [evidence(row, score, terms) for row, score in zip(rows, scores, strict=True)]
    findings: list[Finding] = []
    for number, value in enumerate(values):
        findings += _graded("row", f"row {number}", number, math.log10(value))
    for start in range(0, len(values), samples):
        bets = (math.log10(1 - 1 / samples + value / samples) for value in values[start : start + samples])
        findings += _graded("group", f"prompt {start // samples}", None, sum(bets))
    return findings


def _graded(scope: str, name: str, row: int | None, measured: float) -> list[Finding]:
    graded = grade(measured, IMPROBABLE)
    if not graded:
        return []
    kind, exceeded = graded
    text = (
        f"{name}: the seeds draw tokens this improbable at most once in 10^{measured:.1f} times, "
        f"limit 10^{exceeded:g}"
    )
    return [Finding(Check.SAMPLING, f"sampling_improbable_{scope}", kind, text, row, measured, exceeded)]
