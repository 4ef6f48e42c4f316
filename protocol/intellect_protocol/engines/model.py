"""A decoder for Llama, Qwen2 and Qwen3 checkpoints that is fast in small steps.

What makes generation slow on a CPU is neither the sampling nor the arithmetic but reading weights
and starting kernels, so: query, key and value are one product, gate and up are one product, the
weights are packed (`linear`), tokens of all rows lie end to end in one [tokens, hidden] matrix
without padding, the cache is allocated ahead, and grouped query heads are folded into the query
length of one attention call, so that keys and values are never repeated.

Numerics follow transformers' implementation of these models (rotation in the model's dtype, norms
in float32); in float32 the two agree to rounding, in bfloat16 within its noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from ..errors import ConfigError
from .attention import native_kernel
from .cache import NativeBatch, NativePrompts
from .decoder import ModelShape
from .linear import Linear
from .model_config import NativeConfig, Rope

Tensors = dict[str, torch.Tensor]

_MLP_TOKENS = 8192
"""Tokens that go through an MLP at once: its inner activations are the widest of all."""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, query [n, heads, dim], key and value [n, kv heads, dim]) -> [n, heads * dim]: what the
tokens of a forward pass see is the caller's business."""


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2] angular frequencies of RoPE (arXiv 2104.09864).

    "llama3" stretches the long wavelengths by `factor` and blends in between, as the Llama 3.1
    release does.
    """
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_length * frequencies / (2 * math.pi)
        span = rope.high_freq_factor - rope.low_freq_factor
        smooth = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
        return (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    return frequencies


class _Layer:
    """Weights of one transformer block."""

    def __init__(self, tensors: Tensors, index: int, config: NativeConfig) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        prefix = f"model.layers.{index}."

        def take(name: str, *shape: int) -> torch.Tensor:
            return _take(tensors, prefix + name, *shape)

        def bias(*parts: tuple[str, int]) -> torch.Tensor | None:
            if f"{prefix}{parts[0][0]}.bias" not in tensors:
                return None
            return torch.cat([take(f"{name}.bias", size) for name, size in parts])

        attention, mlp = "self_attn.", "mlp."
        projections = [("q_proj", query), ("k_proj", key), ("v_proj", key)]
        self.input_norm = take("input_layernorm.weight", hidden)
        self.qkv = Linear(
            torch.cat([take(f"{attention}{name}.weight", size, hidden) for name, size in projections]),
            bias(*[(attention + name, size) for name, size in projections]),
        )
        self.query_norm: torch.Tensor | None = None
        self.key_norm: torch.Tensor | None = None
        if config.model_type == "qwen3":
            self.query_norm = take(f"{attention}q_norm.weight", config.head_dim)
            self.key_norm = take(f"{attention}k_norm.weight", config.head_dim)
        self.output = Linear(
            take(f"{attention}o_proj.weight", hidden, query), bias((f"{attention}o_proj", hidden))
        )
        self.post_norm = take("post_attention_layernorm.weight", hidden)
        self.gate_up = Linear(
            torch.cat([take(f"{mlp}{name}.weight", inner, hidden) for name in ("gate_proj", "up_proj")]),
            bias((f"{mlp}gate_proj", inner), (f"{mlp}up_proj", inner)),
        )
        self.down = Linear(take(f"{mlp}down_proj.weight", hidden, inner), bias((f"{mlp}down_proj", hidden)))


def _take(tensors: Tensors, name: str, *shape: int) -> torch.Tensor:
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise ConfigError(f"checkpoint has no tensor {name}")
    if tuple(tensor.shape) != shape:
        raise ConfigError(f"tensor {name} has shape {tuple(tensor.shape)}, config.json asks for {shape}")
    return tensor


class NativeDecoder:
    """A loaded model; see `decoder.Decoder`."""

    def __init__(self, config: NativeConfig, tensors: Tensors, attention: str = "sdpa") -> None:
        """Take the weights out of `tensors`.

        Args:
            attention: "sdpa" or "eager".

        Raises:
            ConfigError: a tensor is missing, has another shape, or is not known to the architecture.
        """
        self.config, self.attention, self.kernel = config, attention, native_kernel(attention)
        parameters = sum(tensor.numel() for tensor in tensors.values())
        self.embedding = _take(tensors, "model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [_Layer(tensors, index, config) for index in range(config.layers)]
        self.norm = _take(tensors, "model.norm.weight", config.hidden_size)
        head = tensors.pop("lm_head.weight", None)
        if config.tied:
            head = self.embedding
        if head is None or head.shape != self.embedding.shape:
            raise ConfigError("checkpoint has no tensor lm_head.weight of the embedding's shape")
        self.head = Linear(head)
        # Old checkpoints carry the rotary frequencies; they follow from config.json.
        unknown = [name for name in tensors if not name.endswith("rotary_emb.inv_freq")]
        if unknown:
            raise ConfigError(f"checkpoint has a tensor that {config.model_type} does not know: {unknown[0]}")
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self.shape = ModelShape(
            model_type=config.model_type,
            parameters=parameters,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            context_length=config.context_length,
            cache_bytes_per_token=2 * config.layers * config.kv_heads * config.head_dim * self.dtype.itemsize,
        )
        self._inverse_frequencies = inverse_frequencies(config.rope, config.head_dim)
        self._cos, self._sin = self._rotation_table(0)

    def _rotation_table(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self._inverse_frequencies)
        cos, sin = angles.cos(), angles.sin()
        # rotate_half(x) * sin = roll(x, half) * (-sin, sin): one kernel less per layer.
        return (
            torch.cat((cos, cos), -1)[:, None].to(self.device, self.dtype),
            torch.cat((-sin, sin), -1)[:, None].to(self.device, self.dtype),
        )

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin [n, 1, head_dim] at positions [n]."""
        needed = int(positions.max()) + 1
        if needed > len(self._cos):
            self._cos, self._sin = self._rotation_table(1 << (needed - 1).bit_length())
        return self._cos[positions], self._sin[positions]

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """States [n, hidden] after tokens [n] that stand at `positions` [n]."""
        config = self.config
        rotated_heads, half = config.heads + config.kv_heads, config.head_dim // 2
        cos, sin = self._rotation(positions)
        norm_shape = (config.hidden_size,)
        x = functional.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(functional.rms_norm(x, norm_shape, layer.input_norm, config.norm_eps))
            qkv = qkv.view(len(x), -1, config.head_dim)
            rotated = qkv[:, :rotated_heads]
            if layer.query_norm is not None:
                rotated = self._head_norms(layer, rotated)
            rotated = torch.addcmul(rotated * cos, rotated.roll(half, -1), sin)
            mixed = attend(
                index, rotated[:, : config.heads], rotated[:, config.heads :], qkv[:, rotated_heads:]
            )
            x = x + layer.output(mixed)
            for part in torch.split(x, _MLP_TOKENS):
                normed = functional.rms_norm(part, norm_shape, layer.post_norm, config.norm_eps)
                gate, up = layer.gate_up(normed).chunk(2, -1)
                part += layer.down(functional.silu(gate) * up)
        return functional.rms_norm(x, norm_shape, self.norm, config.norm_eps)

    def _head_norms(self, layer: _Layer, rotated: torch.Tensor) -> torch.Tensor:
        heads, eps, shape = self.config.heads, self.config.norm_eps, (self.config.head_dim,)
        return torch.cat(
            (
                functional.rms_norm(rotated[:, :heads], shape, layer.query_norm, eps),
                functional.rms_norm(rotated[:, heads:], shape, layer.key_norm, eps),
            ),
            dim=1,
        )

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.head(states).float()

    def new_batch(self, max_rows: int) -> NativeBatch:
        return NativeBatch(self, max_rows)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> NativePrompts:
        packed = _PackedRows(prompts, self.device)
        attend = _CausalAttend(self, packed, keep=True)
        states = self.forward(packed.tokens, packed.steps, attend)
        last = states[packed.lengths.cumsum(0) - 1]
        return NativePrompts(last, attend.keys, attend.values, packed.lengths)

    def sequence_states(self, tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        packed = _PackedRows(tokens, self.device)
        states = self.forward(packed.tokens, packed.steps, _CausalAttend(self, packed, keep=False))
        return list(torch.split(states, packed.sizes))

    def continuation_states(
        self, prompts: NativePrompts, index: torch.Tensor, completions: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        first = prompts.states[index]
        if max(map(len, completions)) == 1:
            return list(first[:, None])
        # The last token's state predicts a token that does not exist.
        packed = _PackedRows([completion[:-1] or completion for completion in completions], self.device)
        positions = prompts.lengths[index].repeat_interleave(packed.lengths) + packed.steps
        states = self.forward(packed.tokens, positions, _PrefixAttend(self, prompts, index, packed))
        return [
            torch.cat((first[row : row + 1], own[: len(completion) - 1]))
            for row, (own, completion) in enumerate(
                zip(torch.split(states, packed.sizes), completions, strict=True)
            )
        ]


class _PackedRows:
    """Rows of different lengths, end to end: only attention needs them side by side.

    Attributes:
        tokens, steps: int64 [tokens] of all rows, and the place of each within its row.
        sizes, lengths: the rows' lengths, as a list and as a tensor [rows].
    """

    def __init__(self, rows: Sequence[Sequence[int]], device: torch.device) -> None:
        self.sizes = [len(row) for row in rows]
        self.longest = max(self.sizes)
        self.tokens = torch.tensor([token for row in rows for token in row], device=device)
        self.lengths = torch.tensor(self.sizes, device=device)
        within = torch.arange(self.longest, device=device) < self.lengths[:, None]
        places = within.reshape(-1).nonzero()[:, 0]
        self.steps = places % self.longest
        self._places = None if len(places) == within.numel() else places

    def side_by_side(self, packed: torch.Tensor) -> torch.Tensor:
        """[rows, longest, heads, dim] of a packed [tokens, heads, dim]; zeros behind the end of a row."""
        if self._places is not None:
            # Zeros, not garbage: a masked NaN would still spoil the weighted sum of values.
            padded = packed.new_zeros(len(self.sizes) * self.longest, *packed.shape[1:])
            padded[self._places] = packed
            packed = padded
        return packed.view(len(self.sizes), self.longest, *packed.shape[1:])

    def end_to_end(self, mixed: torch.Tensor) -> torch.Tensor:
        """[tokens, heads * dim] of [rows, heads, longest, dim]."""
        flat = mixed.transpose(1, 2).reshape(len(self.sizes) * self.longest, -1)
        return flat if self._places is None else flat[self._places]


class _CausalAttend:
    """Whole sequences: every token sees itself and those before it in its row."""

    def __init__(self, decoder: NativeDecoder, packed: _PackedRows, *, keep: bool) -> None:
        self.config, self.packed, self.keep = decoder.config, packed, keep
        self.kernel = decoder.kernel
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        config, packed = self.config, self.packed
        rows, length = len(packed.sizes), packed.longest
        group = config.heads // config.kv_heads
        key = packed.side_by_side(key).transpose(1, 2).contiguous()
        value = packed.side_by_side(value).transpose(1, 2).contiguous()
        if self.keep:
            self.keys.append(key)
            self.values.append(value)
        # One "batch" entry per kv head; its query heads see the same keys through a stride of zero.
        flat = (rows * config.kv_heads, 1, length, config.head_dim)
        mixed = self.kernel(
            packed.side_by_side(query)
            .transpose(1, 2)
            .reshape(rows * config.kv_heads, group, length, config.head_dim),
            key.view(flat).expand(-1, group, -1, -1),
            value.view(flat).expand(-1, group, -1, -1),
            is_causal=True,
        )
        return packed.end_to_end(mixed.view(rows, config.heads, length, config.head_dim))


class _PrefixAttend:
    """Continuations: every token sees its row's prompt in a cache and the tokens before it."""

    def __init__(
        self, decoder: NativeDecoder, prompts: NativePrompts, index: torch.Tensor, packed: _PackedRows
    ) -> None:
        self.config, self.prompts, self.index, self.packed = decoder.config, prompts, index, packed
        self.kernel = decoder.kernel
        group = self.config.heads // self.config.kv_heads
        prefix, length = prompts.keys[0].shape[2], packed.longest
        device = decoder.device
        lengths = prompts.lengths[index]
        if bool((lengths == prefix).all()):
            lengths = lengths[:1]
        own = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        seen = torch.arange(prefix, device=device) < lengths[:, None]
        mask = torch.cat((seen[:, None].expand(-1, length, -1), own.expand(len(lengths), -1, -1)), dim=-1)
        # [rows or 1, 1, group * length, prefix + length]: query heads are folded into the length.
        self.mask = mask.repeat(1, group, 1)[:, None]

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        config, packed = self.config, self.packed
        rows, length = len(packed.sizes), packed.longest
        group = config.heads // config.kv_heads
        own_keys = packed.side_by_side(key).transpose(1, 2)
        own_values = packed.side_by_side(value).transpose(1, 2)
        mixed = self.kernel(
            packed.side_by_side(query)
            .transpose(1, 2)
            .reshape(rows, config.kv_heads, group * length, config.head_dim),
            torch.cat((self.prompts.keys[layer][self.index], own_keys), dim=2),
            torch.cat((self.prompts.values[layer][self.index], own_values), dim=2),
            attn_mask=self.mask,
        )
        return packed.end_to_end(mixed.view(rows, config.heads, length, config.head_dim))
