"""Limits from what honest work measured, and what is known about how often they will be wrong.

One half of the honest units chooses the limits, the other half tests them. A limit lies where the tail of
the choosing half, continued as an exponential (peaks over threshold, Pickands 1975), would be exceeded at a
target rate, and not closer than a margin to the largest value seen: calibration runs on one machine, and the
run does not. The tested rate comes with its exact upper confidence bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, Decimal

import msgspec

from intellect_protocol.run import Limit, Thresholds
from intellect_protocol.validation.limits import default_thresholds

from .bounds import upper_bound
from .values import LEVELS, Values

SUSPECT_PER_UNIT = 1e-2
"""Honest units that may be judged twice."""
FRAUD_PER_UNIT = 1e-6
"""Honest units that may open a case, by the continued tail; a second validator's verdict is still needed."""
_TAIL = 0.1
_SUSPECT_MARGIN, _FRAUD_MARGIN = 1.25, 1.75
_COUNTS = ("exponent_mismatches", "sign_mismatches")
_NEVER_FRAUD = ("logprob_drift_row",)
_ALWAYS_FLOORED = (
    "negative_share",
    "sign_mismatches",
    "far_share_row",
    "far_share_group",
    "max_distance",
)
_AT_MOST_ONE = ("negative_share", "far_share_row", "far_share_group", "max_distance", "inexact_share_group")


class Fitted(msgspec.Struct, frozen=True):
    """One limit and the test of it.

    Attributes:
        level: what has one value: "chunk", "row", "group" or "unit".
        chosen_on, tested_on: honest values in each half.
        largest: of both halves.
        over_suspect, over_fraud: values of the testing half above each limit.
        suspect_bound, fraud_bound: 95 % upper bounds of these rates.
    """

    name: str
    level: str
    limit: Limit
    chosen_on: int
    tested_on: int
    largest: float
    over_suspect: int
    over_fraud: int
    suspect_bound: float
    fraud_bound: float


def tail_limit(values: Sequence[float], rate: float) -> float:
    """The value that is exceeded at `rate` if the largest tenth of `values` has an exponential tail.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values to choose a limit from")
    ordered = sorted(values)
    threshold = ordered[math.floor(len(ordered) * (1 - _TAIL))] if len(ordered) > 1 else ordered[0]
    above = [value - threshold for value in ordered if value > threshold]
    if not above:
        return threshold
    mean = math.fsum(above) / len(above)
    return threshold + mean * max(0.0, math.log(len(above) / (len(ordered) * rate)))


def choose_limit(name: str, values: Sequence[float], per_unit: float, floor: Limit) -> Limit:
    """The limit of one quantity.

    Args:
        values: honest ones.
        per_unit: values of a unit, on average.
        floor: the least it may be, for what this machine cannot show.
    """
    share = len(LEVELS) * max(per_unit, 1.0)
    most = max(values)
    suspect = max(tail_limit(values, SUSPECT_PER_UNIT / share), _SUSPECT_MARGIN * most, floor.suspect)
    fraud = max(tail_limit(values, FRAUD_PER_UNIT / share), _FRAUD_MARGIN * most, floor.fraud, suspect)
    if name in _NEVER_FRAUD:
        fraud = suspect
    if name in _COUNTS:
        return Limit(float(math.ceil(suspect)), float(math.ceil(fraud)))
    if name in _AT_MOST_ONE:
        suspect, fraud = min(suspect, 1.0), min(fraud, 1.0)
    return Limit(_rounded_up(suspect), _rounded_up(fraud))


def _floor(name: str, dtype: str, base: Thresholds) -> Limit:
    """What measuring on one machine may not go below.

    In float32 honest work agrees to the bit here, and will not between machines: the defaults leave room for
    that. What a forged polynomial shows is a matter of chance and not of noise, signs hardly ever differ, and
    most rows have no far token at all, so that their shares have no tail to continue. Single distances have
    a heavier one than is continued here: of some 100,000 honest tokens of SmolLM2 in a swarm two lay 0.18 and
    0.19 from their draw, where 2,240 chunks had shown 0.10.
    """
    floor: Limit = getattr(base, name)
    return floor if dtype == "float32" or name in _ALWAYS_FLOORED else Limit(0.0, 0.0)


def _rounded_up(value: float) -> float:
    """Two significant digits: more would claim more than was measured."""
    if value <= 0:
        return 0.0
    exact = Decimal(repr(value))
    return float(exact.quantize(Decimal(1).scaleb(exact.adjusted() - 1), ROUND_CEILING))


def fit(choosing: Values, testing: Values, units: int, dtype: str) -> tuple[Thresholds, list[Fitted]]:
    """Choose all limits on one half of the honest values and test them on the other.

    Args:
        units: that `choosing` is of.
        dtype: of the run.

    Raises:
        ValueError: a half is empty.
    """
    base = default_thresholds(dtype)
    limits: dict[str, Limit] = {}
    fitted: list[Fitted] = []
    for name, level in LEVELS.items():
        chosen, tested = choosing.of[name], testing.of[name]
        if not chosen or not tested:
            raise ValueError(f"no honest values of {name}")
        limit = choose_limit(name, chosen, len(chosen) / units, _floor(name, dtype, base))
        limits[name] = limit
        over = [sum(value > bar for value in tested) for bar in (limit.suspect, limit.fraud)]
        fitted.append(
            Fitted(
                name=name,
                level=level,
                limit=limit,
                chosen_on=len(chosen),
                tested_on=len(tested),
                largest=max(*chosen, *tested),
                over_suspect=over[0],
                over_fraud=over[1],
                suspect_bound=upper_bound(over[0], len(tested)),
                fraud_bound=upper_bound(over[1], len(tested)),
            )
        )
    return msgspec.structs.replace(base, **limits), fitted
