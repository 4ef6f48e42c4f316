"""Batched generation inside the trainer: held-out evaluation (greedy) and the warm-up's pass rate (sampled).

Not the swarm's sampler: nothing generated here is a rollout, so no seeds and no commitments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop_ids: Sequence[int],
    batch_size: int = 256,
    sampler: torch.Generator | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Continue every prompt: greedily, or with samples at temperature 1 where a `sampler` is given.

    Args:
        stop_ids: a row ends with (and keeps) the first of these.
        batch_size: rows decoded together.
        check: called before every forward pass; may raise to stop early.

    Returns:
        Completion token ids per prompt, at most `max_tokens` each.
    """
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    completions: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), batch_size):
        picked = order[start : start + batch_size]
        rows = _generate_batch(
            model, [prompts[index] for index in picked], max_tokens, set(stop_ids), sampler, check
        )
        for index, row in zip(picked, rows, strict=True):
            completions[index] = row
    return completions


@torch.no_grad()
def _generate_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    stop_ids: set[int],
    sampler: torch.Generator | None,
    check: Callable[[], None],
) -> list[list[int]]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width + max_tokens, dtype=torch.long)
    for line, prompt in enumerate(prompts):
        ids[line, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[line, width - len(prompt) :] = 1
    positions = (mask[:, :width].cumsum(dim=1) - 1).clamp(min=0)
    rows: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    # transformers renamed the argument and the answer's field in 5.24.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache: Any = None
    for step in range(max_tokens):
        check()
        answer = model(
            input_ids=ids,
            attention_mask=mask[:, : width + step],
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{name: cache},
        )
        cache = answer[name]
        tokens = _choose(answer.logits[:, -1].float(), sampler)
        for line in list(open_rows):
            token = int(tokens[line])
            rows[line].append(token)
            if token in stop_ids:
                open_rows.discard(line)
        if not open_rows:
            break
        ids = tokens[:, None]
        positions = positions[:, -1:] + 1
    return rows


def _choose(logits: Tensor, sampler: torch.Generator | None) -> Tensor:
    if sampler is None:
        return logits.argmax(dim=-1)
    return torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=sampler)[:, 0]
