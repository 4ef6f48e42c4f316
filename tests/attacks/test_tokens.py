"""Attacks with other tokens than those the seeds draw; commitments and log-probs are honest for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from adversaries import (
    CutShort,
    DraftTokens,
    EarlyStop,
    Insider,
    OneTokenEdited,
    OtherTemperature,
    PastedAnswer,
    StopPadding,
)
from arena import Arena, codes, load_engine, mean_reward
from example_unit import write_tiny_model
from safetensors.torch import load_file, save_file
from steering import NeverStops, StopsWithinReach
from verdicts import assert_only_caught_by

from intellect_protocol.validation.findings import Check, Kind, Outcome
from intellect_protocol.validation.improbable import check_improbable, evidence
from intellect_protocol.validation.sampling import check_sampling

BY_DRAWS = {Check.SAMPLING: "sampling_distance"}


@pytest.mark.parametrize(
    ("attack", "catching"),
    [
        (OneTokenEdited, BY_DRAWS),
        (OtherTemperature, BY_DRAWS),
        (EarlyStop, BY_DRAWS),
        (NeverStops, BY_DRAWS),
        (CutShort, {Check.TERMINATION: "unfinished"}),
        (StopPadding, {Check.TOKENS: "after_stop", **BY_DRAWS}),
    ],
)
def test_tokens_that_the_seeds_do_not_draw_are_fraud(
    attack: type[Insider], catching: dict[Check, str], arena: Arena
) -> None:
    assert_only_caught_by(arena, arena.build(attack), catching)


@pytest.mark.parametrize("attack", [OneTokenEdited, EarlyStop])
def test_edits_are_fraud_in_bfloat16_too(attack: type[Insider], arena_bf16: Arena) -> None:
    assert_only_caught_by(arena_bf16, arena_bf16.build(attack), BY_DRAWS)


@pytest.mark.parametrize("attack", [OtherTemperature, NeverStops])
def test_a_slightly_other_sampler_is_suspect_in_bfloat16(attack: type[Insider], arena_bf16: Arena) -> None:
    """A few hundred tokens, of which one in fifty differs: refused by two validators, not slashed."""
    unit = arena_bf16.build(attack)
    judgement = arena_bf16.judge(unit)
    assert judgement.outcome is Outcome.SUSPECT
    assert {finding.check for finding in judgement.findings} == {Check.SAMPLING}
    assert arena_bf16.judge(unit, Check.SAMPLING).outcome is Outcome.ACCEPTED


def test_tokens_of_a_draft_model_are_caught_though_the_policy_read_them(arena: Arena, tmp_path: Path) -> None:
    draft = load_engine(write_tiny_model(tmp_path / "draft", seed=1), "float32")
    unit = arena.build(type("Drafted", (DraftTokens,), {"draft": draft}))
    assert_only_caught_by(arena, unit, {Check.SAMPLING: "sampling_distance"})


def test_an_answer_pasted_after_the_fact_earns_its_reward_only_unchecked(sorting: Arena) -> None:
    honest = sorting.judge(sorting.build())
    unchecked = assert_only_caught_by(
        sorting, sorting.build(PastedAnswer), {Check.SAMPLING: "sampling_distance"}
    )
    assert mean_reward(unchecked) > 0.9 > mean_reward(honest) + 0.3


@pytest.fixture(scope="module")
def confident(arena_bf16: Arena, tmp_path_factory: pytest.TempPathFactory) -> Arena:
    """A model in bf16 that gives most tokens a vanishing probability, as trained ones do."""
    folder = write_tiny_model(tmp_path_factory.mktemp("confident") / "model", seed=0)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= 3
    save_file(tensors, folder / "model.safetensors")
    return Arena(arena_bf16.run, folder, load_engine(folder, "bfloat16"), arena_bf16.tasks)


def test_a_stop_token_next_to_the_draw_is_caught_by_its_probability(confident: Arena) -> None:
    """All distances stay within what honest noise has; only the chance of such tokens is wrong."""
    honest = confident.build()
    assert confident.judge(honest).findings == []
    unit = confident.build(StopsWithinReach)
    assert sum(len(row.completion_tokens) for row in unit.rows) < 0.8 * sum(
        len(row.completion_tokens) for row in honest.rows
    )
    terms = confident.run.terms
    scores = confident.scores(unit)
    distances = check_sampling(scores, terms.sampling.samples_per_prompt, confident.run.revision.thresholds)
    assert not [finding for finding in distances if finding.kind is Kind.FRAUD]
    assert_only_caught_by(confident, unit, {Check.SAMPLING: "sampling_improbable_row"})
    assert "sampling_improbable_group" in codes(confident.judge(unit))


def test_evidence_against_honest_draws_is_one_on_average(arena: Arena) -> None:
    """So no limit on it needs calibration (Markov's inequality)."""
    values = []
    for index in range(8):
        unit = arena.build(index=index)
        values += [
            evidence(row, score, arena.run.terms)
            for row, score in zip(unit.rows, arena.scores(unit, index), strict=True)
        ]
        assert check_improbable(unit.rows, arena.scores(unit, index), arena.run.terms) == []
    assert 0.2 < sum(values) / len(values) < 2.0
