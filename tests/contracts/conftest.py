"""The deployed and populated chain is made once; every test gets a copy of its files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from world import World


@pytest.fixture(scope="session")
def populated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("populated")
    world = World(folder)
    try:
        trio.run(world.populate)
    finally:
        world.close()
    return folder


@pytest.fixture
def world(populated: Path, tmp_path: Path) -> Iterator[World]:
    folder = tmp_path / "chain"
    shutil.copytree(populated, folder)
    copy = World(folder)
    yield copy
    copy.close()
