"""How sure a count of events among trials makes one of their rate."""

from __future__ import annotations

import math

CONFIDENCE = 0.95


def upper_bound(events: int, trials: int, confidence: float = CONFIDENCE) -> float:
    """Clopper-Pearson upper confidence bound of a rate (Biometrika 26, 1934): exact for independent trials.

    With no event it is 1 - (1 - confidence) ** (1 / trials), about 3 / trials.

    Raises:
        ValueError: not 0 <= events <= trials.
    """
    if not 0 <= events <= trials:
        raise ValueError(f"{events} events in {trials} trials")
    if events == trials:
        return 1.0
    low, high = events / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _at_most(events, trials, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def _at_most(events: int, trials: int, rate: float) -> float:
    """Chance of at most `events` events, each trial having one at `rate` in (0, 1)."""
    logs = [
        math.lgamma(trials + 1)
        - math.lgamma(count + 1)
        - math.lgamma(trials - count + 1)
        + count * math.log(rate)
        + (trials - count) * math.log1p(-rate)
        for count in range(events + 1)
    ]
    return math.fsum(map(math.exp, logs))
