"""Attacks that choose among completions: best of n, best of many units, steering within the limits."""

from __future__ import annotations

import msgspec
import pytest
from arena import Arena, codes, load_engine, mean_reward
from steering import SlackSteering, TakesAlternatives
from verdicts import assert_only_caught_by

from intellect_node.devnet.cheats import BestOfN
from intellect_protocol.run import Limit, RunConfig
from intellect_protocol.validation.findings import Check, Outcome
from intellect_protocol.validation.limits import LIMITS_BF16


class Greedy(SlackSteering):
    """Takes every wanted token within 0.05, whatever the mean distance becomes."""

    reach = 0.05
    budgeted = False


class Unbounded(SlackSteering):
    """Takes every wanted token."""

    reach = 2.0
    budgeted = False


def in_bfloat16(sorting: Arena) -> Arena:
    """The same policy, generated and judged in bfloat16."""
    terms = msgspec.structs.replace(sorting.run.terms.model, dtype="bfloat16")
    revision = msgspec.structs.replace(sorting.run.revision, thresholds=LIMITS_BF16)
    run = RunConfig(msgspec.structs.replace(sorting.run.terms, model=terms), revision)
    return Arena(run, sorting.folder, load_engine(sorting.folder, "bfloat16"), sorting.tasks)


@pytest.fixture(scope="module")
def coarse(sorting: Arena) -> Arena:
    return in_bfloat16(sorting)


@pytest.fixture(scope="module")
def honest_reward(sorting: Arena) -> float:
    return mean_reward(sorting.judge(sorting.build()))


@pytest.mark.parametrize("attack", [BestOfN, Unbounded])
def test_choosing_completions_by_their_reward_pays_only_unchecked(
    attack: type[BestOfN | SlackSteering], sorting: Arena, honest_reward: float
) -> None:
    unchecked = assert_only_caught_by(sorting, sorting.build(attack), {Check.SAMPLING: "sampling_distance"})
    assert mean_reward(unchecked) > honest_reward + 0.2


def test_within_the_limits_of_float32_steering_gains_next_to_nothing(
    sorting: Arena, honest_reward: float
) -> None:
    unit = sorting.build(SlackSteering)
    assert not sorting.judge(unit).fraud
    assert mean_reward(sorting.judge(unit, Check.SAMPLING)) <= honest_reward + 0.02


def test_taking_every_alternative_within_single_distances_is_caught_by_their_mean(
    arena_bf16: Arena,
) -> None:
    """No token is far from its draw; it is all of them together that lean."""
    unit = arena_bf16.build(TakesAlternatives)
    limits = arena_bf16.run.revision.thresholds
    loose = Limit(1.0, 1.0)
    singly = msgspec.structs.replace(
        limits, mean_distance_row=loose, mean_distance_group=loose, inexact_share_group=loose
    )
    revision = msgspec.structs.replace(arena_bf16.run.revision, thresholds=singly)
    run = RunConfig(arena_bf16.run.terms, revision)
    blind = Arena(run, arena_bf16.folder, arena_bf16.engine, arena_bf16.tasks)
    assert blind.judge(unit, Check.DRIFT).outcome is Outcome.ACCEPTED

    judgement = arena_bf16.judge(unit, Check.DRIFT)
    assert judgement.outcome is not Outcome.ACCEPTED
    assert "sampling_mean_group" in codes(judgement)


def test_steering_to_rewards_alone_hides_in_the_noise_of_bfloat16(sorting: Arena, coarse: Arena) -> None:
    """It takes few steps, so no mean shows them: what docs/verification.md says that the method cannot do.

    The same choices scored in float32 are fraud.
    """
    unit = coarse.build(Greedy)
    honest = mean_reward(coarse.judge(coarse.build(), Check.DRIFT))
    judgement = coarse.judge(unit, Check.DRIFT)
    assert judgement.outcome is Outcome.ACCEPTED
    assert mean_reward(judgement) > honest + 0.03

    exact = sorting.judge(sorting.build(Greedy), Check.DRIFT)
    assert exact.fraud
    assert {finding.check for finding in exact.findings} == {Check.SAMPLING}
