"""Are honest nodes ever accused? Rollouts of mixed engines through the validators' own pipeline.

    python benchmarks/honest.py --out honest.jsonl --smollm2 policy-zero --rows tiny=8192 --rows smollm2=2048

Every unit is made by the nodes' unit builder, signed, written as a rollout file, read back and judged by
`validate_unit` under the default thresholds of its dtype. Making and judging never agree by design: unit i
pairs generator i mod 6 with validator (i + i div 6) mod 6 of the lists below, which differ in decoder (ours,
transformers), attention kernel, batch shape, padding, threads and, for bfloat16, the validator's dtype.

Workloads: `tiny` (float32, sorting 4 to 8 digits), `tiny-long` (sorting up to 24, two chunks), `smollm2`
(bfloat16, sums in a chat, 12 tokens as in the devnet) and `smollm2-long` (64 tokens). Each unit is one line
of the output file as soon as it is judged; started again, the program goes on behind the last one. At the
end it prints a table and one JSON line, and its exit code is 1 if anybody was accused. The bound beside a
rate of false accusations is Clopper and Pearson's one-sided one (Biometrika 26, 1934) at 95 %: the highest
rate that would show so few in one of 20 trials.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads that spin while they wait would burn most of the time of the two-thread settings on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import msgspec
import torch
import trio

from intellect_coordinator.new_run import model_terms
from intellect_node.rollout import Policy, UnitBuilder
from intellect_protocol.checkpoint import Probe, state_hash
from intellect_protocol.engines.attention import native_kernel
from intellect_protocol.engines.base import (
    Completion,
    EngineInfo,
    GenerateRequest,
    RowScore,
    Sampling,
    ScoreRow,
)
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.environments.tasks import load_tasks
from intellect_protocol.keys import LocalSigner, work_digest
from intellect_protocol.rollouts import write_unit
from intellect_protocol.run import (
    EnvironmentTerms,
    KeyTerms,
    LedgerTerms,
    RevisionTerms,
    RunConfig,
    RunTerms,
    SamplingTerms,
)
from intellect_protocol.validation.context import UnitContext
from intellect_protocol.validation.findings import Kind, Outcome
from intellect_protocol.validation.limits import default_thresholds
from intellect_protocol.validation.pipeline import Judgement, validate_unit
from intellect_protocol.wire import sha256

NODE = LocalSigner(b"\x33" * 32)
KEY = LocalSigner(b"\x41" * 32)
BLOCK_HASH = sha256(b"benchmarks/honest.py")
CONFIDENCE = 0.95


class Setting(NamedTuple):
    """How one side computes."""

    decoder: str = "native"  # ours, or "transformers"
    attention: str = "sdpa"  # or "eager"
    rows: int = 64  # at once
    threads: int = 1
    dtype: str = ""  # "": the run's

    def __str__(self) -> str:
        dtype = f" {self.dtype}" if self.dtype else ""
        return f"{self.decoder} {self.attention} {self.rows} rows {self.threads} thr{dtype}"


GENERATORS = [
    Setting(),
    Setting(rows=4),
    Setting(attention="eager", rows=16),
    Setting("transformers", rows=32),
    Setting("transformers", "eager", rows=8),
    Setting(rows=8, threads=2),
]
VALIDATORS = [
    Setting(),
    Setting(attention="eager", rows=1),
    Setting("transformers", rows=16),
    Setting(rows=32, dtype="float32"),
    Setting(rows=4, threads=2),
    Setting("transformers", "eager", rows=8),
]


class Workload(NamedTuple):
    """A run whose units are made and judged."""

    model: str  # "tiny" or "smollm2"
    environment: EnvironmentTerms
    max_tokens: int
    prompts_per_unit: int


WORKLOADS = {
    "tiny": Workload("tiny", EnvironmentTerms("sort_digits"), 12, 16),
    "tiny-long": Workload(
        "tiny", EnvironmentTerms("sort_digits", params={"min_digits": 4, "max_digits": 24}), 40, 8
    ),
    "smollm2": Workload("smollm2", EnvironmentTerms("arithmetic"), 12, 4),
    "smollm2-long": Workload("smollm2", EnvironmentTerms("arithmetic"), 64, 4),
}
SAMPLES_PER_PROMPT = 8


def run_config(name: str, folder: Path) -> RunConfig:
    """A run of the workload over the model in `folder`, with default thresholds."""
    workload = WORKLOADS[name]
    model, stop_ids = model_terms(folder, None)
    terms = RunTerms(
        name=name,
        protocol=1,
        model=model,
        environments=[workload.environment],
        sampling=SamplingTerms(
            1.0, workload.max_tokens, stop_ids, workload.prompts_per_unit, SAMPLES_PER_PROMPT
        ),
        ledger=LedgerTerms(31337, {"NodeRegistry": KEY.address}),
        keys=KeyTerms(KEY.address, KEY.address),
    )
    revision = RevisionTerms(0, 0, [], ["http://127.0.0.1:1"], default_thresholds(model.dtype))
    return RunConfig(terms, revision).signed(KEY)


class Engines:
    """One model in every implementation and dtype that was asked for; the kernel is switched in place."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._folder, self._dtype = folder, dtype
        self._made: dict[tuple[str, str], TorchEngine] = {}

    def using(self, setting: Setting) -> Client:
        """The engine that computes as the setting says."""
        dtype = setting.dtype or self._dtype
        if (setting.decoder, dtype) not in self._made:
            attention = "sdpa" if setting.decoder == "native" else "transformers-sdpa"
            engine = TorchEngine(device="cpu", dtype=dtype, attention=attention)
            engine.load(self._folder)
            self._made[setting.decoder, dtype] = engine
        return Client(self._made[setting.decoder, dtype], setting)


@dataclass
class Client:
    """An engine's client interface on an engine in this process; keeps the last scores."""

    engine: TorchEngine
    setting: Setting
    scores: Sequence[RowScore] = ()

    @property
    def info(self) -> EngineInfo:
        return self.engine.info()

    def _set(self) -> None:
        decoder: Any = self.engine._decoder
        self.engine._max_rows = self.setting.rows
        torch.set_num_threads(self.setting.threads)
        if self.setting.decoder == "native":
            decoder.kernel = native_kernel(self.setting.attention)
            decoder.attention = self.setting.attention
        else:
            decoder._model.set_attn_implementation(self.setting.attention)
            decoder.attention = f"transformers-{self.setting.attention}"

    async def update(self, checkpoint_dir: Path) -> EngineInfo:
        return self.engine.update(checkpoint_dir)

    async def unload(self) -> None:
        self.engine.unload()

    async def probe(self, prompt: Sequence[int]) -> list[float]:
        return self.engine.probe(prompt)

    async def generate(
        self, requests: Sequence[GenerateRequest], sampling: Sampling
    ) -> list[list[Completion]]:
        found: dict[tuple[int, int], Completion] = {}
        self._set()
        self.engine.generate(
            requests, sampling, lambda r, s, c: found.__setitem__((r, s), c), lambda tokens: None
        )
        return [[found[r, s] for s in range(len(request.seeds))] for r, request in enumerate(requests)]

    async def score(self, rows: Sequence[ScoreRow], sampling: Sampling, secret: bytes) -> list[RowScore]:
        found: dict[int, RowScore] = {}
        self._set()
        self.engine.score(rows, sampling, secret, found.__setitem__, lambda tokens: None)
        self.scores = [found[number] for number in range(len(rows))]
        return list(self.scores)


class Found(msgspec.Struct, frozen=True):
    """A finding, as it is written down."""

    check: str
    code: str
    kind: str
    row: int | None
    measured: float | None
    limit: float | None


class UnitRecord(msgspec.Struct, frozen=True):
    """One judged unit: a line of the output file."""

    workload: str
    run_id: str
    weights: str  # state hash of the checkpoint
    index: int
    generator: str
    validator: str
    rows: int
    tokens: int
    chunks: int
    outcome: str
    findings: list[Found]
    worst: dict[str, float]  # largest measured value of each kind
    made_s: float  # CPU seconds
    judged_s: float


def worst_of(client: Client) -> dict[str, float]:
    """How near the unit came to the limits of single rows and chunks."""
    reports = [report for score in client.scores for report in score.chunk_reports]
    if not reports:
        return {}
    return {
        "exponents": max(report.exponent_mismatches for report in reports),
        "signs": max(report.sign_mismatches for report in reports),
        "mantissa_mean": max(report.mantissa_mean for report in reports),
        "distance": max(max(score.distances) for score in client.scores),
    }


class Bench:
    """One workload: its run, model and engines."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.run = run_config(name, folder)
        self.weights = state_hash(folder)
        self.tasks = load_tasks(self.run.terms, folder)
        self.engines = Engines(folder, self.run.terms.model.dtype)
        self.rows_per_unit = WORKLOADS[name].prompts_per_unit * SAMPLES_PER_PROMPT

    def key(self, index: int) -> tuple[str, str, int]:
        """What makes a unit this one; a record with the same key need not be made again."""
        return self.run.run_id.hex(), self.weights.hex(), index

    async def unit(self, index: int) -> UnitRecord:
        """Make and judge a unit."""
        generator = GENERATORS[index % len(GENERATORS)]
        validators = VALIDATORS if self.run.terms.model.dtype == "bfloat16" else SAME_DTYPE
        validator = validators[(index + index // len(GENERATORS)) % len(validators)]
        policy = Policy(0, self.weights, BLOCK_HASH, 1, self.folder, Probe([], []))
        started = time.process_time()
        builder = UnitBuilder(self.run, NODE.address_bytes, self.engines.using(generator), self.tasks)
        unit = await builder.build(policy, index)
        data = write_unit(unit)
        made = time.process_time()
        client = self.engines.using(validator)
        judgement = await validate_unit(data, self.context(data, index), client)
        if judgement.outcome is Outcome.INCONCLUSIVE:
            raise RuntimeError(f"{self.name}/{index} could not be judged: {judgement.fault}")
        return self.record(index, generator, validator, unit.rows, judgement, client, made - started, made)

    def context(self, data: bytes, index: int) -> UnitContext:
        """What the ledger and the node's signature tell a validator."""
        file_hash = sha256(data)
        digest = work_digest(self.run.run_id, 0, self.weights, index, file_hash, len(data))
        return UnitContext(
            run=self.run,
            version=0,
            checkpoint_hash=self.weights,
            block_hash=BLOCK_HASH,
            node=NODE.address_bytes,
            index=index,
            file_hash=file_hash,
            size_bytes=len(data),
            work_signature=NODE.sign_digest(digest),
            tasks=self.tasks,
            secret=sha256(file_hash)[:16],
        )

    def record(
        self,
        index: int,
        generator: Setting,
        validator: Setting,
        rows: Sequence[Any],
        judgement: Judgement,
        client: Client,
        made_s: float,
        judging_since: float,
    ) -> UnitRecord:
        """The unit's line."""
        return UnitRecord(
            workload=self.name,
            run_id=self.run.run_id.hex(),
            weights=self.weights.hex(),
            index=index,
            generator=str(generator),
            validator=str(validator),
            rows=len(rows),
            tokens=sum(len(row.completion_tokens) for row in rows),
            chunks=sum(len(row.proofs) for row in rows),
            outcome=judgement.outcome.value,
            findings=[
                Found(f.check.value, f.code, f.kind.value, f.row, f.measured, f.limit)
                for f in judgement.findings
            ],
            worst=worst_of(client),
            made_s=round(made_s, 2),
            judged_s=round(time.process_time() - judging_since, 2),
        )


SAME_DTYPE = [setting for setting in VALIDATORS if not setting.dtype]


def upper_bound(events: int, trials: int, confidence: float = CONFIDENCE) -> float:
    """Clopper and Pearson's one-sided upper bound: the p at which P(X <= events) is 1 - confidence."""
    if trials == 0 or events >= trials:
        return 1.0

    def at_most(p: float) -> float:
        logs = [
            math.lgamma(trials + 1)
            - math.lgamma(k + 1)
            - math.lgamma(trials - k + 1)
            + k * math.log(p)
            + (trials - k) * math.log1p(-p)
            for k in range(events + 1)
        ]
        return math.fsum(map(math.exp, logs))

    low, high = events / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if at_most(middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


class Total(msgspec.Struct):
    """Counts over some units."""

    units: int = 0
    rows: int = 0
    tokens: int = 0
    chunks: int = 0
    fraud_units: int = 0
    fraud_rows: int = 0  # of which a finding says fraud
    suspect_units: int = 0
    suspect_rows: int = 0
    refused_units: int = 0  # for another reason
    made_s: float = 0.0
    judged_s: float = 0.0
    worst: dict[str, float] = msgspec.field(default_factory=dict)

    def add(self, record: UnitRecord) -> None:
        """Count one more unit."""
        kinds = {found.kind for found in record.findings}
        fraud, suspect = Kind.FRAUD in kinds, Kind.SUSPECT in kinds
        self.units += 1
        self.rows += record.rows
        self.tokens += record.tokens
        self.chunks += record.chunks
        self.fraud_units += fraud
        self.fraud_rows += rows_with(record, Kind.FRAUD)
        self.suspect_units += suspect and not fraud
        self.suspect_rows += rows_with(record, Kind.SUSPECT)
        self.refused_units += not fraud and record.outcome == Outcome.REJECTED
        self.made_s += record.made_s
        self.judged_s += record.judged_s
        for name, value in record.worst.items():
            self.worst[name] = max(value, self.worst.get(name, 0.0))

    def bounds(self) -> dict[str, float]:
        """Upper bounds of the rates of false accusation."""
        return {
            "fraud_per_row_upper": upper_bound(self.fraud_rows, self.rows),
            "fraud_per_unit_upper": upper_bound(self.fraud_units, self.units),
        }


def rows_with(record: UnitRecord, kind: Kind) -> int:
    """Rows about which a finding of this kind is; a finding about group or unit counts as one row."""
    rows = {found.row for found in record.findings if found.kind == kind}
    return len(rows)


def report(records: Sequence[UnitRecord]) -> dict[str, Any]:
    """Print the table; returns the summary."""
    by_workload: dict[str, Total] = {}
    by_pair: dict[tuple[str, str, str], Total] = {}
    total = Total()
    for record in records:
        sides = [("made by", record.generator), ("judged by", record.validator)]
        by_workload.setdefault(record.workload, Total()).add(record)
        total.add(record)
        for side, setting in sides:
            by_pair.setdefault((record.workload, side, setting), Total()).add(record)
    head = f"{'':<58} {'units':>5} {'rows':>6} {'chunks':>6} {'fraud':>5} {'suspect':>7}  worst"
    print(head)

    def line(name: str, counts: Total) -> None:
        worst = " ".join(f"{key} {value:.3g}" for key, value in counts.worst.items())
        print(
            f"{name:<58} {counts.units:>5} {counts.rows:>6} {counts.chunks:>6} {counts.fraud_rows:>5} "
            f"{counts.suspect_rows:>7}  {worst}"
        )

    for name, counts in by_workload.items():
        line(name, counts)
        for (workload, side, setting), own in sorted(by_pair.items()):
            if workload == name:
                line(f"  {side} {setting}", own)
    line("all", total)
    bounds = total.bounds()
    rate, unit_rate = bounds["fraud_per_row_upper"], bounds["fraud_per_unit_upper"]
    print(
        f"false fraud: {total.fraud_rows} of {total.rows} rows, at most {rate:.2e} per row; "
        f"{total.fraud_units} of {total.units} units, at most {unit_rate:.2e} per unit "
        f"({CONFIDENCE:.0%}, one-sided)"
    )
    for record in records:
        for found in record.findings:
            print(f"{found.kind}: {record.workload}/{record.index} {record.generator} -> {record.validator}:")
            print(
                f"  {found.check}/{found.code} row {found.row} measured {found.measured} limit {found.limit}"
            )
    return {
        "confidence": CONFIDENCE,
        "total": {**msgspec.to_builtins(total), **bounds},
        "workloads": {
            name: {**msgspec.to_builtins(counts), **counts.bounds()} for name, counts in by_workload.items()
        },
    }


def read_records(path: Path) -> list[UnitRecord]:
    """Records of an earlier start; a last line that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [msgspec.json.decode(line, type=UnitRecord) for line in lines if line.endswith(b"\n")]


def model_folder(model: str, given: Path | None, work: Path) -> Path | None:
    """The checkpoint folder of a model; the tiny one is made where none is named."""
    if given is not None or model != "tiny":
        return given
    folder = work / "honest-tiny"
    if not folder.exists():
        command = ["init-model", "--model", "tiny", "--environment", "sort_digits", "--out", str(folder)]
        subprocess.run([sys.executable, "-m", "intellect_trainer", *command], check=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one per unit; continued")
    parser.add_argument("--tiny", type=Path, help="checkpoint folder; default: made beside --out")
    parser.add_argument(
        "--smollm2", type=Path, help="checkpoint folder; without it those workloads are left out"
    )
    parser.add_argument("--rows", action="append", help="WORKLOAD=N, at least N rows of it; repeatable")
    parser.add_argument("--report-only", action="store_true", help="only show what is in --out")
    args = parser.parse_args()
    records = read_records(args.out)
    if not args.report_only:
        wanted = dict(each.split("=") for each in args.rows or ["tiny=6144", "tiny-long=2048"])
        done = {(record.run_id, record.weights, record.index) for record in records}
        for name, rows in wanted.items():
            model = WORKLOADS[name].model
            folder = model_folder(model, args.tiny if model == "tiny" else args.smollm2, args.out.parent)
            if folder is None:
                print(f"{name}: left out, name its model with --{model}", file=sys.stderr)
                continue
            bench = Bench(name, folder)
            for index in range(-(-int(rows) // bench.rows_per_unit)):
                if bench.key(index) in done:
                    continue
                record = trio.run(bench.unit, index)
                records.append(record)
                with args.out.open("ab") as out:
                    out.write(msgspec.json.encode(record) + b"\n")
                print(f"{name}/{index}: {record.outcome}", file=sys.stderr)
    summary = report(records)
    print(json.dumps(summary))
    sys.exit(1 if summary["total"]["fraud_units"] or summary["total"]["refused_units"] else 0)


if __name__ == "__main__":
    main()
