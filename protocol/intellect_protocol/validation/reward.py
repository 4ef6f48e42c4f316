"""Check 9: the reward of each row, recomputed from its tokens by the environment."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..assignment import PromptSlot
from ..rollouts import Rollout
from .context import Tasks
from .findings import Check, Finding, Kind

TOLERANCE = 1e-6
"""Rewards travel as float32 of values of order one."""


def recompute_rewards(
    rows: Sequence[Rollout], slots: Sequence[PromptSlot], samples_per_prompt: int, tasks: Tasks
) -> list[float]:
    """Task rewards [rows]; row i belongs to slot i div samples.

    Raises:
        ValueError: an environment gave a reward that is not finite.
    """
    rewards = [
        tasks.reward(slots[number // samples_per_prompt], row.completion_tokens)
        for number, row in enumerate(rows)
    ]
    if not all(map(math.isfinite, rewards)):
        raise ValueError("an environment gave a reward that is not finite")
    return rewards


def check_rewards(rows: Sequence[Rollout], rewards: Sequence[float]) -> list[Finding]:
    """Declared rewards against the recomputed ones."""
    findings = []
    for number, (row, reward) in enumerate(zip(rows, rewards, strict=True)):
        difference = abs(row.reward - float(np.float32(reward)))
        if not difference <= TOLERANCE:
            text = f"row {number}: reward declared {row.reward:.6g}, recomputed {reward:.6g}"
            findings.append(Finding(Check.REWARD, "reward", Kind.FRAUD, text, number, difference, TOLERANCE))
    return findings
