"""What checks 10 to 12 measure in a unit, by the limit each value is held against.

The values are the checks' own: `validation.commitment`, `.sampling` and `.drift` compute them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec
import numpy as np

from intellect_protocol.engines.base import Completion, RowScore
from intellect_protocol.errors import ConfigError
from intellect_protocol.run import Thresholds
from intellect_protocol.validation.commitment import CHUNK_MEASURES, unit_mantissa
from intellect_protocol.validation.drift import row_drift
from intellect_protocol.validation.sampling import SUSPECT_FAR_TOKENS, Positions

CHUNK, ROW, GROUP, UNIT = "chunk", "row", "group", "unit"
LEVELS = {
    "exponent_mismatches": CHUNK,
    "sign_mismatches": CHUNK,
    "mantissa_mean": CHUNK,
    "mantissa_median": CHUNK,
    "negative_share": CHUNK,
    "max_distance": ROW,
    "far_share_row": ROW,
    "mean_distance_row": ROW,
    "logprob_drift_row": ROW,
    "far_share_group": GROUP,
    "mean_distance_group": GROUP,
    "inexact_share_group": GROUP,
    "mantissa_mean_unit": UNIT,
}
"""Every limit of `Thresholds`, and what has one value of its kind."""


class UnitScores(msgspec.Struct, frozen=True):
    """One unit as one verifier scored it; rows in the order of the file.

    Attributes:
        group: rows of each prompt.
    """

    completions: list[Completion]
    scores: list[RowScore]
    group: int

    def check(self) -> None:
        """
        Raises:
            ConfigError: the parts do not belong together.
        """
        if len(self.completions) != len(self.scores) or any(
            len(one.tokens) != len(score.logprobs) or (not score.chunk_reports and not score.proof_error)
            for one, score in zip(self.completions, self.scores, strict=True)
        ):
            raise ConfigError("scores of another unit than the completions")

    @property
    def chunks(self) -> int:
        """Proofs that were verified."""
        return sum(len(score.chunk_reports) for score in self.scores)

    def groups(self) -> Iterator[UnitScores]:
        """The unit's groups as small units."""
        for start in range(0, len(self.scores), self.group):
            part = slice(start, start + self.group)
            yield UnitScores(self.completions[part], self.scores[part], self.group)


class Values(msgspec.Struct, frozen=True):
    """Measured values by limit; every list has one entry per chunk, row, group or unit."""

    of: dict[str, list[float]]

    def joined(self, other: Values) -> Values:
        """Both together."""
        return Values({name: self.of[name] + other.of[name] for name in LEVELS})


def no_values() -> Values:
    """Of no unit at all."""
    return Values({name: [] for name in LEVELS})


def measure_unit(unit: UnitScores, limits: Thresholds) -> Values:
    """All values of a unit.

    Args:
        limits: only `far_distance`, `informative_top_probability` and `min_informative` matter.
    """
    found = no_values().of
    for report in chain.from_iterable(score.chunk_reports for score in unit.scores):
        for name, measure in CHUNK_MEASURES.items():
            if name in found:
                found[name].append(float(measure.measure(report)))
    for completion, score in zip(unit.completions, unit.scores, strict=True):
        row = Positions([score], limits)
        found["max_distance"].append(float(row.distances.max()))
        found["far_share_row"].append(_far_share(row))
        found["mean_distance_row"].append(row.mean_distance)
        found["logprob_drift_row"].append(row_drift(np.asarray(completion.logprobs, dtype=np.float32), score))
    for part in unit.groups():
        group = Positions(part.scores, limits)
        found["far_share_group"].append(_far_share(group))
        found["mean_distance_group"].append(group.mean_distance)
        found["inexact_share_group"].append(group.inexact_share)
    middle = unit_mantissa(unit.scores)
    found["mantissa_mean_unit"].append(0.0 if middle is None else middle)
    return Values(found)


def _far_share(positions: Positions) -> float:
    """The share as it counts: the check looks away from a single far token."""
    return positions.far_share if positions.far >= SUSPECT_FAR_TOKENS else 0.0


def distances(units: Sequence[UnitScores]) -> list[float]:
    """Sampling distances of all tokens."""
    return [value for unit in units for score in unit.scores for value in score.distances]
