"""Polynomials over GF(65497): against plain integer arithmetic."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from intellect_protocol.gf65497 import PRIME, TERMS, evaluate, interpolate

elements = st.integers(0, PRIME - 1)


def horner(coefficients: list[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_evaluation_agrees_with_horner_in_exact_integers(data: st.DataObject) -> None:
    coefficients = data.draw(st.lists(elements, min_size=TERMS, max_size=TERMS))
    x = data.draw(st.lists(elements, min_size=1, max_size=20))
    values = evaluate(np.array([coefficients]), np.array([x]))
    assert values[0].tolist() == [horner(coefficients, point) for point in x]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_interpolation_gives_the_polynomial_of_least_degree_through_the_points(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    counts = [data.draw(st.integers(1, TERMS)) for _ in range(rows)]
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    x = np.stack([rng.choice(PRIME, TERMS, replace=False) for _ in range(rows)])
    y = rng.integers(0, 1 << 16, (rows, TERMS))
    coefficients = interpolate(x, y, np.array(counts))
    assert ((coefficients >= 0) & (coefficients < PRIME)).all()
    for row, count in enumerate(counts):
        assert not coefficients[row, count:].any()
        own = coefficients[row].tolist()
        for point, value in zip(x[row, :count].tolist(), y[row, :count].tolist(), strict=True):
            assert horner(own, point) == value % PRIME


def test_extreme_values_do_not_overflow_the_exact_range() -> None:
    x = np.arange(PRIME - TERMS, PRIME)[None]
    y = np.full((1, TERMS), PRIME - 1)
    y[0, ::2] = PRIME - 2
    coefficients = interpolate(x, y, np.array([TERMS]))
    assert evaluate(coefficients, x).tolist() == y.tolist()
    largest = np.full((1, TERMS), PRIME - 1)
    assert evaluate(largest, np.array([[PRIME - 1]]))[0, 0] == horner([PRIME - 1] * TERMS, PRIME - 1)


def test_polynomials_of_a_batch_do_not_influence_each_other() -> None:
    rng = np.random.default_rng(7)
    x = np.stack([rng.choice(PRIME, TERMS, replace=False) for _ in range(130)])
    y = rng.integers(0, PRIME, (130, TERMS))
    count = rng.integers(1, TERMS + 1, 130)
    together = interpolate(x, y, count)
    for row in (0, 63, 64, 129):
        alone = interpolate(x[row : row + 1], y[row : row + 1], count[row : row + 1])
        assert together[row].tolist() == alone[0].tolist()
