"""The result of a calibration: thresholds, how sure they are, what they catch, and what they leave open."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from intellect_protocol.engines.base import Completion
from intellect_protocol.run import Calibration, DetectionRate, Thresholds
from intellect_protocol.wire import sha256

from .detection import INTELLECT_2, Detection, detection
from .fit import FRAUD_PER_UNIT, SUSPECT_PER_UNIT, Fitted, fit
from .measured import completions_of, read_units, scores_of
from .plan import Plan, Setting, Source, choices_file
from .steering import Choices, Freedom, freedom
from .values import UnitScores, Values, measure_unit, no_values

HONEST = "honest"


class PairSpread(msgspec.Struct, frozen=True):
    """Honest spread between one generator and one verifier: median and largest value of each quantity."""

    generator: str
    verifier: str
    chunks: int
    middle: dict[str, float]
    largest: dict[str, float]


class Report(msgspec.Struct, frozen=True):
    """Everything that a calibration found; `report.json`.

    Attributes:
        chunks, rows: honest ones, counted once per pair.
        honest: false positives, on the half that did not choose the limits.
        steering: freedom of a cheat up to suspicion and up to fraud.
        intellect_2: the limits behind `Detection.intellect_2_chunk` and `.intellect_2_unit`.
    """

    model: str
    weights_hash: str
    dtype: str
    thresholds: Thresholds
    chunks: int
    rows: int
    units: int
    tested_chunks: int
    aimed_suspect_per_unit: float
    aimed_fraud_per_unit: float
    limits: list[Fitted]
    pairs: list[PairSpread]
    honest: Detection
    cheats: list[Detection]
    steering: list[Freedom]
    intellect_2: dict[str, float]

    def encoded(self) -> bytes:
        """Bytes of `report.json`."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def record(self) -> Calibration:
        """What goes into the run configuration."""
        honest = self.honest
        return Calibration(
            report_hash=sha256(self.encoded()).hex(),
            weights_hash=self.weights_hash,
            chunks=self.chunks,
            tested_chunks=self.tested_chunks,
            false_suspect_chunk=_short(honest.chunk.suspect_bound),
            false_fraud_chunk=_short(honest.chunk.fraud_bound),
            tested_units=honest.unit.of,
            false_suspect_unit=_short(honest.unit.suspect_bound),
            false_fraud_unit=_short(honest.unit.fraud_bound),
            steering_bits=_short(self.steering[0].bits),
            detection=[
                DetectionRate(
                    each.cheat,
                    each.unit.of,
                    _short(each.chunk.suspect),
                    _short(each.unit.suspect),
                    _short(each.unit.fraud),
                )
                for each in self.cheats
            ],
        )


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def honest_chunks(work: Path, plan: Plan) -> int:
    """Chunks of honest work that were verified, counted once per pair. Errors as `measure.read_units`."""
    return sum(
        len(source.verifiers) * len(completion.proofs)
        for source in plan.honest
        for unit in plan.units_of(source)
        for completion in _flat(completions_of(work, source, unit))
    )


def make_report(work: Path, plan: Plan) -> Report:
    """Fit the limits to what was measured, and judge everything by them.

    Units are dealt to the halves by turns, each with all its verifiers: scores of one generation are alike.

    Raises:
        ConfigError: a measurement is missing or cannot be read, or there is too little of it.
    """
    from intellect_protocol.errors import ConfigError
    from intellect_protocol.validation.limits import default_thresholds

    base = default_thresholds(plan.dtype)
    halves: tuple[list[UnitScores], list[UnitScores]] = ([], [])
    pairs = []
    number = 0
    for source in plan.honest:
        own = {verifier: _units(work, plan, source, verifier) for verifier in source.verifiers}
        for unit in plan.units_of(source):
            halves[number % 2].extend(scored[unit] for scored in own.values())
            number += 1
        pairs += [_spread(source, verifier, scored, base) for verifier, scored in own.items()]
    if not halves[1]:
        raise ConfigError(f"{work}: one honest unit is too little to choose limits and to test them")
    values = [_values(half, base) for half in halves]
    thresholds, fitted = fit(values[0], values[1], len(halves[0]), plan.dtype)
    cheats = [
        detection(
            source.cheat,
            [unit for verifier in source.verifiers for unit in _units(work, plan, source, verifier)],
            thresholds,
        )
        for source in plan.sources
        if source.cheat
    ]
    choices = read_units(choices_file(work), list[list[Choices]])
    everything = [*halves[0], *halves[1]]
    return Report(
        model=plan.model,
        weights_hash=plan.weights_hash,
        dtype=plan.dtype,
        thresholds=thresholds,
        chunks=sum(unit.chunks for unit in everything),
        rows=sum(len(unit.scores) for unit in everything),
        units=len(everything),
        tested_chunks=sum(unit.chunks for unit in halves[1]),
        aimed_suspect_per_unit=SUSPECT_PER_UNIT,
        aimed_fraud_per_unit=FRAUD_PER_UNIT,
        limits=fitted,
        pairs=pairs,
        honest=detection(HONEST, halves[1], thresholds),
        cheats=cheats,
        steering=[freedom(choices, plan.samples, thresholds, fraud=fraud) for fraud in (False, True)],
        intellect_2=INTELLECT_2,
    )


def _flat(completions: list[list[Completion]]) -> list[Completion]:
    return [one for group in completions for one in group]


def _units(work: Path, plan: Plan, source: Source, verifier: Setting) -> list[UnitScores]:
    found = []
    for unit in plan.units_of(source):
        completions = _flat(completions_of(work, source, unit))
        scored = UnitScores(completions, scores_of(work, source, verifier, unit), plan.samples)
        scored.check()
        found.append(scored)
    return found


def _values(units: Sequence[UnitScores], base: Thresholds) -> Values:
    total = no_values()
    for unit in units:
        total = total.joined(measure_unit(unit, base))
    return total


def _spread(source: Source, verifier: Setting, units: Sequence[UnitScores], base: Thresholds) -> PairSpread:
    values = _values(units, base).of
    return PairSpread(
        generator=source.name,
        verifier=verifier.name,
        chunks=sum(unit.chunks for unit in units),
        middle={name: sorted(own)[len(own) // 2] for name, own in values.items() if own},
        largest={name: max(own) for name, own in values.items() if own},
    )
