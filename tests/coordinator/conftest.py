"""The populated chain is made once; every test gets a copy of its files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from coordinator_site import Site, tiny_model
from example_unit import load
from world import World

from intellect_protocol.engines.torch_engine import TorchEngine


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("coordinator-model") / "model")


@pytest.fixture(scope="session")
def engine(model_folder: Path) -> TorchEngine:
    return load(model_folder)


@pytest.fixture(scope="session")
def populated_site(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("coordinator-site")
    world = World(folder)
    try:
        trio.run(world.populate)
    finally:
        world.close()
    site = Site(folder, model_folder)
    try:
        trio.run(site.populate)
    finally:
        site.close()
    return folder


@pytest.fixture
def site(populated_site: Path, tmp_path: Path, model_folder: Path) -> Iterator[Site]:
    folder = tmp_path / "site"
    shutil.copytree(populated_site, folder)
    opened = Site(folder, model_folder)
    trio.run(opened.standing.open)
    yield opened
    opened.close()
