"""Attacks with other weights than the policy's: another model, a cheaper one, an older one."""

from __future__ import annotations

from pathlib import Path

import pytest
from adversaries import PartlyOther
from arena import Arena, codes, load_engine
from example_unit import CHECKPOINT_HASH, VERSION, write_tiny_model
from policy_history import at_version
from verdicts import assert_only_caught_by

import msgspec

from intellect_coordinator.calibration.altered_weights import Alteration, Kind, alter_checkpoint
from intellect_protocol.rollouts import RolloutUnit
from intellect_protocol.validation.admission import WindowState, check_window
from intellect_protocol.validation.findings import Check, Outcome

BOTH = {Check.COMMITMENT, Check.SAMPLING}


def altered(arena: Arena, out: Path, kind: Kind) -> RolloutUnit:
    """A unit that altered weights made."""
    alter_checkpoint(arena.folder, out, Alteration(kind))
    return arena.build(engine=load_engine(out, arena.run.terms.model.dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_model_is_caught_by_its_states_and_by_its_draws(
    dtype: str, arena: Arena, arena_bf16: Arena, tmp_path: Path
) -> None:
    attacked = arena if dtype == "float32" else arena_bf16
    other = load_engine(write_tiny_model(tmp_path / "other", seed=1), dtype)
    unit = attacked.build(engine=other)
    assert_only_caught_by(
        attacked, unit, {Check.COMMITMENT: "commitment_exponents", Check.SAMPLING: "sampling_distance"}
    )


@pytest.mark.parametrize("kind", [Kind.INT8, Kind.INT4, Kind.FP8, Kind.DROPPED_LAYER])
def test_cheaper_weights_are_caught_in_float32_by_states_and_draws(
    kind: Kind, arena: Arena, tmp_path: Path
) -> None:
    unit = altered(arena, tmp_path / "cheap", kind)
    assert_only_caught_by(
        arena, unit, {Check.COMMITMENT: "commitment_mantissa_mean", Check.SAMPLING: "sampling_distance"}
    )
