"""The evidence of improbable tokens is 1 on average for honest draws, whatever the policy."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest
from example_run import example_run
from hypothesis import given, settings
from hypothesis import strategies as st

from intellect_protocol.engines.base import RowScore
from intellect_protocol.rollouts import Rollout
from intellect_protocol.run import RunTerms
from intellect_protocol.validation.findings import Check, Kind
from intellect_protocol.validation.improbable import check_improbable, evidence

VOCABULARY, LONGEST = 3, 3


def terms(stop_ids: list[int], *, vocabulary: int = VOCABULARY, longest: int = LONGEST) -> RunTerms:
    base = example_run().terms
    return msgspec.structs.replace(
        base,
        model=msgspec.structs.replace(base.model, vocab_size=vocabulary),
        sampling=msgspec.structs.replace(
            base.sampling, stop_ids=stop_ids, max_tokens=longest, samples_per_prompt=2
        ),
    )


def row_and_score(tokens: list[int], logprobs: list[float]) -> tuple[Rollout, RowScore]:
    row = Rollout(0, 0, "", 0, 0, [2], tokens, np.zeros(len(tokens), np.float32), "stop", 0.0, [])
    return row, RowScore(logprobs, [0.0] * len(tokens), [True] * len(tokens), [0.5] * len(tokens), [])


PROBABILITIES = st.lists(st.floats(1e-6, 1.0), min_size=VOCABULARY, max_size=VOCABULARY)


@settings(deadline=None)
@given(st.lists(PROBABILITIES, min_size=LONGEST, max_size=LONGEST), st.sampled_from([[0], [2], [0, 1]]))
def test_no_policy_gives_more_than_one_on_average(weights: list[list[float]], stops: list[int]) -> None:
    """All completions of three tokens, with their exact probabilities."""
    policy = [np.array(own) / sum(own) for own in weights]
    expectation = chance = 0.0
    for length in range(1, LONGEST + 1):
        for tokens in itertools.product(range(VOCABULARY), repeat=length):
            ends = tokens[-1] in stops or length == LONGEST
            if not ends or any(token in stops for token in tokens[:-1]):
                continue
            drawn = [float(policy[place][token]) for place, token in enumerate(tokens)]
            logprobs = [math.log(p) for p in drawn]
            probability = math.prod(drawn)
            chance += probability
            expectation += probability * evidence(*row_and_score(list(tokens), logprobs), terms(stops))
    assert chance == pytest.approx(1.0)
    assert expectation <= 1.0 + 1e-9


@pytest.mark.parametrize(
    ("last", "kind"), [(-5.0, None), (-20.0, Kind.SUSPECT), (-30.0, Kind.FRAUD), (-1e9, Kind.FRAUD)]
)
def test_a_stop_token_that_chance_would_not_draw_is_named(last: float, kind: Kind | None) -> None:
    own = terms([1], vocabulary=50_000, longest=64)
    honest, cheat = row_and_score([5, 1], [-1.0, -1.0]), row_and_score([5, 1], [-1.0, last])
    rows, scores = zip(honest, cheat, strict=True)
    findings = check_improbable(rows, scores, own)
    rows_found = [finding for finding in findings if finding.code == "sampling_improbable_row"]
    assert [(f.kind, f.row, f.check) for f in rows_found] == ([(kind, 1, Check.SAMPLING)] if kind else [])


def test_rows_that_are_each_just_possible_add_up_over_their_group() -> None:
    own = terms([1], vocabulary=50_000, longest=64)
    rows, scores = zip(*[row_and_score([5, 1], [-1.0, -17.5])] * 2, strict=True)
    assert {(f.code, f.kind) for f in check_improbable(rows, scores, own)} == {
        ("sampling_improbable_group", Kind.FRAUD)
    }


def test_a_token_in_the_middle_counts_by_the_size_of_the_vocabulary() -> None:
    own = terms([1], vocabulary=50_000, longest=64)
    rows, scores = zip(row_and_score([5, 6, 7], [-1.0, -45.0, -1.0]), row_and_score([5], [-1.0]), strict=True)
    assert {f.code for f in check_improbable(rows, scores, own)} == {
        "sampling_improbable_row",
        "sampling_improbable_group",
    }
