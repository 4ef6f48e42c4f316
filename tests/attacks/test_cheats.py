"""Every kind of cheat that the devnet runs: it pays with its check off and is caught with it on.

The nodes' own unit builders and the validators' own pipeline, on a policy that sorts digits right now
and then, so that there is something to gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio
from example_run import COORDINATOR, example_run
from example_unit import BLOCK_HASH, CHECKPOINT_HASH, INDEX, NODE, VERSION, LocalScorer, context_of

from intellect_node.devnet.cheats import CHEATS
from intellect_node.devnet.kinds import CHEAT_KINDS
from intellect_node.rollout import Policy, UnitBuilder
from intellect_protocol.checkpoint import Probe
from intellect_protocol.engines.base import Completion, EngineInfo, GenerateRequest, Sampling
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.environments.tasks import RunTasks, load_tasks
from intellect_protocol.rollouts import write_unit
from intellect_protocol.run import EnvironmentTerms, ModelTerms, RunConfig, SamplingTerms
from intellect_protocol.validation.findings import ALL_CHECKS, Check, Outcome
from intellect_protocol.validation.limits import default_thresholds
from intellect_protocol.validation.pipeline import Judgement, validate_unit
from intellect_protocol.wire import sha256
from intellect_trainer.models.tiny import make_tiny

# Fraud checks that catch the cheat, each of them alone.
CAUGHT_BY = {
    "wrong-model": {Check.COMMITMENT, Check.SAMPLING},
    "edited-tokens": {Check.COMMITMENT, Check.SAMPLING},
    "forged-reward": {Check.REWARD},
    "best-of-n": {Check.SAMPLING},
    "constant-proof": {Check.COMMITMENT},
    "replayed-proof": {Check.COMMITMENT},
}
PAYS = {"edited-tokens", "best-of-n"}  # cheats that raise the reward validators themselves compute
PROBE = [3, 4, 5, 6, 7]


class InProcess:
    """The engine's client interface on an engine in this process."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine

    @property
    def info(self) -> EngineInfo:
        return self.engine.info()

    async def update(self, checkpoint_dir: Path) -> EngineInfo:
        return self.engine.update(checkpoint_dir)

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy") / "v0"
    make_tiny("sort_digits", path, max_tokens=16, seed=0)
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> RunConfig:
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    base = example_run()
    terms = msgspec.structs.replace(
        base.terms,
        model=ModelTerms(
            "Qwen2ForCausalLM",
            config["vocab_size"],
            config["hidden_size"],
            config["max_position_embeddings"],
            "float32",
            sha256((folder / "tokenizer.json").read_bytes()).hex(),
        ),
        environments=[EnvironmentTerms("sort_digits")],
        sampling=SamplingTerms(1.0, 12, [config["eos_token_id"]], 16, 8),
    )
    revision = msgspec.structs.replace(base.revision, thresholds=default_thresholds("float32"))
    return RunConfig(terms, revision).signed(COORDINATOR)


@pytest.fixture(scope="module")
def validator(folder: Path) -> TorchEngine:
    engine = TorchEngine(device="cpu", dtype="float32")
    engine.load(folder)
    return engine


@pytest.fixture(scope="module")
def tasks(run: RunConfig, folder: Path) -> RunTasks:
    return load_tasks(run.terms, folder)


def unit_of(
    factory: type[UnitBuilder], run: RunConfig, tasks: RunTasks, folder: Path, validator: TorchEngine
) -> bytes:
    """The rollout file that a node with this builder submits."""
    engine = TorchEngine(device="cpu", dtype="float32")
    engine.load(folder)
    builder = factory(run, NODE.address_bytes, InProcess(engine), tasks)
    probe = Probe(PROBE, validator.probe(PROBE))
    policy = Policy(VERSION, CHECKPOINT_HASH, BLOCK_HASH, 1, folder, probe)

    async def build() -> bytes:
        await builder.adopt(policy)
        if hasattr(builder, "_kept"):  # a replayed proof comes from an earlier unit
            await builder.build(policy, INDEX + 1)
        return write_unit(await builder.build(policy, INDEX))

    return trio.run(build)


def judged(
    data: bytes, run: RunConfig, tasks: RunTasks, validator: TorchEngine, off: set[Check]
) -> Judgement:
    context = context_of(data, run, tasks=tasks, checks=ALL_CHECKS - off)
    return trio.run(validate_unit, data, context, LocalScorer(validator))


def mean_reward(judgement: Judgement) -> float:
    return float(np.mean([row.reward for row in judgement.rows]))


@pytest.fixture(scope="module")
def honest(run: RunConfig, tasks: RunTasks, folder: Path, validator: TorchEngine) -> Judgement:
    return judged(unit_of(UnitBuilder, run, tasks, folder, validator), run, tasks, validator, set())


def test_an_honest_unit_passes_every_check(honest: Judgement) -> None:
    assert honest.outcome is Outcome.ACCEPTED
    assert not honest.findings
    assert 0 < mean_reward(honest) < 1


@pytest.mark.parametrize("kind", CHEAT_KINDS)
def test_a_cheat_pays_unchecked_and_is_fraud_when_checked(
    kind: str, run: RunConfig, tasks: RunTasks, folder: Path, validator: TorchEngine, honest: Judgement
) -> None:
    catching = CAUGHT_BY[kind]
    data = unit_of(CHEATS[kind], run, tasks, folder, validator)

    # Log-prob drift is never fraud, but it would hold the unit up.
    unchecked = judged(data, run, tasks, validator, catching | {Check.DRIFT})
    assert unchecked.outcome is Outcome.ACCEPTED
    if kind in PAYS:
        assert mean_reward(unchecked) > mean_reward(honest) + 0.1

    for check in catching:
        checked = judged(data, run, tasks, validator, (catching - {check}) | {Check.DRIFT})
        assert checked.outcome is Outcome.REJECTED
        assert checked.fraud
        assert {finding.check for finding in checked.findings} == {check}
    assert judged(data, run, tasks, validator, set()).fraud


def test_no_command_line_leads_to_a_cheat() -> None:
    """Only the devnet's own program imports the cheats; `join` and its modules do not."""
    node = Path(__file__).parents[2] / "node" / "intellect_node"
    for path in node.rglob("*.py"):
        if path.parent.name != "devnet":
            assert "cheat" not in path.read_text(), path
