"""Units as a node builds them: the same from the same seed, and right by every check of a validator."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from example_unit import (
    BLOCK_HASH,
    CHECKPOINT_HASH,
    INDEX,
    NODE,
    VERSION,
    CountingTasks,
    LocalScorer,
    context_of,
    load,
    tiny_run,
    write_tiny_model,
)

from intellect_node.rollout import Policy, UnitBuilder, check_probe
from intellect_protocol.checkpoint import Probe
from intellect_protocol.engines.base import Completion, EngineInfo, GenerateRequest, Sampling
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.errors import EngineError, NumericError
from intellect_protocol.rollouts import RolloutUnit, read_unit, write_unit
from intellect_protocol.validation.findings import Outcome
from intellect_protocol.validation.pipeline import validate_unit

PROMPT = [5, 9, 17, 33]


class LocalEngine:
    """The torch engine in this process, with the coroutines of the supervisor's client."""

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
        return self.engine.probe(prompt)

    async def generate(
        self, requests: Sequence[GenerateRequest], sampling: Sampling
    ) -> list[list[Completion]]:
        done: dict[tuple[int, int], Completion] = {}
        self.engine.generate(
            requests, sampling, lambda r, s, c: done.__setitem__((r, s), c), lambda tokens: None
        )
        return [[done[r, s] for s in range(len(request.seeds))] for r, request in enumerate(requests)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return write_tiny_model(root / "policy", 0), write_tiny_model(root / "other", 1)


@pytest.fixture(scope="module")
def engine(folders: tuple[Path, Path]) -> TorchEngine:
    return load(folders[0])


@pytest.fixture
def builder(engine: TorchEngine, folders: tuple[Path, Path]) -> UnitBuilder:
    engine.update(folders[0])
    return UnitBuilder(tiny_run(), NODE.address_bytes, LocalEngine(engine), CountingTasks())


def policy_of(folder: Path, engine: TorchEngine) -> Policy:
    engine.update(folder)
    probe = Probe(PROMPT, engine.probe(PROMPT))
    return Policy(VERSION, CHECKPOINT_HASH, BLOCK_HASH, 7, folder, probe)


def same(a: RolloutUnit, b: RolloutUnit) -> bool:
    return write_unit(a) == write_unit(b)


async def test_a_unit_follows_from_its_seed_alone(builder: UnitBuilder, engine, folders) -> None:
    policy = policy_of(folders[0], engine)
    unit = await builder.build(policy, INDEX)
    assert same(unit, await builder.build(policy, INDEX))
    assert not same(unit, await builder.build(policy, INDEX + 1))
    other_block = Policy(VERSION, CHECKPOINT_HASH, b"\xb1" * 32, 7, folders[0], policy.probe)
    assert [row.task_index for row in (await builder.build(other_block, INDEX)).rows] != [
        row.task_index for row in unit.rows
    ]
    somebody = UnitBuilder(builder.run, b"\x01" * 20, builder.engine, builder.tasks)
    assert [row.completion_tokens for row in (await somebody.build(policy, INDEX)).rows] != [
        row.completion_tokens for row in unit.rows
    ]


async def test_a_unit_passes_every_check_of_a_validator(builder: UnitBuilder, engine, folders) -> None:
    unit = await builder.build(policy_of(folders[0], engine), INDEX)
    data = write_unit(unit)
    context = context_of(data, builder.run)
    judgement = await validate_unit(data, context, LocalScorer(engine))
    assert judgement.outcome is Outcome.ACCEPTED, judgement.findings
    read = read_unit(data, context.file_limits)
    sampling = builder.run.terms.sampling
    assert [(row.prompt, row.sample) for row in read.rows] == [
        (p, s) for p in range(sampling.prompts_per_unit) for s in range(sampling.samples_per_prompt)
    ]
    assert read.meta.engine.engine == "torch"


async def test_a_policy_is_adopted_only_with_the_probe_of_its_manifest(
    builder: UnitBuilder, engine, folders
) -> None:
    right, other = policy_of(folders[0], engine), policy_of(folders[1], engine)
    await builder.adopt(right)
    swapped = Policy(VERSION, CHECKPOINT_HASH, BLOCK_HASH, 7, folders[1], right.probe)
    with pytest.raises(EngineError) as caught:
        await builder.adopt(swapped)
    assert caught.value.reason == "probe"
    await builder.adopt(other)


@pytest.mark.parametrize(
    ("measured", "expected", "dtype", "fits"),
    [
        ([-1.0, -2.0], [-1.0, -2.0], "float32", True),
        ([-1.0, -2.00002], [-1.0, -2.0], "float32", True),
        ([-1.0, -2.1], [-1.0, -2.0], "float32", False),
        ([-1.0, -2.1], [-1.0, -2.0], "bfloat16", True),
        ([-1.0, -3.0], [-1.0, -2.0], "bfloat16", False),
        ([-1.0], [-1.0, -2.0], "float32", False),
        ([], [], "float32", False),
        ([float("nan"), -2.0], [-1.0, -2.0], "float32", False),
    ],
)
def test_a_probe_must_agree_within_the_spread_of_its_dtype(measured, expected, dtype, fits) -> None:
    if fits:
        check_probe(measured, expected, dtype)
    else:
        with pytest.raises(EngineError):
            check_probe(measured, expected, dtype)


class NotFinite(UnitBuilder):
    async def complete(self, groups):
        done = await super().complete(groups)
        done[1][2] = msgspec.structs.replace(done[1][2], logprobs=[np.nan] * len(done[1][2].tokens))
        return done


class RewardsNotFinite(UnitBuilder):
    def reward(self, slot, completion):
        return float("inf")


@pytest.mark.parametrize("kind", [NotFinite, RewardsNotFinite])
async def test_numbers_that_are_not_finite_never_enter_a_file(
    builder: UnitBuilder, engine, folders, kind
) -> None:
    broken = kind(builder.run, builder.node, builder.engine, builder.tasks)
    with pytest.raises(NumericError, match="not finite"):
        await broken.build(policy_of(folders[0], engine), INDEX)


class OtherSeeds(UnitBuilder):
    def stream_seeds(self, seed, prompt):
        return [bytes(31) + bytes([s]) for s in range(self.run.terms.sampling.samples_per_prompt)]


class NoProofs(UnitBuilder):
    def proofs(self, completion):
        return [bytes(258) for _ in completion.proofs]


class OtherRewards(UnitBuilder):
    def reward(self, slot, completion):
        return super().reward(slot, completion) + 1


@pytest.mark.parametrize(
    ("kind", "check"),
    [(OtherSeeds, "sampling"), (NoProofs, "commitment"), (OtherRewards, "reward")],
)
async def test_each_part_can_be_replaced_alone_and_is_caught_alone(
    builder: UnitBuilder, engine, folders, kind, check: str
) -> None:
    cheat = kind(builder.run, builder.node, builder.engine, builder.tasks)
    data = write_unit(await cheat.build(policy_of(folders[0], engine), INDEX))
    judgement = await validate_unit(data, context_of(data, builder.run), LocalScorer(engine))
    assert judgement.outcome is Outcome.REJECTED
    assert {finding.check for finding in judgement.findings if finding.kind == "fraud"} == {check}
