"""Limits from honest values, bounds of rates, and what limits leave to a cheat who steers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from intellect_coordinator.calibration.bounds import upper_bound
from intellect_coordinator.calibration.fit import choose_limit, fit, tail_limit
from intellect_coordinator.calibration.steering import EDGES, PLAUSIBLE, Choices, choices_of, freedom
from intellect_coordinator.calibration.values import LEVELS, Values
from intellect_protocol import sampling as seeded
from intellect_protocol.run import Limit, Thresholds
from intellect_protocol.validation.limits import LIMITS_BF16, LIMITS_FP32

NO_FLOOR = Limit(0.0, 0.0)
values_strategy = st.lists(st.floats(0, 50, allow_nan=False), min_size=1, max_size=200)


@given(st.integers(0, 20), st.integers(1, 400))
def test_the_upper_bound_is_where_so_few_events_become_unlikely(events: int, trials: int) -> None:
    assume(events < trials)
    bound = upper_bound(events, trials)
    assert events / trials < bound < 1
    exactly = sum(math.comb(trials, k) * bound**k * (1 - bound) ** (trials - k) for k in range(events + 1))
    assert exactly == pytest.approx(0.05, rel=1e-6)


def test_no_event_in_n_trials_is_the_rule_of_three() -> None:
    assert upper_bound(0, 1000) == pytest.approx(3 / 1000, rel=0.01)
    assert upper_bound(7, 7) == 1
    with pytest.raises(ValueError, match="8 events"):
        upper_bound(8, 7)


def test_the_tail_of_exponential_values_is_continued_to_the_rate_asked_for() -> None:
    values = np.random.default_rng(0).exponential(2.0, 20_000).tolist()
    assert tail_limit(values, 1e-6) == pytest.approx(2 * math.log(1e6), rel=0.1)


@given(values_strategy, st.floats(1, 200))
def test_a_limit_keeps_its_distance_from_every_value_it_was_chosen_on(
    values: list[float], per_unit: float
) -> None:
    limit = choose_limit("mantissa_mean", values, per_unit, NO_FLOOR)
    assert 1.25 * max(values) <= limit.suspect <= limit.fraud
    assert 1.75 * max(values) <= limit.fraud
    floored = choose_limit("mantissa_mean", values, per_unit, Limit(60.0, 90.0))
    assert floored.suspect >= 60
    assert floored.fraud >= 90
    share = choose_limit("far_share_row", [value / 50 for value in values], per_unit, NO_FLOOR)
    assert share.suspect <= share.fraud <= 1


@given(values_strategy)
def test_a_rarer_false_alarm_needs_a_higher_limit(values: list[float]) -> None:
    limits = [tail_limit(values, rate) for rate in (1e-1, 1e-3, 1e-6)]
    assert limits == sorted(limits)


def some_values(scale: float, count: int, seed: int) -> Values:
    draw = np.random.default_rng(seed)
    return Values({name: (scale * draw.random(count)).tolist() for name in LEVELS})


def test_the_testing_half_tests_and_does_not_choose() -> None:
    chosen, wilder = some_values(0.1, 400, 0), some_values(0.9, 400, 1)
    calm, fitted = fit(chosen, some_values(0.1, 400, 2), 4, "bfloat16")
    assert fit(chosen, wilder, 4, "bfloat16")[0] == calm
    over = {each.name: each for each in fit(chosen, wilder, 4, "bfloat16")[1]}
    assert over["mantissa_mean"].over_fraud > 0
    assert over["mantissa_mean"].fraud_bound > over["mantissa_mean"].over_fraud / 400
    assert all(each.over_suspect == 0 and each.suspect_bound < 0.01 for each in fitted)
    with pytest.raises(ValueError, match="no honest values"):
        fit(chosen, Values({name: [] for name in LEVELS}), 4, "bfloat16")


def test_every_limit_of_the_thresholds_is_fitted() -> None:
    names = {name for name in Thresholds.__struct_fields__ if isinstance(getattr(LIMITS_BF16, name), Limit)}
    assert names == set(LEVELS)


def test_in_float32_the_defaults_leave_room_for_other_machines() -> None:
    exact = Values({name: [0.0] * 100 for name in LEVELS})
    assert fit(exact, exact, 2, "float32")[0] == LIMITS_FP32


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 300), st.floats(0.1, 8))
def test_choices_are_counted_at_the_distances_of_the_sampling_check(
    seed: int, vocabulary: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, vocabulary, generator=generator) * spread
    uniform = torch.rand(1, generator=generator, dtype=torch.float64).numpy()
    found = choices_of(logits, uniform, 0.99)[0]
    drawn = int(seeded.sample(logits.numpy(), uniform).tokens[0])
    probability = logits.double().softmax(-1)[0]
    everything, plausible = np.zeros(len(EDGES)), np.zeros(len(EDGES))
    for token in range(vocabulary):
        gap = seeded.distance(logits.numpy(), np.array([token]), uniform).distances[0]
        place = 0 if token == drawn else max(1, int(np.searchsorted(EDGES, gap, side="right")) - 1)
        everything[place] += 1
        plausible[place] += token == drawn or float(probability[token]) >= PLAUSIBLE
    # An edge between two bins may fall either way.
    assert np.abs(np.cumsum(everything) - np.cumsum(found.all)).max() <= 1
    assert np.abs(np.cumsum(plausible) - np.cumsum(found.plausible)).max() <= 1
    assert found.informative == (float(probability.max()) <= 0.99)


def choices(bins: dict[int, int], *, informative: bool = True) -> Choices:
    counts = [0] * len(EDGES)
    counts[0] = 1
    for place, count in bins.items():
        counts[place] += count
    return Choices(all=counts, plausible=counts, informative=informative)


position = st.builds(
    choices,
    st.dictionaries(st.integers(60, len(EDGES) - 1), st.integers(1, 3), max_size=3),
    informative=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(position, min_size=1, max_size=5), st.sampled_from([1e-3, 3e-3, 0.02]))
def test_the_freedom_of_a_row_is_the_count_of_completions_within_the_limits(
    row: list[Choices], mean: float
) -> None:
    limits = Thresholds(
        **{name: Limit(1e9, 1e9) for name in LEVELS}
        | {
            "mean_distance_row": Limit(mean, mean),
            "max_distance": Limit(0.3, 0.5),
            "far_share_row": Limit(0.0, 0.0),
            "far_share_group": Limit(1.0, 1.0),
            "min_informative": 1,
        }  # type: ignore[arg-type]
    )
    informative = sum(each.informative for each in row)

    def within(slack: float) -> int:
        """Completions by brute force; one far token in a row never counts."""
        total = 0
        for picked in itertools.product(*([b for b, n in enumerate(each.all) if n] for each in row)):
            far = sum(EDGES[b] > limits.far_distance for b in picked)
            cost = sum(EDGES[b] for b, each in zip(picked, row, strict=True) if each.informative)
            if max(EDGES[b] for b in picked) > 0.3 or far > 1:
                continue
            if informative and cost > mean * informative * slack:
                continue
            total += math.prod(each.all[b] for b, each in zip(picked, row, strict=True))
        return total

    found = 2 ** freedom([row], 1, limits, fraud=False).bits
    assert within(1.0) * (1 - 1e-9) <= found <= within(1 + len(row) / 256 + 1e-9) * (1 + 1e-9)


def test_the_limit_of_a_group_binds_its_rows_together() -> None:
    row = [choices({100: 1})] * 40
    loose = LIMITS_BF16
    tight = Thresholds(
        **{name: getattr(loose, name) for name in loose.__struct_fields__ if name != "mean_distance_group"},
        mean_distance_group=Limit(1e-6, 1e-6),
    )
    assert freedom([row, row], 2, tight, fraud=False).bits < freedom([row, row], 2, loose, fraud=False).bits
