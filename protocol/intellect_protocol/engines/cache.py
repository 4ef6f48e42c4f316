"""The preallocated key/value cache of a running batch.

One [rows, kv heads, positions, dim] pair per layer, rows in use first. Rows start at any time from
a prefilled prompt, which the samples of a group share until each one copies it; the capacity grows
by doubling, so a limit of many thousand tokens costs nothing until somebody gets there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .model import NativeDecoder

_FIRST_CAPACITY = 64
_ATTENTION_STEP = 16


@dataclass(frozen=True)
class NativePrompts:
    """Keys and values of prefilled prompts, right-padded to the longest."""

    states: torch.Tensor  # [prompts, hidden] after each last token
    keys: list[torch.Tensor]  # per layer [prompts, kv heads, longest, dim]
    values: list[torch.Tensor]
    lengths: torch.Tensor  # [prompts]


class NativeBatch:
    """Rows that are decoded together; see `decoder.DecodeBatch`."""

    can_refill = True

    def __init__(self, decoder: NativeDecoder, max_rows: int) -> None:
        self.decoder = decoder
        self.max_rows = max_rows
        self.positions = torch.zeros(max_rows, dtype=torch.long, device=decoder.device)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._grow(_FIRST_CAPACITY)

    def _grow(self, capacity: int) -> None:
        config, decoder = self.decoder.config, self.decoder
        shape = (self.max_rows, config.kv_heads, capacity, config.head_dim)

        def grown(old: list[torch.Tensor]) -> list[torch.Tensor]:
            result = []
            for layer in range(config.layers):
                # Zeros, not garbage: a masked NaN would still spoil the weighted sum of values.
                tensor = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
                if old:
                    tensor[:, :, : old[layer].shape[2]] = old[layer]
                    old[layer] = tensor[:0]  # frees the smaller one before the next layer grows
                result.append(tensor)
            return result

        self.keys = grown(self.keys)
        self.values = grown(self.values)
        self.capacity = capacity

    def _reserve(self, positions: int) -> None:
        if positions > self.capacity:
            self._grow(max(_FIRST_CAPACITY, 1 << (positions - 1).bit_length()))

    def admit(self, rows: torch.Tensor, prompts: NativePrompts, index: torch.Tensor) -> None:
        length = prompts.keys[0].shape[2]
        self._reserve(length + 1)
        for layer in range(self.decoder.config.layers):
            self.keys[layer][rows, :, :length] = prompts.keys[layer][index]
            self.values[layer][rows, :, :length] = prompts.values[layer][index]
        self.positions[rows] = prompts.lengths[index]

    def release(self, rows: torch.Tensor) -> None:
        self.positions[rows] = 0

    def keep(self, rows: torch.Tensor) -> None:
        count, used = len(rows), int(self.positions.max())
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[:count, :, :used] = tensor[rows, :, :used]
        self.positions[:count] = self.positions[rows]
        self.positions[count:] = 0

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        width = len(tokens)
        positions = self.positions[:width]
        longest = int(positions.max()) + 1
        self._reserve(longest)
        states = self.decoder.forward(tokens, positions, _CacheAttend(self, width, longest))
        self.positions[:width] += 1
        return states


class _CacheAttend:
    """One new token per row: it is written to the cache and sees all of its row."""

    def __init__(self, batch: NativeBatch, width: int, longest: int) -> None:
        self.batch, self.width = batch, width
        # A length in steps lets kernels that are compiled per shape be reused from step to step.
        self.length = min(-(-longest // _ATTENTION_STEP) * _ATTENTION_STEP, batch.capacity)
        self.rows = torch.arange(width, device=batch.positions.device)
        self.positions = batch.positions[:width]
        seen = torch.arange(self.length, device=batch.positions.device) <= self.positions[:, None]
        self.mask = torch.zeros(seen.shape, dtype=batch.decoder.dtype, device=seen.device)
        self.mask = self.mask.masked_fill_(~seen, float("-inf"))[:, None, None]

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        config, batch = self.batch.decoder.config, self.batch
        keys, values = batch.keys[layer], batch.values[layer]
        keys[self.rows, :, self.positions] = key
        values[self.rows, :, self.positions] = value
        # The query heads of a kv head stand where the tokens of a longer query would.
        mixed = self.batch.decoder.kernel(
            query.reshape(self.width, config.kv_heads, -1, config.head_dim),
            keys[: self.width, :, : self.length],
            values[: self.width, :, : self.length],
            attn_mask=self.mask,
        )
        return mixed.reshape(self.width, -1)
