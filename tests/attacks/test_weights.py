"""Attacks with other weights than the policy's: another model, a cheaper one, an older one.

What bf16 leaves of these on a real model, and how many units it takes, is measured by
`benchmarks/attacks.py`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from adversaries import PartlyOther
from arena import Arena, codes, load_engine
from example_unit import CHECKPOINT_HASH, VERSION, write_tiny_model
from policy_history import at_version
from verdicts import assert_only_caught_by

from intellect_coordinator.calibration.altered_weights import Alteration, Kind, alter_checkpoint
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.rollouts import RolloutUnit
from intellect_protocol.validation.admission import WindowState, check_window
from intellect_protocol.validation.findings import Check, Outcome

BY_STATES_AND_DRAWS = {
    Check.COMMITMENT: "commitment_mantissa_mean",
    Check.SAMPLING: "sampling_distance",
}


def altered(arena: Arena, out: Path, alteration: Alteration) -> TorchEngine:
    """An engine with altered weights of the policy."""
    alter_checkpoint(arena.folder, out, alteration)
    return load_engine(out, arena.run.terms.model.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_model_is_caught_by_its_states_and_by_its_draws(
    dtype: str, arena: Arena, arena_bf16: Arena, tmp_path: Path
) -> None:
    attacked = arena if dtype == "float32" else arena_bf16
    other = load_engine(write_tiny_model(tmp_path / "other", seed=1), dtype)
    unit = attacked.build(engine=other)
    assert_only_caught_by(attacked, unit, BY_STATES_AND_DRAWS)


@pytest.mark.parametrize("kind", [Kind.INT8, Kind.INT4, Kind.FP8, Kind.DROPPED_LAYER])
def test_cheaper_weights_are_caught_in_float32_by_states_and_draws(
    kind: Kind, arena: Arena, tmp_path: Path
) -> None:
    unit = arena.build(engine=altered(arena, tmp_path / "cheap", Alteration(kind)))
    assert_only_caught_by(arena, unit, BY_STATES_AND_DRAWS)


@pytest.mark.parametrize("kind", [Kind.INT4, Kind.DROPPED_LAYER])
def test_coarse_weights_are_caught_in_bfloat16_too(kind: Kind, arena_bf16: Arena, tmp_path: Path) -> None:
    unit = arena_bf16.build(engine=altered(arena_bf16, tmp_path / "cheap", Alteration(kind)))
    assert_only_caught_by(
        arena_bf16, unit, {Check.COMMITMENT: "commitment_unit", Check.SAMPLING: "sampling_distance"}
    )


def test_cheaper_weights_for_a_few_rows_are_caught_in_those_rows(arena: Arena, tmp_path: Path) -> None:
    cheap = altered(arena, tmp_path / "cheap", Alteration(Kind.INT8))
    unit = arena.build(type("PartlyInt8", (PartlyOther,), {"cheap": cheap}))
    assert_only_caught_by(arena, unit, BY_STATES_AND_DRAWS)
    samples = arena.run.terms.sampling.samples_per_prompt
    rows = {f.row for f in arena.judge(unit, Check.DRIFT).findings if f.row is not None}
    assert rows
    assert {row % samples for row in rows} <= {0, 1, 2}


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_a_policy_of_some_steps_ago_is_caught_in_float32(
    steps: int, sorting: Arena, history: list[Path]
) -> None:
    """The node claims the newest version and its seeds, and runs weights from before."""
    newest = at_version(sorting, history[-1])
    unit = newest.build(engine=load_engine(history[-1 - steps], "float32"))
    try:
        assert_only_caught_by(newest, unit, BY_STATES_AND_DRAWS)
    finally:
        sorting.engine.update(sorting.folder)


def test_a_step_too_small_for_bfloat16_is_bound_by_the_checkpoint_hash_alone(
    arena_bf16: Arena, tmp_path: Path
) -> None:
    """No measurement tells such a policy from the newest one; the seed of its units does.

    Its units carry the hash of the checkpoint it says it ran. Under the old hash they are for a closed
    version; under the new one their prompts and streams are those of the new version, and the node has had to
    download its manifest to know them.
    """
    step = Alteration(Kind.OLDER, steps=1, learning_rate=1e-7)
    unit = arena_bf16.build(engine=altered(arena_bf16, tmp_path / "older", step))
    assert not arena_bf16.judge(unit).fraud

    old = msgspec.structs.replace(unit.meta, checkpoint_hash=b"\xaa" * 32)
    stale = arena_bf16.judge(RolloutUnit(old, unit.rows))
    assert (stale.outcome, codes(stale), stale.fraud) == (Outcome.REJECTED, {"wrong_checkpoint"}, False)
    unchecked = arena_bf16.judge(RolloutUnit(old, unit.rows), Check.FILE, Check.DRIFT)
    assert not unchecked.fraud

    window = WindowState(VERSION + 3, 2, CHECKPOINT_HASH, 0)
    assert [f.code for f in check_window(VERSION, CHECKPOINT_HASH, 0, window)] == ["stale_version"]
