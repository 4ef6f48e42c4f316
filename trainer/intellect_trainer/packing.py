"""From groups of rollouts to micro-batches of tensors.

The samples of a group have one prompt, so it is computed once: a **line** is a prompt followed by several of
its completions, each of which sees the prompt and itself (tree attention). Positions restart after the
prompt. For short completions this halves the work, and the gradient through the shared prompt is exact.

A mask costs the square of a line's width, so a line takes only as many completions as fit into
`SHARED_WIDTH`; a line with a single completion is plain causal text and needs no mask. Lines are sorted by
width and cut into micro-batches of at most `max_tokens` padded tokens. Padding stands on the right, where no
real token looks, and the loss sees completion tokens only, gathered into one flat dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SHARED_WIDTH = 256
_PADDING = -1  # segment of padding; 0 is the prompt, 1 and up are completions


@dataclass(frozen=True)
class TrainRow:
    """One sample, ready to train on."""

    prompt_tokens: Sequence[int]
    completion_tokens: Sequence[int]
    old_logprobs: np.ndarray  # float32 [completion tokens]
    advantage: float


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of some lines; n is the number of their completion tokens together.

    `positions` points into the flattened [lines * width] hidden states: the state that predicts a token.
    Nothing is predicted from a completion's last token, so it does not go in.
    """

    input_ids: Tensor  # int64 [lines, width], padded on the right
    position_ids: Tensor  # int64 [lines, width]
    visible: Tensor | None  # bool [lines, 1, width, width]: query sees key; None: plain causal
    positions: Tensor  # int64 [n]
    targets: Tensor  # int64 [n]
    old_logprobs: Tensor  # float32 [n]
    advantages: Tensor  # float32 [n]
    rows: Sequence[TrainRow]  # whose completion tokens these are, in order

    @property
    def tokens(self) -> int:
        """Completion tokens."""
        return self.targets.numel()


def pack(
    groups: Sequence[Sequence[TrainRow]], *, max_tokens: int, shared_width: int = SHARED_WIDTH
) -> list[MicroBatch]:
    """Cut groups into micro-batches; every row is in exactly one, and the order is deterministic.

    Args:
        groups: rows of one group have the same prompt.
        max_tokens: padded tokens per micro-batch; a longer line gets a micro-batch of its own.
        shared_width: a line takes several completions only up to this width; 0: one completion per line.
    """
    lines = [line for group in groups for line in _lines(group, shared_width)]
    batches: list[MicroBatch] = []
    # Apart, so that no wide line gets a mask because of a narrow one beside it.
    for kind in ([line for line in lines if len(line) == 1], [line for line in lines if len(line) > 1]):
        kind.sort(key=_width, reverse=True)
        start = 0
        while start < len(kind):
            count = max(1, max_tokens // _width(kind[start]))
            batches.append(_micro_batch(kind[start : start + count]))
            start += count
    return batches


def _width(line: Sequence[TrainRow]) -> int:
    return len(line[0].prompt_tokens) + sum(len(row.completion_tokens) - 1 for row in line)


def _lines(group: Sequence[TrainRow], shared_width: int) -> list[list[TrainRow]]:
    lines: list[list[TrainRow]] = []
    for row in group:
        if lines and _width([*lines[-1], row]) <= shared_width:
            lines[-1].append(row)
        else:
            lines.append([row])
    return lines


def _micro_batch(lines: Sequence[Sequence[TrainRow]]) -> MicroBatch:
    width = max(map(_width, lines))
    shape = (len(lines), width)
    input_ids, position_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    segments = np.full(shape, _PADDING, np.int64)
    positions: list[np.ndarray] = []
    for number, line in enumerate(lines):
        prompt = line[0].prompt_tokens
        end = len(prompt)
        input_ids[number, :end] = prompt
        position_ids[number, :end] = np.arange(end)
        segments[number, :end] = 0
        for segment, row in enumerate(line, start=1):
            start, end = end, end + len(row.completion_tokens) - 1
            input_ids[number, start:end] = row.completion_tokens[:-1]
            position_ids[number, start:end] = np.arange(len(prompt), len(prompt) + end - start)
            segments[number, start:end] = segment
            # The first token is predicted by the prompt's last state, whichever line position follows it.
            within = np.concatenate([[len(prompt) - 1], np.arange(start, end)])
            positions.append(number * width + within)
    rows = [row for line in lines for row in line]
    lengths = [len(row.completion_tokens) for row in rows]
    old_logprobs = np.concatenate([row.old_logprobs for row in rows], dtype=np.float32)
    advantages = np.repeat(np.array([row.advantage for row in rows], np.float32), lengths)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        visible=_visible(torch.from_numpy(segments)) if any(len(line) > 1 for line in lines) else None,
        positions=torch.from_numpy(np.concatenate(positions, dtype=np.int64)),
        targets=torch.tensor([token for row in rows for token in row.completion_tokens]),
        old_logprobs=torch.from_numpy(old_logprobs),
        advantages=torch.from_numpy(advantages),
        rows=rows,
    )


def _visible(segments: Tensor) -> Tensor:
    """Which key each query sees: nothing later, and of what is earlier the prompt and its own segment."""
    width = segments.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    query, key = segments[:, :, None], segments[:, None, :]
    return (causal & ((key == 0) | (key == query)))[:, None]
