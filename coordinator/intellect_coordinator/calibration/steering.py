"""Slack steering: how many other completions a cheat may choose from without passing a limit.

A token whose interval lies near its uniform passes as numeric noise, so whoever controls the sampler may take
it on purpose, and choose among completions. What bounds the choice are the limits on single distances, on the
count of far ones and on their mean. For real rows the number of completions within all limits is counted
exactly, as if later distributions did not depend on earlier choices: each position has a list of tokens by
distance, and completions of a total distance are counted by convolution. Its logarithm is the cheat's freedom
in bits.

Most tokens near a uniform are ones that the policy hardly ever says, which serve nobody who wants a better
answer; so tokens of probability 0.01 or more are counted apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from intellect_protocol.run import Limit, Thresholds
from intellect_protocol.validation.sampling import FRAUD_FAR_TOKENS, SUSPECT_FAR_TOKENS

PLAUSIBLE = 0.01
_PER_DECADE, _DECADES = 20, 7
EDGES: npt.NDArray[np.float64] = np.concatenate(
    [[0.0], 10.0 ** (np.arange(-_DECADES * _PER_DECADE, 1) / _PER_DECADE)]
)
"""Lower edges of the distance bins: the drawn token alone in the first, then twenty to a decade from 1e-7."""
_BUDGET_STEPS = 256

Counts = npt.NDArray[np.float64]


class Choices(msgspec.Struct, frozen=True):
    """The tokens of one position by distance.

    Attributes:
        all: tokens in each bin of `EDGES`.
        plausible: of these with a probability of at least 0.01; the drawn token always counts.
        informative: whether the position counts for mean distances.
    """

    all: list[int]
    plausible: list[int]
    informative: bool


class Freedom(msgspec.Struct, frozen=True):
    """What limits leave to a cheat.

    Attributes:
        limits: which limits, in words.
        rows: rows it was counted on, and their mean length in tokens.
        bits: log2 of the completions to choose from, per row, on average.
        plausible_bits: with plausible tokens alone.
    """

    limits: str
    rows: int
    tokens_per_row: float
    bits: float
    plausible_bits: float


def choices_of(logits: Any, uniforms: npt.NDArray[np.float64], informative_top: float) -> list[Choices]:
    """The choices at each position.

    Args:
        logits: torch float32 [n, vocab], divided by the temperature; top-k and top-p, which would leave
            fewer choices, are not applied.
        uniforms: float64 [n].
        informative_top: largest probability of an informative position's likeliest token.
    """
    found = []
    for row, uniform in zip(logits.double().numpy(), uniforms.tolist(), strict=True):
        weights = np.exp(row - row.max())
        cumulative = weights.cumsum()
        upper = cumulative / cumulative[-1]
        probability = weights / cumulative[-1]
        distance = np.maximum(np.maximum(upper - probability - uniform, uniform - upper), 0.0)
        drawn = min(int(np.searchsorted(upper, uniform, side="right")), len(upper) - 1)
        bins = np.maximum(np.searchsorted(EDGES, distance, side="right") - 1, 1)
        bins[drawn] = 0
        plausible = probability >= PLAUSIBLE
        plausible[drawn] = True
        found.append(
            Choices(
                all=np.bincount(bins, minlength=len(EDGES)).tolist(),
                plausible=np.bincount(bins[plausible], minlength=len(EDGES)).tolist(),
                informative=bool(probability.max() <= informative_top),
            )
        )
    return found


def freedom(rows: Sequence[Sequence[Choices]], group: int, limits: Thresholds, *, fraud: bool) -> Freedom:
    """Bits of freedom per row.

    Args:
        rows: whole groups of `group` rows.
        fraud: up to the limits of fraud rather than of suspicion.
    """
    bits = [
        _bits_per_row(rows, group, limits, fraud=fraud, plausible=plausible) for plausible in (False, True)
    ]
    return Freedom(
        limits="fraud" if fraud else "suspect",
        rows=len(rows),
        tokens_per_row=sum(map(len, rows)) / len(rows),
        bits=bits[0],
        plausible_bits=bits[1],
    )


def _bits_per_row(
    rows: Sequence[Sequence[Choices]], group: int, limits: Thresholds, *, fraud: bool, plausible: bool
) -> float:
    def bar(limit: Limit) -> float:
        return limit.fraud if fraud else limit.suspect

    def bits(positions: Sequence[Choices], far: Limit, mean: Limit) -> float:
        informative = sum(each.informative for each in positions)
        budget = bar(mean) * informative if informative >= limits.min_informative else math.inf
        free_far = (FRAUD_FAR_TOKENS if fraud else SUSPECT_FAR_TOKENS) - 1
        most_far = max(free_far, math.floor(bar(far) * len(positions)))
        counter = _Counter(budget, most_far, limits.far_distance, bar(limits.max_distance))
        for each in positions:
            counter.add(each.plausible if plausible else each.all, costs=each.informative)
        return counter.bits

    totals = []
    for start in range(0, len(rows), group):
        own = rows[start : start + group]
        by_row = sum(bits(row, limits.far_share_row, limits.mean_distance_row) for row in own)
        everything = [each for row in own for each in row]
        totals.append(min(by_row, bits(everything, limits.far_share_group, limits.mean_distance_group)))
    return sum(totals) / len(rows)


class _Counter:
    """Completions by total distance and number of far tokens, position after position."""

    def __init__(self, budget: float, most_far: int, far_distance: float, max_distance: float) -> None:
        self._bounded = math.isfinite(budget)
        width = _BUDGET_STEPS + 1 if self._bounded else 1
        step = budget / _BUDGET_STEPS if self._bounded and budget > 0 else math.inf
        # Rounded down, as the bins are: the count is an upper bound.
        self._cost = np.zeros(len(EDGES), dtype=np.int64)
        if self._bounded:
            costs = np.where(budget < EDGES, width, EDGES / step if step < math.inf else 0.0)
            self._cost = np.minimum(np.floor(costs), width).astype(np.int64)
        self._allowed = max_distance >= EDGES
        self._far = far_distance < EDGES
        self._width, self._log2 = width, 0.0
        self._table: Counts = np.zeros((most_far + 1, width))
        self._table[0, 0] = 1.0

    def add(self, tokens: Sequence[int], *, costs: bool) -> None:
        """One more position; its distances count for the mean where `costs` is set."""
        count = np.asarray(tokens, dtype=np.float64) * self._allowed
        cost = self._cost if costs else np.zeros_like(self._cost)
        near = np.bincount(cost, weights=count * ~self._far, minlength=self._width + 1)[: self._width]
        far = np.bincount(cost, weights=count * self._far, minlength=self._width + 1)[: self._width]
        table = np.stack([np.convolve(line, near)[: self._width] for line in self._table])
        if far.any():
            for number in range(len(table) - 1, 0, -1):
                table[number] += np.convolve(self._table[number - 1], far)[: self._width]
        # Only ratios matter until the end, and a long row's counts leave the range of a float.
        largest = float(table.max())
        self._table = table / largest
        self._log2 += math.log2(largest)

    @property
    def bits(self) -> float:
        """log2 of all completions within the limits."""
        return self._log2 + math.log2(float(self._table.sum()))
