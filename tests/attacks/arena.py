"""Where attacks are mounted: a run, its policy, and an engine that serves honest node and validator alike.

Units come out of the nodes' own `UnitBuilder`, or of a subclass that is dishonest in one part; verdicts come
out of the validators' own pipeline. A check is switched off by leaving it out of `UnitContext.checks`, which
exists for this; nothing else of the pipeline changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import trio
from example_run import COORDINATOR, example_run
from example_unit import BLOCK_HASH, CHECKPOINT_HASH, NODE, VERSION, CountingTasks, LocalScorer

from intellect_node.rollout import Policy, PolicyEngine, UnitBuilder
from intellect_protocol.assignment import PromptSlot
from intellect_protocol.checkpoint import Probe
from intellect_protocol.engines.base import (
    Completion,
    EngineInfo,
    GenerateRequest,
    RowScore,
    Sampling,
)
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.engines.weights import read_json
from intellect_protocol.environments.prompts import Prompts
from intellect_protocol.environments.registry import make
from intellect_protocol.environments.tasks import RunTasks, load_tasks
from intellect_protocol.keys import LocalSigner, work_digest
from intellect_protocol.rollouts import RolloutUnit, write_unit
from intellect_protocol.run import EnvironmentTerms, ModelTerms, RunConfig, RunTerms, SamplingTerms
from intellect_protocol.validation.context import Tasks, UnitContext
from intellect_protocol.validation.findings import ALL_CHECKS, Check
from intellect_protocol.validation.limits import default_thresholds
from intellect_protocol.validation.pipeline import Judgement, score_rows, validate_unit
from intellect_protocol.wire import sha256

PROBE = [3, 4, 5, 6, 7]
SECRET = b"a validator's secret"


class KnownAnswers(Tasks, Protocol):
    """Tasks whose right answers a cheat can look up."""

    def answer(self, slot: PromptSlot) -> list[int]:
        """Token ids that earn the full reward once the stop token follows."""
        ...


class Factory(Protocol):
    """How a node builds its units: `UnitBuilder`, or something less honest."""

    def __call__(self, run: RunConfig, node: bytes, engine: PolicyEngine, tasks: Tasks) -> UnitBuilder: ...


class InProcess:
    """The engine's client interface on an engine in this process."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine

    @property
    def info(self) -> EngineInfo:
        return self.engine.info()

    async def update(self, checkpoint_dir: Path) -> EngineInfo:
        return self.engine.update(checkpoint_dir)

    async def unload(self) -> None:
        self.engine.unload()

    async def probe(self, prompt: Sequence[int]) -> list[float]:
        return self.engine.probe(list(prompt))

    async def generate(
        self, requests: Sequence[GenerateRequest], sampling: Sampling
    ) -> list[list[Completion]]:
        found: dict[tuple[int, int], Completion] = {}
        self.engine.generate(
            requests, sampling, lambda r, s, c: found.__setitem__((r, s), c), lambda tokens: None
        )
        return [[found[r, s] for s in range(len(request.seeds))] for r, request in enumerate(requests)]


class EvenAnswers(CountingTasks):
    """The share of even ids is the reward, so any even ids are an answer."""

    def answer(self, slot: PromptSlot) -> list[int]:
        return [2 + 2 * ((slot.task_index >> place) % 40) for place in range(8)]


class EnvironmentAnswers(RunTasks):
    """A run's environments, with their answers."""

    def __init__(self, terms: RunTerms, folder: Path) -> None:
        self._own = {each.name: make(each.name, each.params) for each in terms.environments}
        self._encoder = Prompts(folder, chat=terms.model.chat)
        super().__init__(terms, self._encoder)

    def answer(self, slot: PromptSlot) -> list[int]:
        return self._encoder.encode_answer(self._own[slot.environment].problem(slot.task_index))


@dataclass(frozen=True)
class Arena:
    """One run with its policy."""

    run: RunConfig
    folder: Path
    engine: TorchEngine
    tasks: KnownAnswers

    @cached_property
    def policy(self) -> Policy:
        probe = Probe(PROBE, self.engine.probe(PROBE))
        return Policy(VERSION, CHECKPOINT_HASH, BLOCK_HASH, 1, self.folder, probe)

    def build(
        self,
        factory: Factory = UnitBuilder,
        index: int = 0,
        *,
        engine: TorchEngine | None = None,
        node: LocalSigner = NODE,
    ) -> RolloutUnit:
        """Unit `index` as made by `factory`, with the policy or with another engine's weights."""
        client = InProcess(engine or self.engine)
        builder = factory(self.run, node.address_bytes, client, self.tasks)
        return trio.run(builder.build, self.policy, index)

    def context(self, data: bytes, index: int = 0, *off: Check, node: LocalSigner = NODE) -> UnitContext:
        """A validator's context for a file that a node signed and submitted."""
        digest = work_digest(self.run.run_id, VERSION, CHECKPOINT_HASH, index, sha256(data), len(data))
        return UnitContext(
            run=self.run,
            version=VERSION,
            checkpoint_hash=CHECKPOINT_HASH,
            block_hash=BLOCK_HASH,
            node=node.address_bytes,
            index=index,
            file_hash=sha256(data),
            size_bytes=len(data),
            work_signature=node.sign_digest(digest),
            tasks=self.tasks,
            secret=SECRET,
            checks=ALL_CHECKS - set(off),
        )

    def judge(
        self, unit: RolloutUnit | bytes, *off: Check, index: int = 0, node: LocalSigner = NODE
    ) -> Judgement:
        """The verdict on a unit that `node` submitted, with some checks off."""
        data = unit if isinstance(unit, bytes) else write_unit(unit)
        context = self.context(data, index, *off, node=node)
        return trio.run(validate_unit, data, context, LocalScorer(self.engine))

    def scores(self, unit: RolloutUnit, index: int = 0) -> list[RowScore]:
        """The validator's prefill of a unit."""
        context = self.context(b"", index)
        rows = score_rows(unit.rows, context.seed)
        return trio.run(LocalScorer(self.engine).score, rows, context.sampling, context.secret)


def arena_run(model: ModelTerms, sampling: SamplingTerms, *environments: EnvironmentTerms) -> RunConfig:
    """A signed run with the default thresholds of its dtype."""
    base = example_run()
    terms = msgspec.structs.replace(
        base.terms, model=model, sampling=sampling, environments=list(environments)
    )
    revision = msgspec.structs.replace(base.revision, thresholds=default_thresholds(model.dtype))
    return RunConfig(terms, revision).signed(COORDINATOR)


def model_terms(folder: Path, dtype: str, *, chat: bool = False) -> ModelTerms:
    """What a run says about the checkpoint in a folder."""
    config = read_json(folder / "config.json")
    tokenizer = folder / "tokenizer.json"
    return ModelTerms(
        config["architectures"][0],
        config["vocab_size"],
        config["hidden_size"],
        config["max_position_embeddings"],
        dtype,
        sha256(tokenizer.read_bytes()).hex() if tokenizer.exists() else "00" * 32,
        chat,
    )


def load_engine(folder: Path, dtype: str) -> TorchEngine:
    """An engine in this process with the weights of a folder."""
    engine = TorchEngine(device="cpu", dtype=dtype)
    engine.load(folder)
    return engine


def environment_arena(
    folder: Path,
    dtype: str,
    sampling: SamplingTerms,
    *environments: EnvironmentTerms,
    chat: bool = False,
) -> Arena:
    """A run of real tasks on a checkpoint with a tokenizer."""
    run = arena_run(model_terms(folder, dtype, chat=chat), sampling, *environments)
    load_tasks(run.terms, folder)  # the tokenizer must be the run's
    return Arena(run, folder, load_engine(folder, dtype), EnvironmentAnswers(run.terms, folder))


def mean_reward(judgement: Judgement) -> float:
    """Of the rows that the trainer would read."""
    return float(np.mean([row.reward for row in judgement.rows]))


def codes(judgement: Judgement) -> set[str]:
    """Reason codes of the findings."""
    return {finding.code for finding in judgement.findings}
