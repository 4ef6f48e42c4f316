"""Chains with the contracts on them, and the example run and models of the protocol's tests."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

_TESTS = Path(__file__).parents[1]
for folder in ("protocol", "contracts", "coordinator"):
    sys.path.append(str(_TESTS / folder))

from world import World  # noqa: E402


@pytest.fixture(scope="session")
def populated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain with the contracts, funded accounts and an owner who has staked."""
    folder = tmp_path_factory.mktemp("populated")
    world = World(folder)
    try:
        trio.run(world.populate)
    finally:
        world.close()
    return folder


@pytest.fixture
def world(populated: Path, tmp_path: Path) -> Iterator[World]:
    """A copy of it for one test."""
    folder = tmp_path / "chain"
    shutil.copytree(populated, folder)
    copy = World(folder)
    yield copy
    copy.close()
