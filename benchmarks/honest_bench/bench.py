"""Making honest units with one setting and judging them with another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

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
from intellect_protocol.keys import work_digest
from intellect_protocol.rollouts import write_unit
from intellect_protocol.validation.context import UnitContext
from intellect_protocol.validation.findings import Outcome
from intellect_protocol.validation.pipeline import Judgement, validate_unit
from intellect_protocol.wire import sha256

from .settings import (
    BLOCK_HASH,
    GENERATORS,
    NODE,
    SAME_DTYPE,
    SAMPLES_PER_PROMPT,
    VALIDATORS,
    WORKLOADS,
    Setting,
    run_config,
)


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
