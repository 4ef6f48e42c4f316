"""How measurements of checks 10 to 12 are judged: limits, abstention, short rows."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intellect_protocol.engines.base import RowScore
from intellect_protocol.rollouts import Rollout
from intellect_protocol.run import Limit, Thresholds
from intellect_protocol.toploc import ChunkReport
from intellect_protocol.validation.commitment import check_commitments
from intellect_protocol.validation.drift import check_drift
from intellect_protocol.validation.findings import Check, Finding, Kind, Outcome, judge
from intellect_protocol.validation.limits import LIMITS_BF16, LIMITS_FP32, default_thresholds, grade
from intellect_protocol.validation.sampling import check_sampling

HONEST_CHUNK = ChunkReport(
    tokens=32,
    compared=128,
    collisions=0,
    exponent_mismatches=2,
    sign_mismatches=0,
    mantissa_mean=1.3,
    mantissa_median=1.0,
    negative_tested=180,
    negative_plausible=2,
)


def score(
    distances: list[float],
    *,
    top_prob: float = 0.5,
    exact: bool = True,
    reports: list[ChunkReport] | None = None,
) -> RowScore:
    return RowScore(
        logprobs=[-1.0] * len(distances),
        distances=distances,
        exact=[exact] * len(distances),
        top_prob=[top_prob] * len(distances),
        chunk_reports=[HONEST_CHUNK] if reports is None else reports,
    )


def found(findings: list[Finding]) -> set[tuple[str, Kind, int | None]]:
    return {(finding.code, finding.kind, finding.row) for finding in findings}


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_value_is_graded_by_the_worse_limit_that_it_exceeds(
    measured: float, one: float, two: float
) -> None:
    limit = Limit(suspect=min(one, two), fraud=max(one, two))
    expected = None
    if measured > limit.fraud:
        expected = (Kind.FRAUD, limit.fraud)
    elif measured > limit.suspect:
        expected = (Kind.SUSPECT, limit.suspect)
    assert grade(measured, limit) == expected


def test_a_measurement_that_failed_is_not_held_against_anybody() -> None:
    with pytest.raises(ValueError, match="NaN"):
        grade(math.nan, Limit(1, 2))


@pytest.mark.parametrize("limits", [LIMITS_BF16, LIMITS_FP32], ids=["bf16", "fp32"])
def test_in_every_default_suspicion_begins_before_fraud(limits: Thresholds) -> None:
    pairs = [value for value in msgspec.structs.astuple(limits) if isinstance(value, Limit)]
    assert len(pairs) == 13
    assert all(0 <= pair.suspect <= pair.fraud for pair in pairs)


def test_defaults_follow_the_dtype_of_the_run() -> None:
    assert default_thresholds("bfloat16") is LIMITS_BF16
    assert default_thresholds("float32") is LIMITS_FP32
    with pytest.raises(ValueError, match="float16"):
        default_thresholds("float16")


@pytest.mark.parametrize(
    ("changes", "code", "kind"),
    [
        ({"exponent_mismatches": 16}, None, None),
        ({"exponent_mismatches": 17}, "commitment_exponents", Kind.SUSPECT),
        ({"exponent_mismatches": 29}, "commitment_exponents", Kind.FRAUD),
        ({"sign_mismatches": 3}, "commitment_signs", Kind.SUSPECT),
        ({"sign_mismatches": 128}, "commitment_signs", Kind.FRAUD),
        ({"mantissa_mean": 4.1}, "commitment_mantissa_mean", Kind.SUSPECT),
        ({"mantissa_mean": 10.1}, "commitment_mantissa_mean", Kind.FRAUD),
        ({"mantissa_median": 9.0}, "commitment_mantissa_median", Kind.FRAUD),
        ({"negative_plausible": 50}, "commitment_negative", Kind.SUSPECT),
        ({"negative_plausible": 180}, "commitment_negative", Kind.FRAUD),
        ({"collisions": 4}, None, None),
        ({"collisions": 6}, "commitment_collisions", Kind.SUSPECT),
        ({"collisions": 10}, "commitment_collisions", Kind.FRAUD),
    ],
)
def test_each_measure_of_a_chunk_has_its_pair_of_limits(
    changes: dict[str, Any], code: str | None, kind: Kind | None
) -> None:
    report = msgspec.structs.replace(HONEST_CHUNK, **changes)
    findings = check_commitments(
        [score([0.0]), score([0.0] * 64, reports=[HONEST_CHUNK, report])], LIMITS_BF16
    )
    assert found(findings) == ({(code, kind, 1)} if code else set())
    for finding in findings:
        assert finding.text.startswith("row 1, chunk 1: ")


def test_counts_of_a_chunk_with_few_entries_are_brought_to_128() -> None:
    few = msgspec.structs.replace(HONEST_CHUNK, compared=64, exponent_mismatches=15)
    findings = check_commitments([score([0.0], reports=[few])], LIMITS_BF16)
    assert [(f.code, f.kind, f.measured) for f in findings] == [("commitment_exponents", Kind.FRAUD, 30.0)]


@pytest.mark.parametrize(("tested", "caught"), [(0, False), (31, False), (32, True)])
def test_the_negative_check_abstains_where_it_could_look_at_few_places(tested: int, caught: bool) -> None:
    report = msgspec.structs.replace(HONEST_CHUNK, negative_tested=tested, negative_plausible=tested)
    assert bool(check_commitments([score([0.0], reports=[report])], LIMITS_BF16)) == caught


@pytest.mark.parametrize(
    ("chunks", "mean", "kind"),
    [(7, 3.0, None), (8, 2.0, None), (8, 2.5, Kind.SUSPECT), (8, 3.0, Kind.FRAUD)],
)
def test_the_median_chunk_of_a_unit_has_a_narrower_limit(chunks: int, mean: float, kind: Kind | None) -> None:
    limits = msgspec.structs.replace(LIMITS_BF16, mantissa_mean=Limit(100, 100))
    reports = [msgspec.structs.replace(HONEST_CHUNK, mantissa_mean=mean)] * chunks
    reports.append(msgspec.structs.replace(HONEST_CHUNK, mantissa_mean=0.0))
    findings = check_commitments([score([0.0], reports=reports[1:])], limits)
    assert [finding.kind for finding in findings if finding.code == "commitment_unit"] == (
        [kind] if kind else []
    )


def test_proofs_that_the_engine_could_not_read_are_fraud() -> None:
    unread = msgspec.structs.replace(score([0.0], reports=[]), proof_error="proof 0 has 3 bytes")
    assert found(check_commitments([score([0.0]), unread], LIMITS_BF16)) == {("proof_form", Kind.FRAUD, 1)}


@pytest.mark.parametrize("length", [1, 5, 200])
@pytest.mark.parametrize("top_prob", [0.2, 0.9999])
def test_one_far_token_is_caught_in_every_row_however_short_or_confident(
    length: int, top_prob: float
) -> None:
    distances = [0.0] * length
    distances[length // 2] = 0.5
    findings = check_sampling([score([0.0] * 5), score(distances, top_prob=top_prob)], 2, LIMITS_BF16)
    worst = [finding for finding in findings if finding.code == "sampling_distance"]
    assert [(finding.row, finding.kind, finding.measured) for finding in worst] == [(1, Kind.FRAUD, 0.5)]
    assert f"row 1, token {length // 2}: " in worst[0].text


def test_honest_bf16_noise_in_short_rows_is_no_finding() -> None:
    rng = np.random.default_rng(0)
    rows = [
        score([float(d) for d in rng.choice([0.0, 0.005, 0.033], 12, p=[0.85, 0.14, 0.01])])
        for _ in range(64)
    ]
    assert check_sampling(rows, 8, LIMITS_BF16) == []


@pytest.mark.parametrize(("far", "kind"), [(1, None), (2, Kind.SUSPECT), (3, Kind.SUSPECT), (4, Kind.FRAUD)])
def test_shares_of_a_few_far_tokens_are_no_fraud(far: int, kind: Kind | None) -> None:
    findings = check_sampling([score([0.0] * 8 + [0.06] * far)], 1, LIMITS_BF16)
    expected = {("sampling_far_row", kind, 0), ("sampling_far_group", kind, None)} if kind else set()
    assert found(findings) == expected


def test_far_tokens_add_up_over_a_group() -> None:
    rows = [score([0.0] * 49 + [0.06]) for _ in range(8)]
    assert found(check_sampling(rows, 8, LIMITS_BF16)) == {("sampling_far_group", Kind.SUSPECT, None)}
    assert check_sampling(rows, 1, LIMITS_BF16) == []


def test_the_mean_distance_abstains_in_rows_and_decides_in_the_group() -> None:
    rows = [score([0.03] * 12) for _ in range(8)]
    assert found(check_sampling(rows, 8, LIMITS_BF16)) == {("sampling_mean_group", Kind.FRAUD, None)}
    assert check_sampling(rows[:2], 2, LIMITS_BF16) == []
    long = found(check_sampling([score([0.03] * 30)], 1, LIMITS_BF16))
    assert long == {("sampling_mean_row", Kind.FRAUD, 0), ("sampling_mean_group", Kind.FRAUD, None)}


def test_confident_positions_say_nothing_about_mean_and_exactness() -> None:
    sure = [score([0.03] * 40, top_prob=0.995, exact=False) for _ in range(4)]
    assert check_sampling(sure, 4, LIMITS_BF16) == []
    unsure = [score([0.0] * 40, top_prob=0.985, exact=False) for _ in range(4)]
    assert found(check_sampling(unsure, 4, LIMITS_BF16)) == {("sampling_inexact_group", Kind.FRAUD, None)}


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.floats(0.0011, 0.05), st.booleans())
def test_mean_and_exactness_speak_from_thirty_informative_positions_on(
    informative: int, confident: int, distance: float, exact: bool
) -> None:
    count = informative + confident
    if not count:
        return
    own = score([distance] * count, exact=exact)
    own = msgspec.structs.replace(own, top_prob=[0.99] * informative + [0.9901] * confident)
    limits = msgspec.structs.replace(LIMITS_FP32, max_distance=Limit(1, 1), far_distance=0.1)
    expected = set()
    if informative >= 30:
        expected = {("sampling_mean_row", Kind.FRAUD, 0), ("sampling_mean_group", Kind.FRAUD, None)}
        expected |= set() if exact else {("sampling_inexact_group", Kind.FRAUD, None)}
    assert found(check_sampling([own], 1, limits)) == expected


def row_with(logprobs: list[float]) -> Rollout:
    return Rollout(0, 0, "", 0, 0, [2], [3] * len(logprobs), np.array(logprobs, np.float32), "stop", 0.0, [])


def test_drift_is_a_mean_that_one_noisy_token_of_a_short_row_does_not_decide() -> None:
    long, short = [-1.0] * 16, [-1.0]
    assert check_drift([row_with([-1.3] * 16)], [score(long)], LIMITS_BF16)[0].kind is Kind.SUSPECT
    assert check_drift([row_with([-1.3])], [score(short)], LIMITS_BF16) == []
    assert check_drift([row_with([-9.0])], [score(short)], LIMITS_BF16)[0].measured == pytest.approx(1.0)


KINDS = st.sampled_from(list(Kind))


@given(st.lists(KINDS))
def test_an_outcome_follows_from_the_worst_finding(kinds: list[Kind]) -> None:
    outcome = judge([Finding(Check.FILE, "code", kind, "text") for kind in kinds])
    if {Kind.INVALID, Kind.STALE, Kind.FRAUD} & set(kinds):
        assert outcome is Outcome.REJECTED
    else:
        assert outcome is (Outcome.SUSPECT if Kind.SUSPECT in kinds else Outcome.ACCEPTED)
