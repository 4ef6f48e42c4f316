"""Altered checkpoints: each alteration does what its name says, and an engine loads the result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_models import make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from intellect_coordinator.calibration.altered_weights import (
    Alteration,
    Kind,
    alter_checkpoint,
    fp8_per_channel,
    int4_groups,
    int8_per_channel,
    steps_older,
)
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.errors import ConfigError, UsageError

QUANTISED = [Kind.INT8, Kind.INT4, Kind.FP8]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def probe(folder: Path) -> torch.Tensor:
    engine = TorchEngine(device="cpu", dtype="float32")
    engine.load(folder)
    return torch.tensor(engine.probe(list(range(1, 30))))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 5), st.integers(1, 300), st.integers(0, 1000))
def test_quantised_weights_keep_to_their_grids(rows: int, columns: int, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    largest = weight.abs().amax(-1, keepdim=True)
    int8, int4, fp8 = int8_per_channel(weight), int4_groups(weight), fp8_per_channel(weight)
    assert ((int8 - weight).abs() <= largest / 127 * 0.51).all()
    assert ((int4 - weight).abs() <= largest / 7 * 0.51).all()
    # Half a step of three mantissa bits, or half the smallest subnormal of a row scaled to 448.
    assert ((fp8 - weight).abs() <= torch.maximum(weight.abs() / 16, largest / 448 * 2**-10) * 1.01).all()
    for row in range(rows):
        assert len(int8[row].unique()) <= 255
        assert len(int4[row, :128].unique()) <= 15
        assert len(fp8[row].unique()) <= 253


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantisation_touches_the_products_alone_and_an_engine_loads_it(
    checkpoint: Path, tmp_path: Path, kind: Kind
) -> None:
    alter_checkpoint(checkpoint, tmp_path / "out", Alteration(kind))
    before, after = tensors(checkpoint), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}
    difference = (probe(checkpoint) - probe(tmp_path / "out")).abs().mean()
    assert 0 < difference < 5


def test_coarser_grids_move_the_model_farther(checkpoint: Path, tmp_path: Path) -> None:
    exact = probe(checkpoint)
    distances = []
    for kind in (Kind.INT8, Kind.FP8, Kind.INT4):
        alter_checkpoint(checkpoint, tmp_path / kind.value, Alteration(kind))
        distances.append(float((probe(tmp_path / kind.value) - exact).abs().mean()))
    assert distances == sorted(distances)


def test_the_last_layer_is_dropped_from_tensors_and_config(checkpoint: Path, tmp_path: Path) -> None:
    alter_checkpoint(checkpoint, tmp_path / "out", Alteration(Kind.DROPPED_LAYER))
    before, after = tensors(checkpoint), tensors(tmp_path / "out")
    assert before.keys() - after.keys() == {name for name in before if ".layers.1." in name}
    assert all(torch.equal(before[name], after[name]) for name in after)
    assert not torch.equal(probe(checkpoint), probe(tmp_path / "out"))


def test_a_model_of_one_layer_has_none_to_drop(checkpoint: Path, tmp_path: Path) -> None:
    alter_checkpoint(checkpoint, tmp_path / "one", Alteration(Kind.DROPPED_LAYER))
    with pytest.raises(ConfigError, match="dropped"):
        alter_checkpoint(tmp_path / "one", tmp_path / "none", Alteration(Kind.DROPPED_LAYER))


def test_older_weights_move_by_the_learning_rate_and_more_with_every_step(
    checkpoint: Path, tmp_path: Path
) -> None:
    sizes = []
    for steps in (1, 2, 8):
        out = tmp_path / str(steps)
        alter_checkpoint(checkpoint, out, Alteration(Kind.OLDER, steps=steps, learning_rate=1e-4))
        before, after = tensors(checkpoint), tensors(out)
        moved = torch.cat([(after[name] - before[name]).flatten() for name in before])
        sizes.append(float(moved.square().mean().sqrt()))
    assert sizes[0] == pytest.approx(1e-4, rel=0.02)
    # Steps correlated by 0.9: longer than a random walk, shorter than a straight line.
    assert sizes[1] == pytest.approx(1e-4 * 3.8**0.5, rel=0.02)
    assert 8**0.5 * 1e-4 < sizes[2] < 8e-4


def test_a_step_far_below_bf16_moves_as_many_weights_as_its_size_asks_for() -> None:
    weight = torch.ones(200_000, dtype=torch.bfloat16)
    old = steps_older(weight, 1, 1e-4, torch.Generator().manual_seed(0)).float()
    # Spacing below 1 is 2**-8, above it 2**-7: nearest rounding would not move a single one.
    assert 0 < float((old != 1).float().mean()) < 0.05
    assert float(old.mean()) == pytest.approx(1, abs=1e-4)
    assert float((old - 1).abs().mean()) == pytest.approx(1e-4 * (2 / torch.pi) ** 0.5, rel=0.1)


def test_the_same_alteration_gives_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    same = Alteration(Kind.OLDER, steps=2, learning_rate=1e-3)
    for name in ("a", "b"):
        alter_checkpoint(checkpoint, tmp_path / name, same)
    alter_checkpoint(checkpoint, tmp_path / "c", Alteration(Kind.OLDER, steps=2, learning_rate=1e-3, seed=1))
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_nothing_is_written_over_or_left_half_written(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="exists"):
        alter_checkpoint(checkpoint, tmp_path / "there", Alteration(Kind.INT8))
    with pytest.raises(UsageError, match="positive"):
        alter_checkpoint(checkpoint, tmp_path / "out", Alteration(Kind.OLDER))
    with pytest.raises(ConfigError, match=r"config\.json"):
        alter_checkpoint(tmp_path / "there", tmp_path / "out", Alteration(Kind.INT8))
    assert not (tmp_path / "out").exists()
