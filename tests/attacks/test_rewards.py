"""Attacks on the numbers a node declares: rewards and log-probs."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from arena import Arena, codes, mean_reward
from example_unit import with_row
from verdicts import assert_only_caught_by

from intellect_node.devnet.cheats import ForgedReward
from intellect_protocol.rollouts import RolloutUnit
from intellect_protocol.validation.findings import Check, Outcome


@pytest.fixture(scope="module")
def unit(arena: Arena) -> RolloutUnit:
    return arena.build()


def test_rewards_declared_too_high_are_fraud_and_never_trained_on(sorting: Arena) -> None:
    unit = sorting.build(ForgedReward)
    unchecked = assert_only_caught_by(sorting, unit, {Check.REWARD: "reward"})
    # Even then the trainer reads what the validator computed: two locks on one door.
    assert mean_reward(unchecked) < 0.9 < float(np.mean([row.reward for row in unit.rows]))


@pytest.mark.parametrize("change", [1e-5, -1e-5, -1.0, 1e30])
def test_any_other_reward_of_one_row_is_fraud(change: float, arena: Arena, unit: RolloutUnit) -> None:
    cheat = with_row(unit, 7, reward=unit.rows[7].reward + change)
    assert_only_caught_by(arena, cheat, {Check.REWARD: "reward"})
    assert {finding.row for finding in arena.judge(cheat).findings} == {7}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_no_number_never_gets_past_the_file(
    value: float, arena: Arena, unit: RolloutUnit
) -> None:
    judgement = arena.judge(with_row(unit, 7, reward=value), Check.REWARD)
    assert (judgement.outcome, codes(judgement)) == (Outcome.REJECTED, {"file_format"})


def test_log_probs_that_favour_a_row_are_suspect_and_never_trained_on(
    arena: Arena, unit: RolloutUnit
) -> None:
    """A lower behaviour log-prob raises the ratio, and with it the weight of the row in training."""
    shifted = RolloutUnit(
        unit.meta,
        [msgspec.structs.replace(row, logprobs=row.logprobs - np.float32(0.7)) for row in unit.rows],
    )
    judgement = arena.judge(shifted)
    assert (judgement.outcome, codes(judgement)) == (Outcome.SUSPECT, {"drift"})
    unchecked = arena.judge(shifted, Check.DRIFT)
    assert unchecked.outcome is Outcome.ACCEPTED
    for row, made in zip(unchecked.rows, unit.rows, strict=True):
        np.testing.assert_allclose(row.logprobs, made.logprobs, atol=1e-3)
