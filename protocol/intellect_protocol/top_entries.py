"""Which entries of the hidden states a commitment covers: the 128 largest in magnitude of each chunk.

Even a partial selection over every chunk would cost more than the polynomial. But if a chunk is laid out in
lines, the largest magnitudes of the columns bound it: at least 128 entries reach the 128th largest of these,
so only columns that reach it hold entries to choose from. Ties go to the lower index, so that two
implementations commit to the same entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

CHUNK_TOKENS = 32
TOP_K = 128

_MAGNITUDE = np.uint16(0x7FFF)
_INFINITE = 0x7F80
_MIN_COLUMNS, _MAX_COLUMNS = 4 * TOP_K, 32 * TOP_K
"""Fewer columns would not narrow the choice down, more (by folding tokens) would only make it longer."""
_SLICE_ENTRIES = 1 << 18
"""Entries worked on at once (of whole chunks, one at least), so that they stay within the cache."""

States: TypeAlias = "npt.NDArray[Any] | torch.Tensor"
Ints: TypeAlias = npt.NDArray[np.int64]
Bits: TypeAlias = npt.NDArray[np.uint16]


class TopEntries(msgspec.Struct, frozen=True):
    """The entries of largest magnitude of many chunks, wherever they were chosen (here, or on a device).

    Attributes:
        index: int64[chunks, 128], distinct indices into the flattened chunk.
        bits: uint16[chunks, 128], bf16 bits of these entries.
        entries: int64[chunks], size of each chunk, tokens * hidden. Where it is below 128, only that many
            places of the rows above count.
        tokens: int64[chunks], tokens of each chunk, 1 to 32.
    """

    index: Ints
    bits: Bits
    entries: Ints
    tokens: Ints

    @property
    def count(self) -> Ints:
        """int64[chunks]: places of each row that count, min(128, entries)."""
        return np.minimum(self.entries, TOP_K)


def to_bf16_bits(states: States) -> Bits:
    """Hidden states as bf16 bit patterns, rounded to nearest even.

    Args:
        states: numpy uint16 (taken as bf16 bits already), float16 or float32, or a torch tensor of a floating
            type; any shape.

    Raises:
        TypeError: for any other dtype.
    """
    if not isinstance(states, np.ndarray):
        import torch

        if not states.is_floating_point():
            raise TypeError(f"hidden states must be floating point, not {states.dtype}")
        return states.detach().to(torch.bfloat16).contiguous().view(torch.uint16).cpu().numpy()
    if states.dtype == np.uint16:
        return states
    if states.dtype not in (np.float32, np.float16):
        raise TypeError(f"hidden states must be bf16 bits, float16 or float32, not {states.dtype}")
    words = np.ascontiguousarray(states, dtype=np.float32).view(np.uint32)
    rounded = ((words + (((words >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    # Rounding up would carry a NaN's mantissa into the sign; keep it a NaN so that it is refused later.
    return np.where((words & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FC0), rounded)


def _layout(tokens: int, hidden: int) -> tuple[int, int]:
    """Lines and columns that a chunk is laid out in to look for its top entries."""
    fold = math.gcd(tokens, 1 << max(0, (_MAX_COLUMNS // hidden).bit_length() - 1))
    lines, columns = tokens // fold, hidden * fold
    return (lines, columns) if columns >= _MIN_COLUMNS else (1, tokens * hidden)


def _magnitude(bits: Bits) -> Bits:
    return bits & _MAGNITUDE


def _select(part: Bits) -> Ints:
    """Indices [chunks, k], ascending, of the k largest magnitudes of chunks [chunks, tokens, hidden].

    Ties go to the lower index; k is 128, or the size of a chunk if that is less.
    """
    chunks, entries = len(part), part[0].size
    part = part.reshape(chunks, *_layout(*part.shape[1:]))
    lines, columns = part.shape[1:]
    k = min(TOP_K, entries)
    # Negative entries are the largest as unsigned numbers and, as signed ones, the smallest.
    largest = np.maximum(
        _magnitude(part.max(axis=1)), _magnitude(part.view(np.int16).max(axis=1).view(np.uint16))
    )
    if int(largest.max()) >= _INFINITE:
        raise ValueError("hidden states contain NaN or infinity")
    floor = np.partition(largest, columns - k, axis=1)[:, columns - k]

    high = np.flatnonzero(largest >= floor[:, None])
    chunk, column = np.divmod(high, columns)
    place = (chunk * entries + column)[:, None] + np.arange(0, entries, columns)
    magnitude = _magnitude(part.reshape(-1).take(place))
    candidate = np.flatnonzero(magnitude >= floor[chunk, None])

    # Candidates rank by magnitude, then by index from the end; -1 fills up chunks with fewer of them.
    chunk = chunk[candidate // lines]
    rank = magnitude.reshape(-1)[candidate].astype(np.int64) << 32
    rank += (chunk + 1) * entries - 1 - place.reshape(-1)[candidate]
    first = np.searchsorted(chunk, np.arange(chunks + 1))
    ranks = np.full((chunks, int(np.diff(first).max())), -1, dtype=np.int64)
    ranks[chunk, np.arange(len(candidate)) - first[chunk]] = rank
    top = np.partition(ranks, ranks.shape[1] - k, axis=1)[:, ranks.shape[1] - k :]
    return np.sort(entries - 1 - (top & 0xFFFFFFFF), axis=1)


def _append(index: list[Ints], bits: list[Bits], part: Bits) -> None:
    """Add the top entries of chunks [chunks, tokens, hidden] to both lists, in rows of 128."""
    chosen = _select(part)
    chunks, k = chosen.shape
    padded = np.zeros((chunks, TOP_K), dtype=np.int64)
    padded[:, :k] = chosen
    values = np.zeros((chunks, TOP_K), dtype=np.uint16)
    values[:, :k] = part.reshape(chunks, -1)[np.arange(chunks)[:, None], chosen]
    index.append(padded)
    bits.append(values)


def top_entries(rows: Sequence[States]) -> TopEntries:
    """Choose the top entries of all chunks of all rows, in order.

    Raises:
        ValueError: a row is not [tokens, hidden], is empty, or holds NaN or infinity.
        TypeError: wrong dtype.
    """
    index: list[Ints] = []
    bits: list[Bits] = []
    tokens: list[int] = []
    entries: list[int] = []
    for states in rows:
        if states.ndim != 2 or 0 in states.shape:
            raise ValueError(f"hidden states must be [tokens, hidden], not empty; got {tuple(states.shape)}")
        row_bits = np.ascontiguousarray(to_bf16_bits(states))
        length, hidden = row_bits.shape
        whole = length - length % CHUNK_TOKENS
        for part, chunk_tokens in ((row_bits[:whole], CHUNK_TOKENS), (row_bits[whole:], length - whole)):
            if len(part) == 0:
                continue
            size = chunk_tokens * hidden
            step = max(1, _SLICE_ENTRIES // size)
            chunks = part.reshape(-1, chunk_tokens, hidden)
            for start in range(0, len(chunks), step):
                _append(index, bits, chunks[start : start + step])
            tokens += [chunk_tokens] * len(chunks)
            entries += [size] * len(chunks)
    return TopEntries(
        np.concatenate(index) if index else np.zeros((0, TOP_K), dtype=np.int64),
        np.concatenate(bits) if bits else np.zeros((0, TOP_K), dtype=np.uint16),
        np.asarray(entries, dtype=np.int64),
        np.asarray(tokens, dtype=np.int64),
    )
