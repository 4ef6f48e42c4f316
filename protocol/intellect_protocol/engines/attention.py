"""Attention kernels of the native decoder: the same sums in two orders, hence with different rounding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from ..errors import ConfigError

Kernel = Callable[..., torch.Tensor]
"""(query [..., n, dim], key and value [..., m, dim], attn_mask=None, is_causal=False) -> [..., n, dim]."""

KERNELS = ("auto", "sdpa", "eager", "transformers-sdpa", "transformers-eager")
"""What an engine can be asked for; "transformers-..." runs any architecture through transformers."""


def eager_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Softmax(Q K^T / sqrt(dim) + mask) V in three steps, as transformers' eager attention rounds it.

    Args:
        attn_mask: bool (true: may be seen) or of the query's dtype (added), broadcast to [..., n, m].
    """
    scores = (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value


def native_kernel(name: str) -> Kernel:
    """The kernel for "auto", "sdpa" or "eager".

    Raises:
        ConfigError: another word.
    """
    if name in ("auto", "sdpa"):
        return functional.scaled_dot_product_attention
    if name == "eager":
        return eager_attention
    raise ConfigError(f"attention must be one of {', '.join(KERNELS)}, not {name!r}")
