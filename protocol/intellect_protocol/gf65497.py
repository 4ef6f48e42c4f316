"""Polynomials over GF(65497), many at a time: the arithmetic under the TOPLOC commitments.

65497 is the prime of the TOPLOC format: field elements fit 16 bits. Interpolating 128 points the textbook way
(divided differences, one polynomial after another) takes 8,128 modular divisions; done in interpreted loops
that costs more than generating the tokens. Here every step works on all polynomials of a batch at once, in
float64: a product of two residues is below 2**32, so a sum of 2**12 of them is an exact integer, matrix
products (with whatever fused multiply-adds BLAS uses in them) stay exact, and a reduction is one
multiplication and one floor. Nothing is approximate.

Interpolation is Lagrange's formula rearranged. With the master polynomial M(x) = prod (x - x_i), its
derivative M', the weights w_i = y_i / M'(x_i) and their power sums P_t = sum_i w_i x_i**t, synthetic division
gives

    coefficient_j = sum_{t >= 0} M_{j+1+t} P_t

M comes from a product tree; M'(x_i) and P_t split the exponent into 16 a + b ("baby steps, giant steps"),
which takes 32 modular products per point instead of 128.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

PRIME = 65497
TERMS = 128

_BABY = 16
_GIANT = TERMS // _BABY
_BATCH = 64
"""Polynomials handled at once: the working set of a batch stays within a few MiB of cache."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def _reduce(values: Floats) -> Floats:
    """`values` modulo PRIME, exact for integers in [0, 2**44).

    The half keeps the quotient off integers by 0.5 / PRIME = 2**-17, far more than its rounding error, so the
    floor is never off by one.
    """
    reduced: Floats = values - np.floor((values + 0.5) * (1.0 / PRIME)) * PRIME
    return reduced


@cache
def _inverses() -> Floats:
    """Table of modular inverses by Fermat's little theorem, a**(PRIME - 2); the entry of 0 is 0."""
    base = np.arange(PRIME, dtype=np.float64)
    result = np.ones(PRIME)
    exponent = PRIME - 2
    while exponent:
        if exponent & 1:
            result = _reduce(result * base)
        base = _reduce(base * base)
        exponent >>= 1
    result[0] = 0.0
    return result


def _baby_steps(x: Floats) -> tuple[Floats, Floats]:
    """x**0 ... x**15 as [batch, points, 16], and x**16 as [batch, points]."""
    powers = np.empty((*x.shape, _BABY))
    powers[..., 0] = 1.0
    powers[..., 1] = x
    step = _reduce(x * x)
    width = 2
    while width < _BABY:
        powers[..., width : 2 * width] = _reduce(powers[..., :width] * step[..., None])
        step = _reduce(step * step)
        width *= 2
    return powers, step


def _evaluate(coefficients: Floats, powers: Floats, giant: Floats) -> Floats:
    blocks = coefficients.reshape(len(coefficients), _GIANT, _BABY).transpose(0, 2, 1)
    inner = _reduce(powers @ blocks)
    value = inner[..., _GIANT - 1]
    for block in range(_GIANT - 2, -1, -1):
        value = _reduce(value * giant + inner[..., block])
    return value


def _power_sums(weights: Floats, powers: Floats, giant: Floats) -> Floats:
    """sum_i weights_i x_i**t for t < 128, as [batch, 128]."""
    scaled = np.empty((len(weights), _GIANT, weights.shape[1]))
    scaled[:, 0] = weights
    for block in range(1, _GIANT):
        scaled[:, block] = _reduce(scaled[:, block - 1] * giant)
    return _reduce(scaled @ powers).reshape(len(weights), TERMS)


def _master(x: Floats, used: npt.NDArray[np.bool_]) -> Floats:
    """prod (X - x_i) over the used points, ascending coefficients, [batch, 129]; unused points count as 1."""
    level = np.empty((*x.shape, 2))
    level[..., 0] = np.where(used, _reduce(PRIME - x), 1.0)
    level[..., 1] = used
    while level.shape[1] > 1:
        left, right = level[:, 0::2], level[:, 1::2]
        degree = level.shape[2] - 1
        padded = np.pad(right, ((0, 0), (0, 0), (degree, degree)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, degree + 1, axis=2)
        level = _reduce(np.einsum("cpnj,cpj->cpn", windows, left[..., ::-1]))
    return level[:, 0]


def _interpolate(x: Floats, y: Floats, used: npt.NDArray[np.bool_]) -> Floats:
    master = _master(x, used)
    derivative = _reduce(master[:, 1:] * np.arange(1.0, TERMS + 1))
    powers, giant = _baby_steps(x)
    slope = _evaluate(derivative, powers, giant).astype(np.int64)
    weights = np.where(used, _reduce(y * _inverses()[slope]), 0.0)
    sums = _power_sums(weights, powers, giant)
    padded = np.zeros((len(x), 2 * TERMS))
    padded[:, :TERMS] = master[:, 1:]
    shifted = np.lib.stride_tricks.sliding_window_view(padded, TERMS, axis=1)[:, :TERMS]
    return _reduce(np.einsum("cjt,ct->cj", shifted, sums))


def interpolate(x: Ints, y: Ints, count: Ints) -> Ints:
    """Coefficients of the polynomials of least degree through the given points.

    Args:
        x: int64[batch, 128], abscissae in [0, PRIME), distinct among the first `count` of each row.
        y: int64[batch, 128], any non-negative values below 2**16 (taken modulo PRIME).
        count: int64[batch], how many points of each row count (1 to 128).

    Returns:
        int64[batch, 128] in [0, PRIME), ascending powers; entries from `count` on are zero.
    """
    used = np.arange(TERMS) < count[:, None]
    result = np.empty((len(x), TERMS), dtype=np.int64)
    for start in range(0, len(x), _BATCH):
        part = slice(start, start + _BATCH)
        abscissae = np.where(used[part], x[part], 0).astype(np.float64)
        ordinates = _reduce(y[part].astype(np.float64))
        result[part] = _interpolate(abscissae, ordinates, used[part])
    return result


def evaluate(coefficients: Ints, x: Ints) -> Ints:
    """Values of each polynomial at its own points.

    Args:
        coefficients: int64[batch, 128] in [0, PRIME), ascending powers.
        x: int64[batch, points] in [0, PRIME).

    Returns:
        int64[batch, points] in [0, PRIME).
    """
    result = np.empty(x.shape, dtype=np.int64)
    for start in range(0, len(x), _BATCH):
        part = slice(start, start + _BATCH)
        powers, giant = _baby_steps(x[part].astype(np.float64))
        result[part] = _evaluate(coefficients[part].astype(np.float64), powers, giant)
    return result
