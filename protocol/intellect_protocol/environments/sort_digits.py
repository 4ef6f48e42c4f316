"""Sort a string of digits: "sort:5391=" -> "1359". Small models learn it from characters."""

from __future__ import annotations

from ..errors import ConfigError
from .base import (
    Candidate,
    Draw,
    Params,
    Problem,
    SplitEnvironment,
    exact_reward,
    refuse_unknown,
    whole_number,
)


class SortDigits(SplitEnvironment):
    """Parameters: min_digits (4), max_digits (8)."""

    def __init__(self, params: Params) -> None:
        super().__init__("sort_digits")
        refuse_unknown(self.name, params, {"min_digits", "max_digits"})
        self._low = whole_number(params, "min_digits", 4, 1, 32)
        self._high = whole_number(params, "max_digits", 8, 1, 32)
        if self._low > self._high:
            raise ConfigError("environment sort_digits: min_digits exceeds max_digits")

    def candidate(self, draw: Draw) -> Candidate:
        length = self._low + draw.below(self._high - self._low + 1)
        digits = "".join(str(draw.below(10)) for _ in range(length))
        return Candidate(f"sort:{digits}=", "".join(sorted(digits)))

    def reward(self, problem: Problem, completion: str, finished: bool) -> float:
        return exact_reward(problem, completion, finished)
