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

M comes from a product tree. Evaluation and power sums split the exponent into 16 a + b ("baby steps, giant
steps") and look both powers up: there are only 65497 abscissae, so a table of 24 powers of each takes 3 MB.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

PRIME = 65497
TERMS = 128

_BABY = 16
_GIANT = TERMS // _BABY
_INTERPOLATED, _EVALUATED = 32, 16
"""Polynomials handled at once: enough to hide what a call costs, few enough to stay within the cache."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def _reduce(values: Floats) -> Floats:
    """`values` modulo PRIME, exact for integers in [0, 2**44).

    The half keeps the quotient off integers by 0.5 / PRIME = 2**-17, far more than its rounding error, so the
    floor is never off by one.
    """
    quotient: Floats = values + 0.5
    quotient *= 1.0 / PRIME
    np.floor(quotient, out=quotient)
    quotient *= PRIME
    return np.subtract(values, quotient, out=quotient)


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


@cache
def _power_table() -> npt.NDArray[np.uint16]:
    """[PRIME, 24]: powers 0 ... 15 of every residue (baby steps), then 0, 16 ... 112 (giant steps)."""
    x = np.arange(PRIME, dtype=np.float64)
    table = np.empty((PRIME, _BABY + _GIANT), dtype=np.uint16)
    step = x
    for first, count in ((0, _BABY), (_BABY, _GIANT)):
        power = np.ones(PRIME)
        for place in range(first, first + count):
            table[:, place] = power
            power = _reduce(power * step)
        step = power
    return table


def _powers(x: Ints) -> tuple[Floats, Floats]:
    """Baby steps [batch, points, 16] and giant steps [batch, points, 8] of residues x [batch, points]."""
    powers = _power_table().take(x, axis=0).astype(np.float64)
    return powers[..., :_BABY], powers[..., _BABY:]


def _evaluate(coefficients: Floats, baby: Floats, giant: Floats) -> Floats:
    blocks = coefficients.reshape(len(coefficients), _GIANT, _BABY).transpose(0, 2, 1)
    return _reduce(np.einsum("cpg,cpg->cp", _reduce(baby @ blocks), giant))


def _power_sums(weights: Floats, baby: Floats, giant: Floats) -> Floats:
    """sum_i weights_i x_i**t for t < 128, as [batch, 128]."""
    scaled = _reduce(weights[..., None] * giant)
    return _reduce(scaled.transpose(0, 2, 1) @ baby).reshape(len(weights), TERMS)


def _master(x: Floats, used: npt.NDArray[np.bool_]) -> Floats:
    """prod (X - x_i) over the used points, ascending coefficients, [batch, 129]; unused points count as 1."""
    level = np.empty((*x.shape, 2))
    level[..., 0] = np.where(used, _reduce(PRIME - x), 1.0)
    level[..., 1] = used
    while level.shape[1] > 1:
        left, right = level[:, 0::2], level[:, 1::2]
        degree = level.shape[2] - 1
        padded = np.zeros((*right.shape[:2], 3 * degree + 1))
        padded[..., degree : 2 * degree + 1] = right
        windows = np.lib.stride_tricks.sliding_window_view(padded, degree + 1, axis=2)
        level = _reduce(np.einsum("cpnj,cpj->cpn", windows, left[..., ::-1]))
    return level[:, 0]


def _interpolate(x: Ints, y: Floats, used: npt.NDArray[np.bool_]) -> Floats:
    master = _master(x.astype(np.float64), used)
    derivative = _reduce(master[:, 1:] * np.arange(1.0, TERMS + 1))
    baby, giant = _powers(x)
    slope = _evaluate(derivative, baby, giant).astype(np.int64)
    weights = np.where(used, _reduce(y * _inverses()[slope]), 0.0)
    sums = _power_sums(weights, baby, giant)
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
    for start in range(0, len(x), _INTERPOLATED):
        part = slice(start, start + _INTERPOLATED)
        abscissae = np.where(used[part], x[part], 0)
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
    for start in range(0, len(x), _EVALUATED):
        part = slice(start, start + _EVALUATED)
        result[part] = _evaluate(coefficients[part].astype(np.float64), *_powers(x[part]))
    return result
