"""Matrix products with weights laid out once for the CPU's kernels.

A decode step reads every weight once and does little with it, so the layout of the weight decides
the speed: plain bf16 weights are re-packed by oneDNN inside every call. `Linear` packs them when
they are loaded (16 rows of bf16, SmolLM2-135M: half the time). Packed fp32 products are also
computed in the same order of summation for every number of rows from two on, which makes a row's
result independent of the rows beside it, to the bit; MKL, behind the plain product, switches
kernels at small batches.
"""

from __future__ import annotations

import torch
from torch.nn import functional

_PACKABLE = (torch.float32, torch.bfloat16)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN's packed layout can be used for this weight."""
    if weight.device.type != "cpu" or weight.dtype not in _PACKABLE:
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


class Linear:
    """y = x W^T + b for a fixed weight [out, in] and bias [out] or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self.packed = can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self.packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] -> [n, out] in the weight's dtype."""
        if not self.packed:
            return functional.linear(x, self.weight, self.bias)
        # A single row would take the matrix-vector kernel, which sums in another order.
        rows = x if len(x) > 1 else x.repeat(2, 1)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return y[: len(x)]
