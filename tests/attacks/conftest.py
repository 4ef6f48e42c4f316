"""Arenas, made once: a random model in fp32 and bf16, and a policy that sorts digits now and then.

The random model is fast and has opinions about every token. The sorting policy earns rewards, so that a cheat
has something to gain from it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from arena import Arena, EvenAnswers, arena_run, environment_arena, load_engine, model_terms
from coordinator_site import Site
from example_unit import load, write_tiny_model
from policy_history import train_policy
from world import World

from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.run import EnvironmentTerms, SamplingTerms
from intellect_trainer.models.tiny import make_tiny

STEPS = 8
SORT_SAMPLING = SamplingTerms(1.0, 12, [1], 16, 8)


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("random") / "model", seed=0)


def _random_arena(folder: Path, dtype: str) -> Arena:
    sampling = SamplingTerms(1.0, 40, [1], 4, 8, target_lengths=[10, 20])
    run = arena_run(model_terms(folder, dtype), sampling, EnvironmentTerms("sort_digits"))
    return Arena(run, folder, load_engine(folder, dtype), EvenAnswers())


@pytest.fixture(scope="session")
def arena(random_folder: Path) -> Arena:
    """The random model in float32: 4 prompts with 8 samples of up to 40 tokens."""
    return _random_arena(random_folder, "float32")


@pytest.fixture(scope="session")
def arena_bf16(random_folder: Path) -> Arena:
    """The same in bfloat16."""
    return _random_arena(random_folder, "bfloat16")


@pytest.fixture(scope="session")
def sorting(tmp_path_factory: pytest.TempPathFactory) -> Arena:
    """The policy that sorts: 16 prompts with 8 samples of up to 12 tokens, float32."""
    folder = tmp_path_factory.mktemp("sorting") / "v0"
    make_tiny("sort_digits", folder, max_tokens=16, seed=0)
    return environment_arena(folder, "float32", SORT_SAMPLING, EnvironmentTerms("sort_digits"))


@pytest.fixture(scope="session")
def history(sorting: Arena, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The sorting policy after 0 to 8 steps of GRPO on its own rollouts."""
    return train_policy(sorting, tmp_path_factory.mktemp("history"), STEPS)


@pytest.fixture(scope="session")
def populated_site(tmp_path_factory: pytest.TempPathFactory, random_folder: Path) -> Path:
    """A coordinator with contracts, a bound and staked node, and recorded versions."""
    folder = tmp_path_factory.mktemp("attacked-site")
    world = World(folder)
    try:
        trio.run(world.populate)
    finally:
        world.close()
    site = Site(folder, random_folder)
    try:
        trio.run(site.populate)
    finally:
        site.close()
    return folder


@pytest.fixture
def site(populated_site: Path, tmp_path: Path, random_folder: Path) -> Iterator[Site]:
    """A copy of it for one test."""
    folder = tmp_path / "site"
    shutil.copytree(populated_site, folder)
    opened = Site(folder, random_folder)
    trio.run(opened.standing.open)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def engine(random_folder: Path) -> TorchEngine:
    """The random model in float32, for the coordinator's parts."""
    return load(random_folder)
