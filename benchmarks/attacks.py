"""Mounts every generation-side attack and writes which check catches it, and how often.

    python benchmarks/attacks.py                                tiny policy in float32 (made on the spot)
    python benchmarks/attacks.py --model FOLDER                 and this checkpoint, in bfloat16
    python benchmarks/attacks.py --model FOLDER --write docs/verification.md

Each attack is a unit builder of `tests/attacks` or an altered checkpoint, run by the nodes' own code; each
unit is judged by the validators' own checks with the default limits, and by INTELLECT-2's limits on the same
scores. Results are appended to --results as they come, and what is there already is not computed again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("attacks", "protocol")]

import torch  # noqa: E402
from adversaries import (  # noqa: E402
    CutShort,
    DraftTokens,
    EarlyStop,
    FlippedSigns,
    NeverStops,
    OneTokenEdited,
    OtherTemperature,
    PartlyOther,
    PastedAnswer,
    SlackSteering,
    StopPadding,
    StopsWithinReach,
    TypicalStates,
    reachable,
    typical_state,
)
from arena import Arena, Factory, InProcess, environment_arena, load_engine  # noqa: E402
from example_unit import NODE  # noqa: E402
from policy_history import at_version, train_policy  # noqa: E402

from intellect_coordinator.calibration.altered_weights import (  # noqa: E402
    Alteration,
    Kind,
    alter_checkpoint,
)
from intellect_node.devnet.cheats import (  # noqa: E402
    BestOfN,
    ConstantProof,
    EditedTokens,
    ForgedReward,
    ReplayedProof,
    halve_layers,
)
from intellect_node.rollout import UnitBuilder  # noqa: E402
from intellect_protocol.engines.base import Completion, GenerateRequest, RowScore, Sampling  # noqa: E402
from intellect_protocol.engines.torch_engine import TorchEngine  # noqa: E402
from intellect_protocol.rollouts import RolloutUnit, write_unit  # noqa: E402
from intellect_protocol.run import EnvironmentTerms, SamplingTerms  # noqa: E402
from intellect_protocol.validation.commitment import check_commitments  # noqa: E402
from intellect_protocol.validation.drift import check_drift  # noqa: E402
from intellect_protocol.validation.findings import Finding, is_fatal  # noqa: E402
from intellect_protocol.validation.findings import Kind as Weight  # noqa: E402
from intellect_protocol.validation.improbable import check_improbable  # noqa: E402
from intellect_protocol.validation.pipeline import check_structure  # noqa: E402
from intellect_protocol.validation.sampling import check_sampling  # noqa: E402
from intellect_trainer.models.tiny import make_tiny  # noqa: E402

BEGIN, END = "<!-- attacks:begin -->", "<!-- attacks:end -->"
STEPS = 8
# TOPLOC (arXiv 2501.16007) for bf16, and INTELLECT-2 (arXiv 2505.07291, termination check: a stop token must
# have a probability above 0.1). Its second check on tokens, against completions of another model, has no
# published threshold and is left out.
PAPER_EXPONENTS, PAPER_MEAN, PAPER_MEDIAN, PAPER_STOP = 38, 10.0, 8.0, 0.1
FALSE_ALARM, POWER = 4.75, 2.33  # normal quantiles of 1e-6 and 0.99

_REMEMBERED = 8

Mount = Callable[[int], RolloutUnit]


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


class Result(msgspec.Struct):
    """What one unit of one attack measured.

    Attributes:
        fraud, suspect: findings by check, at least one of that kind in the unit.
        chunk_fraud, chunk_suspect: chunks over a limit of the commitments, of `chunks`.
        row_fraud, row_suspect: rows over a limit of the draws, of `rows`.
        paper_chunks: chunks that INTELLECT-2's limits refuse; paper_stops: rows its stop rule refuses.
        mantissas, drifts: mean mantissa error of each chunk, mean log-prob difference of each row.
    """

    setting: str
    attack: str
    index: int
    seconds: float
    tokens: int
    reward: float
    rows: int
    chunks: int
    fraud: list[str]
    suspect: list[str]
    codes: list[str]
    chunk_fraud: int
    chunk_suspect: int
    row_fraud: int
    row_suspect: int
    paper_chunks: int
    paper_stops: int
    mantissas: list[float]
    drifts: list[float]
    reach: dict[str, float] = {}


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
            "edited tokens, old proofs": EditedTokens,
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
            "constant polynomial": ConstantProof,
            "signs flipped": FlippedSigns,
            "forged reward": ForgedReward,
        }
        return {
            "honest": partial(self.build, UnitBuilder),
            **{name: partial(self.build, factory) for name, factory in own.items()},
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
    import trio

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


# --- settings ----------------------------------------------------------------------------------------


def tiny_bench(work: Path) -> tuple[Bench, dict[str, Mount]]:
    """The sorting policy after 8 real steps of GRPO; older policies are its own past."""
    folder = work / "tiny-v0"
    if not folder.exists():
        make_tiny("sort_digits", folder, max_tokens=16, seed=0)
    sampling = SamplingTerms(1.0, 12, [1], 16, 8)
    first = environment_arena(folder, "float32", sampling, EnvironmentTerms("sort_digits"))
    past = work / "tiny-history"
    folders = [folder, *(past / f"v{step}" for step in range(1, STEPS + 1))]
    if not folders[-1].exists():
        past.mkdir(exist_ok=True)
        folders = train_policy(first, past, STEPS)
    bench = Bench("tiny", at_version(first, folders[-1]), work)
    older: dict[str, Callable[[], Path]] = {
        f"{steps} step{'s'[: steps > 1]} older": partial(folders.__getitem__, STEPS - steps)
        for steps in (1, 2, 8)
    }
    return bench, bench.attacks(older)


def model_bench(folder: Path, work: Path) -> tuple[Bench, dict[str, Mount]]:
    """A chat model in bf16 with tasks that it answers at length."""
    environments = [
        EnvironmentTerms(name)
        for name in ("arithmetic", "reasoning_gym:leg_counting", "reasoning_gym:basic_arithmetic")
    ]
    config = json.loads((folder / "config.json").read_text())
    sampling = SamplingTerms(1.0, 64, [config["eos_token_id"]], 2, 8)
    bench = Bench("model", environment_arena(folder, "bfloat16", sampling, *environments, chat=True), work)

    def before(steps: int, rate: float) -> Callable[[], Path]:
        return lambda: bench.altered(Alteration(Kind.OLDER, steps=steps, learning_rate=rate))

    older = {
        f"{steps} step{'s'[: steps > 1]} older, lr {rate:g}": before(steps, rate)
        for rate in (1e-6, 1e-5)
        for steps in (1, 2, 8)
    }
    return bench, bench.attacks(older)


def measured(
    bench: Bench, attacks: dict[str, Mount], units: int, results: Path, only: Sequence[str]
) -> list[Result]:
    """All units of all attacks; unit 0 of every attack comes first, so that a run may be stopped."""
    lines = results.read_text().splitlines() if results.exists() else []
    done = [msgspec.json.decode(line, type=Result) for line in lines]
    found = {(each.attack, each.index): each for each in done if each.setting == bench.name}
    with results.open("a") as file:
        for index in range(units):
            for attack, mount in attacks.items():
                if (attack, index) in found or (only and not any(part in attack for part in only)):
                    continue
                result = bench.measure(attack, index, mount)
                found[attack, index] = result
                file.write(msgspec.json.encode(result).decode() + "\n")
                file.flush()
                verdict = result.fraud or result.suspect or ["accepted"]
                print(f"{bench.name}: {attack}, unit {index}: {', '.join(verdict)}", file=sys.stderr)
    return [each for each in found.values() if each.attack in attacks]


# --- tables ------------------------------------------------------------------------------------------


def share(part: int, whole: int) -> str:
    """A count as a percentage."""
    return "-" if not whole else f"{100 * part / whole:.0f} %"


def units_needed(caught: int, units: int) -> str:
    """Units until a cheat is caught with 99 %, at the share of units caught here."""
    if caught == units:
        return "1"
    return str(math.ceil(math.log(0.01) / math.log1p(-caught / units))) if caught else "never"


def attack_table(results: Sequence[Result], order: Iterable[str]) -> list[str]:
    """Attack x check x rate."""
    lines = [
        "| attack | chunks over a commitment limit: fraud (suspect) | "
        "rows over a draw limit: fraud (suspect) | units: fraud / suspect / accepted | "
        "for 99 %: units | found by | INTELLECT-2: chunks / units / stop rule |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in order:
        own = [each for each in results if each.attack == name]
        if not own:
            continue
        chunks, rows = sum(r.chunks for r in own), sum(r.rows for r in own)
        scored = rows if chunks else 0
        fraud = sum(bool(r.fraud) for r in own)
        suspect = sum(not r.fraud and bool(r.suspect) for r in own)
        units = len(own)
        needed = "-" if name == "honest" else units_needed(fraud or suspect, units)
        codes = list(dict.fromkeys(code for r in own for code in r.codes[:3]))[:4]
        lines.append(
            f"| {name} | {share(sum(r.chunk_fraud for r in own), chunks)} "
            f"({share(sum(r.chunk_suspect for r in own), chunks)}) | "
            f"{share(sum(r.row_fraud for r in own), scored)} "
            f"({share(sum(r.row_suspect for r in own), scored)}) | "
            f"{fraud} / {suspect} / {units - fraud - suspect} | {needed} | "
            f"{', '.join(f'`{code}`' for code in codes) or '-'} | "
            f"{share(sum(r.paper_chunks for r in own), chunks)} / "
            f"{share(sum(bool(r.paper_chunks) for r in own), units if chunks else 0)} / "
            f"{share(sum(r.paper_stops for r in own), scored)} |"
        )
    return lines


def effect(honest: Sequence[float], attacked: Sequence[float]) -> float:
    """Difference of two means in standard deviations of the honest sample."""
    spread = float(np.std(honest))
    return abs(float(np.mean(attacked)) - float(np.mean(honest))) / spread if spread else math.inf


def pooled_units(shift: float, per_unit: float) -> str:
    """Units whose mean over all samples tells a shift at one false alarm in a million and 99 % power."""
    if shift == 0:
        return "no end"
    return f"{max(1, math.ceil(((FALSE_ALARM + POWER) / shift) ** 2 / per_unit)):,}"


def pooled_table(results: Sequence[Result], order: Iterable[str]) -> list[str]:
    """For attacks that pass as single units: what the mean over many would tell."""
    honest = [each for each in results if each.attack == "honest"]
    mantissas = [value for r in honest for value in r.mantissas]
    drifts = [value for r in honest for value in r.drifts]
    lines = [
        "| attack | mean mantissa error, honest -> attack | units | "
        "mean log-prob drift, honest -> attack | units |",
        "|---|---|---|---|---|",
    ]
    for name in order:
        own = [each for each in results if each.attack == name]
        if name == "honest" or not own or any(r.fraud for r in own) or not mantissas:
            continue
        theirs = [value for r in own for value in r.mantissas]
        drift = [value for r in own for value in r.drifts]
        lines.append(
            f"| {name} | {np.mean(mantissas):.3f} -> {np.mean(theirs):.3f} | "
            f"{pooled_units(effect(mantissas, theirs), len(theirs) / len(own))} | "
            f"{np.mean(drifts):.4f} -> {np.mean(drift):.4f} | "
            f"{pooled_units(effect(drifts, drift), len(drift) / len(own))} |"
        )
    return lines if len(lines) > 2 else []


def slack_table(results: Sequence[Result]) -> list[str]:
    """What the limits on distances leave to a cheat."""
    honest = [each for each in results if each.attack == "honest" and each.reach]
    steered = [each for each in results if each.attack == "slack steering"]
    if not honest:
        return []
    mean = {key: float(np.mean([r.reach[key] for r in honest])) for key in honest[0].reach}
    rewards = {each.index: each.reward for each in results if each.attack == "honest"}
    before = [rewards[each.index] for each in steered if each.index in rewards]
    lines = [
        "| what a cheat could choose | value |",
        "|---|---|",
        f"| reach of a single token (distance) | {mean['reach']:g} |",
        f"| positions with another token of probability >= 0.01 within reach | {mean['probable']:.1%} |",
        f"| positions with any other token within reach | {mean['any']:.1%} |",
        f"| positions with the stop token within reach though its probability is below 1e-4 | "
        f"{mean['stop']:.1%} |",
        f"| of the probable ones, per row of {mean['tokens']:.0f} tokens, those the mean distance allows | "
        f"{mean['afforded']:.2f} (2^{mean['afforded']:.2f} = {2 ** mean['afforded']:.1f} completions) |",
    ]
    if steered and before:
        lines.append(
            f"| mean reward, honest -> steered within the limits | {np.mean(before):.3f} -> "
            f"{np.mean([each.reward for each in steered]):.3f} |"
        )
    return lines


def report(title: str, results: Sequence[Result], order: Sequence[str]) -> list[str]:
    """Markdown of one setting."""
    units = max((each.index for each in results), default=-1) + 1
    honest = [each for each in results if each.attack == "honest"]
    rows, tokens = sum(r.rows for r in honest), sum(r.tokens for r in honest)
    lines = [
        f"### {title}",
        "",
        f"Up to {units} units per attack; the honest ones have {rows} rows with {tokens} tokens in "
        f"{sum(r.chunks for r in honest)} chunks.",
        "",
        *attack_table(results, order),
        "",
    ]
    for heading, table in (
        (
            "Not fraud as a single unit: what a mean over many units would tell (one false alarm in a "
            "million, 99 % found; no check does this, because the honest mean depends on the node's engine)",
            pooled_table(results, order),
        ),
        ("Slack", slack_table(results)),
    ):
        if table:
            lines += [f"{heading}:", "", *table, ""]
    return lines


def write_between_markers(path: Path, lines: Sequence[str]) -> None:
    """Replace what stands between the markers of a document."""
    text = path.read_text()
    head, _, rest = text.partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        raise SystemExit(f"{path}: no {BEGIN} ... {END}")
    path.write_text("\n".join([head + BEGIN, *lines, END + tail]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, help="checkpoint folder of a chat model, run in bfloat16")
    parser.add_argument("--units", type=int, default=2, help="units per attack")
    parser.add_argument("--only", nargs="*", default=[], help="attacks whose name contains one of these")
    parser.add_argument("--work", type=Path, default=Path("build/attacks"), help="altered checkpoints")
    parser.add_argument("--write", type=Path, help="document with markers to write the tables into")
    parser.add_argument("--skip-tiny", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    results = options.work / "results.jsonl"
    lines: list[str] = []
    if not options.skip_tiny:
        bench, attacks = tiny_bench(options.work)
        found = measured(bench, attacks, options.units, results, options.only)
        lines += report("Tiny policy (138k parameters), float32", found, list(attacks))
    if options.model:
        bench, attacks = model_bench(options.model, options.work)
        found = measured(bench, attacks, options.units, results, options.only)
        lines += report(f"{bench.arena.run.terms.model.architecture} in bfloat16", found, list(attacks))
    print("\n".join(lines))
    if options.write:
        write_between_markers(options.write, lines)


if __name__ == "__main__":
    main()
