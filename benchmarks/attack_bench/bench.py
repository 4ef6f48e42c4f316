"""Mounts attacks on one policy and judges them by all checks, also those a validator would not reach."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import trio
from adversaries import (
    CopiedTokens,
    CutShort,
    DraftTokens,
    EarlyStop,
    FlippedSigns,
    OneTokenEdited,
    OtherTemperature,
    PartlyOther,
    PastedAnswer,
    StopPadding,
    TypicalConstant,
    TypicalStates,
    hidden_states,
    typical_state,
    typical_value,
)
from arena import Arena, Factory, InProcess, load_engine
from example_unit import NODE
from steering import NeverStops, SlackSteering, StopsWithinReach, reachable

from intellect_coordinator.calibration.altered_weights import Alteration, Kind, alter_checkpoint
from intellect_node.devnet.cheats import (
    BestOfN,
    ForgedReward,
    ReplayedProof,
    halve_layers,
)
from intellect_node.rollout import UnitBuilder
from intellect_protocol.engines.base import Completion, GenerateRequest, RowScore, Sampling
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.rollouts import RolloutUnit, write_unit
from intellect_protocol.validation.commitment import check_commitments
from intellect_protocol.validation.drift import check_drift
from intellect_protocol.validation.findings import Finding, is_fatal
from intellect_protocol.validation.findings import Kind as Weight
from intellect_protocol.validation.improbable import check_improbable
from intellect_protocol.validation.pipeline import check_structure
from intellect_protocol.validation.sampling import check_sampling

from .results import Result

# TOPLOC (arXiv 2501.16007) for bf16, and INTELLECT-2 (arXiv 2505.07291, termination check: a stop token must
# have a probability above 0.1). Its second check on tokens, against completions of another model, has no
# published threshold and is left out.
PAPER_EXPONENTS, PAPER_MEAN, PAPER_MEDIAN, PAPER_STOP = 38, 10.0, 8.0, 0.1
_REMEMBERED = 8

Mount = Callable[[int], RolloutUnit]
"""Unit index -> the unit that an attack ships."""


class Remembering(InProcess):
    """Does not generate the same requests twice: most attacks begin with the honest completions."""

    def __init__(self, engine: TorchEngine) -> None:
        super().__init__(engine)
        self._known: dict[bytes, list[list[Completion]]] = {}

    async def generate(
        self, requests: Sequence[GenerateRequest], sampling: Sampling
    ) -> list[list[Completion]]:
        key = msgspec.msgpack.encode((list(requests), sampling))
        if key not in self._known:
            self._known[key] = await super().generate(requests, sampling)
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
        return self._known[key]


class Bench:
    """One policy, and everything a cheat might run instead."""

    def __init__(self, name: str, arena: Arena, work: Path) -> None:
        self.name, self.arena, self._work = name, arena, work
        self._client = Remembering(arena.engine)

    def build(self, factory: Factory, index: int) -> RolloutUnit:
        """A unit by the policy's own weights."""
        builder = factory(self.arena.run, NODE.address_bytes, self._client, self.arena.tasks)
        return _run(builder.build, self.arena.policy, index)

    def other(self, folder: Callable[[], Path], index: int) -> RolloutUnit:
        """A unit by other weights."""
        return self.arena.build(engine=self.engine(folder()), index=index)

    def engine(self, folder: Path) -> TorchEngine:
        return load_engine(folder, self.arena.run.terms.model.dtype)

    def altered(self, alteration: Alteration) -> Path:
        rate = f"-{alteration.learning_rate:g}" if alteration.kind is Kind.OLDER else ""
        out = self._work / f"{self.name}-{alteration.name}{rate}"
        if not out.exists():
            alter_checkpoint(self.arena.folder, out, alteration)
        return out

    def halved(self) -> Path:
        out = self._work / f"{self.name}-half"
        if not out.exists():
            halve_layers(self.arena.folder, out)
        return out

    def partly(self, index: int) -> RolloutUnit:
        factory = _with(PartlyOther, cheap=self.engine(self.altered(Alteration(Kind.INT8))))
        return self.build(factory, index)

    def drafted(self, folder: Callable[[], Path], index: int) -> RolloutUnit:
        return self.build(_with(DraftTokens, draft=self.engine(folder())), index)

    def typical(self, index: int) -> RolloutUnit:
        return self.build(_with(TypicalStates, typical=self._typical), index)

    @cached_property
    def _typical(self) -> torch.Tensor:
        """The mean state of the first group of another honest unit."""
        rows = self.build(UnitBuilder, 1000).rows[: self.arena.run.terms.sampling.samples_per_prompt]
        return typical_state(
            self.arena.engine._loaded(), rows[0].prompt_tokens, [row.completion_tokens for row in rows]
        )

    def constant(self, index: int) -> RolloutUnit:
        return self.build(_with(TypicalConstant, bits=self._usual_value), index)

    @cached_property
    def _usual_value(self) -> int:
        """The commonest top entry of another honest unit."""
        row = self.build(UnitBuilder, 1000).rows[0]
        return typical_value(
            hidden_states(self.arena.engine._loaded(), row.prompt_tokens, [row.completion_tokens])
        )

    def replayed(self, index: int) -> RolloutUnit:
        builder = ReplayedProof(self.arena.run, NODE.address_bytes, self._client, self.arena.tasks)
        _run(builder.build, self.arena.policy, 1000)  # the first completion it ever made is from another unit
        return _run(builder.build, self.arena.policy, index)

    def attacks(self, older: dict[str, Callable[[], Path]]) -> dict[str, Mount]:
        """By name: what makes unit `index` of the attack."""
        weights: dict[str, Callable[[], Path]] = {
            "int8 weights": lambda: self.altered(Alteration(Kind.INT8)),
            "fp8 weights": lambda: self.altered(Alteration(Kind.FP8)),
            "int4 weights": lambda: self.altered(Alteration(Kind.INT4)),
            "last layer dropped": lambda: self.altered(Alteration(Kind.DROPPED_LAYER)),
            "half of the layers": self.halved,
            **older,
        }
        own: dict[str, type[UnitBuilder]] = {
            "tokens of another sample, own proofs": CopiedTokens,
            "one token edited, honest proofs": OneTokenEdited,
            "answer pasted after the fact": PastedAnswer,
            "early stop token": EarlyStop,
            "cut short": CutShort,
            "stop tokens as padding": StopPadding,
            "stop token forbidden": NeverStops,
            "stop token within reach of the draw": StopsWithinReach,
            "temperature 0.9": OtherTemperature,
            "best of 4 samples": BestOfN,
            "slack steering": SlackSteering,
            "signs flipped": FlippedSigns,
            "forged reward": ForgedReward,
        }
        return {
            "honest": partial(self.build, UnitBuilder),
            **{name: partial(self.build, factory) for name, factory in own.items()},
            "constant polynomial": self.constant,
            "typical states": self.typical,
            "another row's proofs": self.replayed,
            "draft tokens (half of the layers)": partial(self.drafted, self.halved),
            **{name: partial(self.other, folder) for name, folder in weights.items()},
            "int8 weights on 3 rows of 8": self.partly,
        }

    def measure(self, attack: str, index: int, mount: Mount) -> Result:
        """Mount an attack once and judge it by all checks, also those that a validator would not reach."""
        started = time.process_time()
        unit = mount(index)
        seconds = time.process_time() - started
        context = self.arena.context(write_unit(unit), index)
        structure = check_structure(write_unit(unit), context)
        scores: list[RowScore] = []
        findings = list(structure.findings)
        limits, terms = self.arena.run.revision.thresholds, self.arena.run.terms
        if not is_fatal(findings):
            scores = self.arena.scores(unit, index)
            findings += check_commitments(scores, limits)
            findings += check_sampling(scores, terms.sampling.samples_per_prompt, limits)
            findings += check_improbable(unit.rows, scores, terms)
            findings += check_drift(unit.rows, scores, limits)
        chunks = [
            check_commitments([msgspec.structs.replace(score, chunk_reports=[report])], limits)
            for score in scores
            for report in score.chunk_reports
        ]
        draws = [finding for finding in findings if finding.code.startswith("sampling")]
        deciding = [f for f in findings if f.kind in (Weight.FRAUD, Weight.INVALID)] or findings
        return Result(
            setting=self.name,
            attack=attack,
            index=index,
            seconds=seconds,
            tokens=sum(len(row.completion_tokens) for row in unit.rows),
            reward=float(np.mean([row.reward for row in unit.rows])),
            rows=len(unit.rows),
            chunks=len(chunks),
            fraud=sorted({f.check.value for f in findings if f.kind is Weight.FRAUD}),
            suspect=sorted({f.check.value for f in findings if f.kind is Weight.SUSPECT}),
            codes=_by_frequency(finding.code for finding in deciding),
            chunk_fraud=sum(any(f.kind is Weight.FRAUD for f in own) for own in chunks),
            chunk_suspect=sum(bool(own) for own in chunks),
            row_fraud=len(_rows(draws, Weight.FRAUD)),
            row_suspect=len(_rows(draws, Weight.FRAUD, Weight.SUSPECT)),
            paper_chunks=sum(
                report.exponent_mismatches > PAPER_EXPONENTS
                or report.mantissa_mean > PAPER_MEAN
                or report.mantissa_median > PAPER_MEDIAN
                for score in scores
                for report in score.chunk_reports
            ),
            paper_stops=sum(
                row.finish_reason == "stop" and math.exp(score.logprobs[-1]) <= PAPER_STOP
                for row, score in zip(unit.rows, scores, strict=bool(scores))
            )
            if scores
            else 0,
            mantissas=[report.mantissa_mean for score in scores for report in score.chunk_reports],
            drifts=[
                float(np.mean(np.abs(row.logprobs - np.asarray(score.logprobs))))
                for row, score in zip(unit.rows, scores, strict=False)
            ],
            reach=self._reach(unit, index) if attack == "honest" else {},
        )

    def _reach(self, unit: RolloutUnit, index: int) -> dict[str, float]:
        """Positions of an honest unit at which a cheat could take another token within the limits."""
        limits = self.arena.run.revision.thresholds
        reach = min(limits.far_distance, limits.max_distance.suspect)
        context = self.arena.context(b"", index)
        return reachable(self.arena.engine._loaded(), unit, context.seed, self.arena.run, reach)


def _run(build: Any, *arguments: Any) -> RolloutUnit:
    unit: RolloutUnit = trio.run(build, *arguments)
    return unit


def _with(factory: type[UnitBuilder], **attributes: object) -> Factory:
    return type(factory.__name__, (factory,), attributes)


def _rows(findings: Iterable[Finding], *kinds: Weight) -> set[int]:
    return {f.row for f in findings if f.row is not None and f.kind in kinds}


def _by_frequency(codes: Iterable[str]) -> list[str]:
    counts: dict[str, int] = {}
    for code in codes:
        counts[code] = counts.get(code, 0) + 1
    return sorted(counts, key=lambda code: -counts[code])
