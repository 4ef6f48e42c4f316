"""Dithered master weights: the policy others see is unchanged, and small updates reach it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from micro_run import CONFIG, PUBLISHER, make_model, make_run
from torch import nn

from intellect_trainer.master_weights import dither_master
from intellect_trainer.session import RunOptions, open_session

BF16 = torch.bfloat16


def policy_of(weights: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(weights.clone())
    return module


def weights_of(module: nn.Module) -> torch.Tensor:
    return next(module.parameters()).detach()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=200), st.integers(0, 1 << 40))
def test_what_it_rounds_to_is_unchanged_bit_for_bit(values: list[float], seed: int) -> None:
    grid = torch.tensor(values).to(BF16)
    policy = policy_of(grid.float())
    dither_master(policy, BF16, seed=seed)
    assert torch.equal(weights_of(policy).to(BF16).view(torch.int16), grid.view(torch.int16))


def test_an_update_far_below_the_rounding_step_moves_the_rounded_mean_by_just_as_much() -> None:
    grid = torch.randn(200_000, generator=torch.Generator().manual_seed(1)).to(BF16).float()
    update = 1e-5
    still, moving = policy_of(grid), policy_of(grid)
    dither_master(moving, BF16, seed=2)
    seen = {}
    for name, policy in (("grid", still), ("dithered", moving)):
        moved = (weights_of(policy) + update * grid.sign()).to(BF16).float()
        seen[name] = float((moved - grid).mul(grid.sign()).mean())
    assert seen["grid"] < 0.05 * update  # nearly all of it is lost
    assert seen["dithered"] == pytest.approx(update, rel=0.2)


def test_float32_and_weights_off_the_grid_stay() -> None:
    weights = torch.tensor([0.1, -3.3, 0.0, float("inf")])
    for dtype in (torch.float32, BF16):
        policy = policy_of(weights)
        dither_master(policy, dtype, seed=0)
        assert torch.equal(weights_of(policy), weights)


def test_a_seed_gives_the_same_start_again() -> None:
    starts = []
    for seed in (3, 3, 4):
        policy = policy_of(torch.ones(100))
        dither_master(policy, BF16, seed=seed)
        starts.append(weights_of(policy).clone())
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


@pytest.mark.parametrize("dither", [True, False])
def test_a_bf16_run_starts_dithered_and_its_first_version_is_the_given_one(
    tmp_path: Path, dither: bool
) -> None:
    folder = tmp_path / "v0"
    make_model(folder, dtype="bfloat16")
    config = msgspec.structs.replace(CONFIG, dither_master=dither)
    options = RunOptions(
        run=make_run(folder, dtype="bfloat16"),
        config=config,
        data_dir=tmp_path / "trainer",
        batches=tmp_path / "batches",
        signer=PUBLISHER,
        checkpoint=folder,
    )
    with closing(open_session(options)) as session:
        published = dict(session.copy.named_parameters())
        off_grid = 0
        for name, given in session.learner.reference.named_parameters():
            assert torch.equal(published[name], given)
            master = session.learner.policy.get_parameter(name)
            off_grid += int((master != master.to(BF16).float()).sum())
    assert (off_grid > 0) is dither
