"""Which entries of the hidden states a commitment covers: the 128 largest in magnitude of each chunk.

Sorting every chunk would cost more than the polynomial. A partial selection on 15-bit magnitudes gives the
128th largest, one scan finds all entries that reach it, and only where more than 128 do are ties counted:
they go to the lower index, so that two implementations commit to the same entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

CHUNK_TOKENS = 32
TOP_K = 128

_INFINITE = 0x7F80

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


def _select(flat: Bits, k: int) -> Ints:
    """Indices [chunks, k], ascending, of each row's k largest magnitudes; ties to the lower index."""
    chunks, entries = flat.shape
    magnitude = flat & np.uint16(0x7FFF)
    if int(magnitude.max()) >= _INFINITE:
        raise ValueError("hidden states contain NaN or infinity")
    threshold = np.partition(magnitude, entries - k, axis=1)[:, entries - k]
    position = np.flatnonzero(magnitude >= threshold[:, None])
    if len(position) > chunks * k:
        row = position // entries
        tied = magnitude.reshape(-1)[position] == threshold[row]
        room = k - np.bincount(row[~tied], minlength=chunks)
        seen = np.cumsum(tied)
        before = np.searchsorted(row, np.arange(chunks))
        rank = seen - (seen - tied)[before][row]
        position = position[~tied | (rank <= room[row])]
    chosen: Ints = position.reshape(chunks, k) % entries
    return chosen


def top_entries(rows: Sequence[States]) -> TopEntries:
    """Choose the top entries of all chunks of all rows, in order.

    Raises:
        ValueError: a row is not [tokens, hidden], is empty, or holds NaN or infinity.
        TypeError: wrong dtype.
    """
    index = [np.zeros((0, TOP_K), dtype=np.int64)]
    bits = [np.zeros((0, TOP_K), dtype=np.uint16)]
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
            flat = part.reshape(-1, chunk_tokens * hidden)
            chosen = _select(flat, min(TOP_K, flat.shape[1]))
            pad = ((0, 0), (0, TOP_K - chosen.shape[1]))
            index.append(np.pad(chosen, pad))
            bits.append(np.pad(np.take_along_axis(flat, chosen, axis=1), pad))
            tokens += [chunk_tokens] * len(flat)
            entries += [flat.shape[1]] * len(flat)
    sizes = np.asarray(entries, dtype=np.int64)
    return TopEntries(np.concatenate(index), np.concatenate(bits), sizes, np.asarray(tokens, dtype=np.int64))
