"""Advantages: how much better a sample did than the other samples of its prompt.

Group-relative advantage (GRPO, DeepSeekMath, arXiv 2402.03300, section 4.1.2): for the rewards R of one
group (the samples of one prompt in one unit)

    A_i = (R_i - mean(R)) / (std(R) + eps)

with the population standard deviation (divide by n) and eps = 1e-4 by configuration.

The online filter (INTELLECT-2, arXiv 2505.07291, section 3.3) asks whether a group teaches anything: its
**task** rewards differ. A length term in R would make nearly every group differ, so it is left out there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Rewards are float32 on the wire; a difference below this is rounding, not signal.
_SAME_REWARD = 1e-6


def group_advantages(rewards: Sequence[float], *, eps: float) -> np.ndarray:
    """Advantages of the samples of one group.

    Args:
        rewards: [samples] total rewards R.
        eps: added to the standard deviation.

    Returns:
        [samples] float32; all zero where the rewards are equal.
    """
    values = np.asarray(rewards, dtype=np.float64)
    centred = values - values.mean()
    return np.asarray(centred / (values.std() + eps), dtype=np.float32)


def has_signal(task_rewards: Sequence[float]) -> bool:
    """Whether the task rewards of a group differ, so that it passes the online filter."""
    return max(task_rewards) - min(task_rewards) > _SAME_REWARD
