"""Sums and differences of two one-digit numbers, asked in words: "What is 4 + 3?".

A small instruction-tuned model can be taught this in minutes. There are 200 questions, so a fifth
of them is held out instead of a tenth.
"""

from __future__ import annotations

import re

from ..errors import ConfigError
from .base import (
    MAX_COMPLETION_CHARACTERS,
    Candidate,
    Draw,
    Params,
    Problem,
    SplitEnvironment,
    refuse_unknown,
    whole_number,
)

# The last number of "4 + 3 = 7." is 7, of "4-3" it is 3, of "it is -2" it is -2, of "7.5" it is 7.5.
_NUMBER = re.compile(r"(?<![\d.])-?\d+(?:\.\d+)?|\d+(?:\.\d+)?", re.ASCII)
_OPERATORS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


class Arithmetic(SplitEnvironment):
    """Parameters: operators ("+-", of + - *), max_term (9)."""

    heldout_below = 52

    def __init__(self, params: Params) -> None:
        super().__init__("arithmetic")
        refuse_unknown(self.name, params, {"operators", "max_term"})
        operators = params.get("operators", "+-")
        if not isinstance(operators, str) or not operators or not set(operators) <= set(_OPERATORS):
            raise ConfigError(f"environment arithmetic: operators must be some of + - *, not {operators!r}")
        self._operators = operators
        self._max_term = whole_number(params, "max_term", 9, 1, 1_000_000)

    def candidate(self, draw: Draw) -> Candidate:
        left, right = draw.below(self._max_term + 1), draw.below(self._max_term + 1)
        operator = self._operators[draw.below(len(self._operators))]
        return Candidate(f"What is {left} {operator} {right}?", str(_OPERATORS[operator](left, right)))

    def reward(self, problem: Problem, completion: str, finished: bool) -> float:
        """1 if the last number is the answer and the turn was ended, 0.5 if it was not ended, else 0.

        The half is what teaches a model to stop: right answers that ramble on outnumber clean ones
        at first.
        """
        numbers = _NUMBER.findall(completion[-MAX_COMPLETION_CHARACTERS:])
        if not numbers or numbers[-1] != problem.answer:
            return 0.0
        return 1.0 if finished else 0.5
