"""From groups of rollouts to micro-batches of tensors.

Rows are sorted by length and cut into micro-batches of at most `max_tokens` padded tokens, so that rows of
one micro-batch are about equally long and padding costs little. Padding stands on the right: a causal model
never looks at it from a real token, so no attention mask is needed, and the loss sees completion tokens
only, gathered into one flat dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TrainRow:
    """One sample, ready to train on."""

    prompt_tokens: Sequence[int]
    completion_tokens: Sequence[int]
    old_logprobs: np.ndarray  # float32 [completion tokens]
    advantage: float

    @property
    def length(self) -> int:
        """Tokens of prompt and completion together."""
        return len(self.prompt_tokens) + len(self.completion_tokens)


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of some rows; n is the number of their completion tokens together.

    `positions` points into the flattened [rows * width] hidden states: the state that predicts a token
    stands one place before it.
    """

    input_ids: Tensor  # int64 [rows, width], padded on the right, without each row's last token
    positions: Tensor  # int64 [n]
    targets: Tensor  # int64 [n]
    old_logprobs: Tensor  # float32 [n]
    advantages: Tensor  # float32 [n]
    rows: tuple[int, ...]  # index of each row in the sequence that was packed

    @property
    def tokens(self) -> int:
        """Completion tokens."""
        return self.targets.numel()


def pack(rows: Sequence[TrainRow], *, max_tokens: int) -> list[MicroBatch]:
    """Cut `rows` into micro-batches; every row is in exactly one, and the order is deterministic.

    Args:
        max_tokens: padded tokens per micro-batch; a longer row gets a micro-batch of its own.
    """
    order = sorted(range(len(rows)), key=lambda index: (-rows[index].length, index))
    batches: list[MicroBatch] = []
    start = 0
    while start < len(order):
        width = rows[order[start]].length - 1
        count = max(1, max_tokens // width)
        batches.append(_micro_batch(rows, order[start : start + count]))
        start += count
    return batches


def _micro_batch(rows: Sequence[TrainRow], picked: Sequence[int]) -> MicroBatch:
    chosen = [rows[index] for index in picked]
    lengths = [len(row.completion_tokens) for row in chosen]
    # Nothing is predicted from a row's last token, so it does not go in.
    width = max(row.length for row in chosen) - 1
    input_ids = np.zeros((len(chosen), width), dtype=np.int64)
    for line, row in enumerate(chosen):
        input_ids[line, : row.length - 1] = [*row.prompt_tokens, *row.completion_tokens][:-1]
    firsts = [line * width + len(row.prompt_tokens) - 1 for line, row in enumerate(chosen)]
    positions = [np.arange(first, first + length) for first, length in zip(firsts, lengths, strict=True)]
    targets = [token for row in chosen for token in row.completion_tokens]
    old_logprobs = np.concatenate([row.old_logprobs for row in chosen], dtype=np.float32)
    advantages = np.repeat(np.array([row.advantage for row in chosen], np.float32), lengths)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        positions=torch.from_numpy(np.concatenate(positions, dtype=np.int64)),
        targets=torch.tensor(targets),
        old_logprobs=torch.from_numpy(old_logprobs),
        advantages=torch.from_numpy(advantages),
        rows=tuple(picked),
    )
