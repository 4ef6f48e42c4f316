"""Where fp32 master weights start, given a checkpoint in a coarser dtype.

A bf16 checkpoint says of each weight only in which rounding cell it lies. Taken at the middle of its cell, a
weight must travel half a cell before its rounded value, which is all that rollouts and the forward pass ever
see, changes at all: at learning rate 1e-5 that is some twenty updates for a typical weight, spent blind.
Started anywhere in the cell with equal chance, it crosses an edge with a probability proportional to its
movement, so the rounded policy follows the master weights in expectation from the first update on
(non-subtractive dither: Schuchman, "Dither signals and their effect on quantization noise", 1964). The
rounded weights, and with them version 0, stay what they were, bit for bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


@torch.no_grad()
def dither_master(policy: nn.Module, dtype: torch.dtype, *, seed: int) -> None:
    """Move each fp32 parameter to a uniform place among the values that round to it in `dtype`.

    Zeros, weights that `dtype` does not represent exactly, and all of them if it is float32 stay as they are.
    """
    if dtype == torch.float32:
        return
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        parameter.copy_(_dithered(parameter, dtype, generator))


def _dithered(weights: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    rounded = weights.to(dtype)
    below = torch.nextafter(rounded, torch.full_like(rounded, -math.inf)).float()
    above = torch.nextafter(rounded, torch.full_like(rounded, math.inf)).float()
    low, high = (below + weights) / 2, (weights + above) / 2
    drawn = torch.rand(weights.shape, generator=generator).mul_(high - low).add_(low)
    # A draw on the very edge of a cell may round to the neighbour; next to infinity there is no edge.
    moves = (drawn.to(dtype) == rounded) & (rounded.float() == weights) & (weights != 0)
    return torch.where(moves, drawn, weights)
