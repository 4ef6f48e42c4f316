"""The seeded sampler, and how far a token lies from what the seed would have drawn.

Token t of a stream with seed sigma uses one uniform, and inverse-CDF sampling in token-id order:

    u       = first 8 bytes, big-endian, of SHA-256(sigma | u32 t), divided by 2**64
    x       = logits / T, in float32
    w       = exp(x - max x), difference in float32, exp in float64; zero where top-k or top-p drops a token
    token   = first id whose cumulative sum of w, in id order and in float64, exceeds u * sum w;
              the last id that adds to the sum, where rounding leaves none

Same weights, same prompt, same seed: one completion. Numeric noise in the logits moves the edges of a token's
interval a little, so a check asks for the *distance* of u from the interval and not for equality.

The same code runs on numpy arrays and torch tensors (any device). Float64 exponentials and sums of two
libraries may differ in the last bits, which moves an edge by about 1e-16: that is the chance per token that
they disagree. A vocabulary of 50,000 summed token by token would spend most of its time on tokens that cannot
be drawn, so sums are taken over blocks of 256 ids first, and over single ids only in the block that matters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from .wire import u32

if TYPE_CHECKING:
    import torch

_BLOCK = 256
_SLICE_ELEMENTS = 1 << 20
"""Logits worked on at once on a CPU, which bounds the float64 copy to 8 MiB."""
_DEVICE_SLICE_ELEMENTS = 1 << 26

Array = TypeVar("Array", "npt.NDArray[Any]", "torch.Tensor")


class Samples(NamedTuple):
    """What `sample` returns; numpy or torch like its input.

    Attributes:
        tokens: int64[batch].
        log_probs: float32[batch], log-softmax(logits / T) of these tokens, before top-k and top-p.
    """

    tokens: Any
    log_probs: Any


class Distances(NamedTuple):
    """What `distance` returns; numpy or torch like its input.

    Attributes:
        distances: float64[batch], 0 where u lies in the token's interval, else the gap to its nearer edge.
        exact: bool[batch], the token is the one that `sample` draws from these logits.
        top_prob: float32[batch], the largest probability of the distribution that was drawn from.
        log_probs: float32[batch], as in `Samples`, of the given tokens.
    """

    distances: Any
    exact: Any
    top_prob: Any
    log_probs: Any


def uniform(sigma: bytes, t: int) -> float:
    """The uniform of token `t` (0 is the first generated token) of the stream with 32-byte seed `sigma`.

    Returns:
        A float64 in [0, 1]; 1.0 only through rounding.
    """
    return int.from_bytes(hashlib.sha256(sigma + u32(t)).digest()[:8], "big") / 2**64


def uniforms(sigma: bytes, start: int, count: int) -> npt.NDArray[np.float64]:
    """float64[count]: `uniform(sigma, t)` for t = start ... start + count - 1."""
    return np.array([uniform(sigma, t) for t in range(start, start + count)], dtype=np.float64)


class _Cdf:
    """Cumulative weights of a slice of rows, by blocks of ids."""

    def __init__(self, logits: Any, temperature: float, top_k: int, top_p: float) -> None:
        self.xp: Any = np if isinstance(logits, np.ndarray) else _torch()
        xp = self.xp
        rows, vocab = logits.shape
        self.scaled = _scale(logits, temperature)
        self.top = xp.amax(self.scaled, -1)
        padded = _empty_float64(logits, (rows, -(-vocab // _BLOCK) * _BLOCK))
        padded[:, vocab:] = 0.0
        weights = padded[:, :vocab]
        xp.subtract(self.scaled, self.top[:, None], out=weights)
        xp.exp(weights, out=weights)
        self.blocks = padded.reshape(rows, -1, _BLOCK)
        sums = self.blocks.sum(-1)
        self.raw_total = sums.sum(-1)
        if not bool(xp.isfinite(self.raw_total).all()):
            raise ValueError("logits contain NaN or positive infinity, or a row without any finite one")
        if 0 < top_k < vocab or top_p < 1:
            weights *= _kept(xp, self.scaled, top_k, top_p)
            sums = self.blocks.sum(-1)
        self.prefix = sums.cumsum(-1)
        self.total = self.prefix[:, -1]
        self.rows = _like(logits, np.arange(rows))

    def _within(self, block: Any) -> tuple[Any, Any]:
        """Cumulative weight before one block of each row [rows], and at each of its ids [rows, 256]."""
        previous = self.prefix[self.rows, self.xp.where(block > 0, block - 1, 0)]
        before = self.xp.where(block > 0, previous, 0.0)
        return before, before[:, None] + self.blocks[self.rows, block].cumsum(-1)

    def draw(self, uniforms: Any) -> Any:
        target = uniforms * self.total
        xp = self.xp
        last_block = (self.prefix < self.total[:, None]).sum(-1)
        block = xp.minimum((self.prefix <= target[:, None]).sum(-1), last_block)
        _, cumulative = self._within(block)
        last = (cumulative < cumulative[:, -1:]).sum(-1)
        return block * _BLOCK + xp.minimum((cumulative <= target[:, None]).sum(-1), last)

    def edges(self, tokens: Any) -> tuple[Any, Any]:
        """Lower and upper edge of each token's interval in [0, 1]."""
        block, place = tokens // _BLOCK, tokens % _BLOCK
        before, cumulative = self._within(block)
        upper = cumulative[self.rows, place]
        lower = self.xp.where(
            place > 0, cumulative[self.rows, self.xp.where(place > 0, place - 1, 0)], before
        )
        return lower / self.total, upper / self.total

    def log_probs(self, tokens: Any) -> Any:
        shifted = self.scaled[self.rows, tokens] - self.top
        return _float32(_float64(shifted) - self.xp.log(self.raw_total))


def sample(
    logits: Array, uniforms: Array, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Samples:
    """Draw one token per row.

    Args:
        logits: [batch, vocab], float32 (other floating types are widened first).
        uniforms: float64[batch], in [0, 1].
        temperature: above 0.
        top_k: keep the k most likely tokens, ties to the lower id; 0 keeps all.
        top_p: of these keep the fewest most likely ones whose probabilities add up to top_p; 1 keeps all.

    Raises:
        ValueError: logits hold NaN or positive infinity, or shapes or parameters make no sense.
    """
    _check(logits, uniforms, temperature, top_k, top_p)
    tokens, log_probs = _empty_like(logits, "int64"), _empty_like(logits, "float32")
    for part in _slices(logits):
        cdf = _Cdf(logits[part], temperature, top_k, top_p)
        tokens[part] = cdf.draw(uniforms[part])
        log_probs[part] = cdf.log_probs(tokens[part])
    return Samples(tokens, log_probs)


def distance(
    logits: Array,
    tokens: Array,
    uniforms: Array,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Distances:
    """How far the uniforms lie from the intervals of given tokens, row by row.

    Args:
        tokens: int64[batch], each in [0, vocab). The others as in `sample`.

    Raises:
        ValueError: as `sample`, or a token outside the vocabulary.
    """
    _check(logits, uniforms, temperature, top_k, top_p)
    if tokens.shape != uniforms.shape:
        raise ValueError(f"{tuple(tokens.shape)} tokens for {tuple(uniforms.shape)} uniforms")
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < logits.shape[1]:
        raise ValueError("a token lies outside the vocabulary")
    distances, exact = _empty_like(logits, "float64"), _empty_like(logits, "bool")
    top_prob, log_probs = _empty_like(logits, "float32"), _empty_like(logits, "float32")
    for part in _slices(logits):
        cdf = _Cdf(logits[part], temperature, top_k, top_p)
        u = uniforms[part]
        lower, upper = cdf.edges(tokens[part])
        hit = cdf.draw(u) == tokens[part]
        gap = cdf.xp.maximum(lower - u, u - upper)
        exact[part] = hit
        distances[part] = cdf.xp.where(hit | (gap < 0), 0.0, gap)
        top_prob[part] = 1.0 / cdf.total  # the largest weight is exp(0)
        log_probs[part] = cdf.log_probs(tokens[part])
    return Distances(distances, exact, top_prob, log_probs)


def log_probs(logits: Array, tokens: Array, temperature: float = 1.0) -> Any:
    """float32[batch]: log-softmax(logits / T) of the given tokens, summed in float64.

    Args:
        logits: [batch, vocab]. tokens: int64[batch], each in [0, vocab).

    Raises:
        ValueError: as `sample`.
    """
    result = _empty_like(logits, "float32")
    for part in _slices(logits):
        result[part] = _Cdf(logits[part], temperature, 0, 1.0).log_probs(tokens[part])
    return result


def _check(logits: Any, uniforms: Any, temperature: float, top_k: int, top_p: float) -> None:
    if logits.ndim != 2 or logits.shape[1] == 0 or tuple(uniforms.shape) != (logits.shape[0],):
        raise ValueError(f"logits {tuple(logits.shape)} and uniforms {tuple(uniforms.shape)} do not match")
    if not temperature > 0 or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature {temperature}, top_k {top_k} or top_p {top_p} is out of range")


def _slices(logits: Any) -> Iterator[slice]:
    on_cpu = isinstance(logits, np.ndarray) or logits.device.type == "cpu"
    step = max(1, (_SLICE_ELEMENTS if on_cpu else _DEVICE_SLICE_ELEMENTS) // logits.shape[1])
    for start in range(0, logits.shape[0], step):
        yield slice(start, start + step)


def _kept(xp: Any, scaled: Any, top_k: int, top_p: float) -> Any:
    """bool[rows, vocab]: tokens that top-k and then top-p leave; the order is that of float32 logits."""
    vocab = scaled.shape[1]
    ascending = np.sort(scaled, -1) if xp is np else xp.sort(scaled, -1).values
    descending = xp.flip(ascending, (-1,))
    left = min(top_k, vocab) if top_k else vocab
    wanted = _like(scaled, np.full(len(scaled), left))
    if top_p < 1:
        cumulative = xp.exp(_float64(descending[:, :left] - descending[:, :1])).cumsum(-1)
        wanted = xp.minimum((cumulative < top_p * cumulative[:, -1:]).sum(-1) + 1, wanted)
    rows = _like(scaled, np.arange(len(scaled)))
    threshold = descending[rows, wanted - 1][:, None]
    above, tied = scaled > threshold, scaled == threshold
    room = wanted - above.sum(-1)
    return above | (tied & (tied.cumsum(-1) <= room[:, None]))


def _torch() -> Any:
    import torch

    return torch


def _scale(logits: Any, temperature: float) -> Any:
    wide = _float32(logits)
    if temperature == 1:
        return wide
    # Dividing by a Python number would multiply by its reciprocal on some devices.
    return wide / _like(wide, np.array([temperature], dtype=np.float32))


def _float64(array: Any) -> Any:
    return array.astype(np.float64) if isinstance(array, np.ndarray) else array.double()


def _float32(array: Any) -> Any:
    return array.astype(np.float32, copy=False) if isinstance(array, np.ndarray) else array.float()


def _like(array: Any, values: npt.NDArray[Any]) -> Any:
    """`values` in the library and on the device of `array`."""
    return values if isinstance(array, np.ndarray) else _torch().from_numpy(values).to(array.device)


def _empty_float64(array: Any, shape: tuple[int, int]) -> Any:
    if isinstance(array, np.ndarray):
        return np.empty(shape)
    return _torch().empty(shape, dtype=_torch().float64, device=array.device)


def _empty_like(logits: Any, dtype: str) -> Any:
    """An uninitialised [batch] result."""
    if isinstance(logits, np.ndarray):
        return np.empty(logits.shape[0], dtype=dtype)
    return _torch().empty(logits.shape[0], dtype=getattr(_torch(), dtype), device=logits.device)
