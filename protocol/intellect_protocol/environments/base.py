"""What an environment is, and how its problems follow from an index.

A small task repeats its questions, and generators seeded with neighbouring numbers repeat each
other's, so train and held-out cannot be told apart by seed: they are told apart by the question. A
question is held out if the first byte of SHA-256(question in UTF-8) is below the environment's
`heldout_below` (26 of 256, a tenth, unless the task is small).

The train problem of index i (any u64) is the first of these candidates that is not held out:

    candidate k of index i = made from Draw(SHA-256("intellect/problem/1" | name | u64 i | u32 k))

and the held-out set is made, in order and without repetition, of those candidates

    candidate j = made from Draw(SHA-256("intellect/heldout/1" | name | u64 j))

that are held out. `name` stands behind its length in one byte; integers are little-endian.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Protocol

import msgspec

from ..errors import ConfigError
from ..wire import sha256, short, u32, u64

HELDOUT_BELOW = 26
MAX_CANDIDATES = 10_000
MAX_COMPLETION_CHARACTERS = 1 << 20
_DRAW_WORDS = 64

Params = dict[str, int | float | str | bool]


class Problem(msgspec.Struct, frozen=True):
    """One task instance."""

    environment: str
    index: int  # of the train split, or place in the held-out set
    question: str
    answer: str
    target_length: int | None = None  # tokens asked for; set by whoever assigns the problem
    metadata: dict[str, int | float | str | bool] = {}


class Environment(Protocol):
    """A task with a train split that any u64 indexes, a held-out set and a reward."""

    @property
    def name(self) -> str:
        """As in the run configuration."""
        ...

    def problem(self, index: int) -> Problem:
        """The train problem of a u64 index; the same on every machine."""
        ...

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` problems that training never sees; fewer where there are not so many."""
        ...

    def reward(self, problem: Problem, completion: str, finished: bool) -> float:
        """Task reward in [0, 1] of a completion's text.

        Args:
            finished: whether the policy ended the completion (and was not cut off).
        """
        ...


class Draw:
    """Numbers from a 32-byte seed: word i is the little-endian u64 at 8 i of SHAKE-256(seed)."""

    def __init__(self, seed: bytes) -> None:
        self._stream = hashlib.shake_256(seed).digest(8 * _DRAW_WORDS)
        self._place = 0

    def below(self, bound: int) -> int:
        """The next word modulo `bound` (1 to 2**32; the bias is below 2**-32)."""
        word = int.from_bytes(self._stream[self._place : self._place + 8], "little")
        if self._place >= len(self._stream):
            raise ValueError(f"a problem draws at most {_DRAW_WORDS} numbers")
        self._place += 8
        return word % bound


class Candidate(msgspec.Struct, frozen=True):
    """What a task makes from a draw, before the split has its say."""

    question: str
    answer: str
    metadata: dict[str, int | float | str | bool] = {}


class SplitEnvironment(ABC):
    """An `Environment` from a function of draws."""

    heldout_below = HELDOUT_BELOW

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    @abstractmethod
    def candidate(self, draw: Draw) -> Candidate:
        """A question and its answer."""

    @abstractmethod
    def reward(self, problem: Problem, completion: str, finished: bool) -> float:
        """See `Environment.reward`."""

    def is_heldout(self, question: str) -> bool:
        """Whether training never sees this question."""
        return hashlib.sha256(question.encode()).digest()[0] < self.heldout_below

    def problem(self, index: int) -> Problem:
        """See `Environment.problem`.

        Raises:
            ValueError: not a u64.
            ConfigError: the task's parameters leave nothing to train on.
        """
        if not 0 <= index < 1 << 64:
            raise ValueError("a task index is a u64")
        prefix = b"intellect/problem/1" + short(self._name.encode()) + u64(index)
        for attempt in range(MAX_CANDIDATES):
            candidate = self.candidate(Draw(sha256(prefix, u32(attempt))))
            if not self.is_heldout(candidate.question):
                return self._problem(index, candidate)
        raise ConfigError(f"environment {self._name}: every question is held out")

    def heldout(self, count: int) -> list[Problem]:
        """See `Environment.heldout`."""
        prefix = b"intellect/heldout/1" + short(self._name.encode())
        found: dict[str, Candidate] = {}
        since_last = 0
        number = 0
        while len(found) < count and since_last < MAX_CANDIDATES:
            candidate = self.candidate(Draw(sha256(prefix, u64(number))))
            number += 1
            since_last += 1
            if self.is_heldout(candidate.question) and candidate.question not in found:
                found[candidate.question] = candidate
                since_last = 0
        return [self._problem(place, candidate) for place, candidate in enumerate(found.values())]

    def _problem(self, index: int, candidate: Candidate) -> Problem:
        return Problem(
            environment=self._name,
            index=index,
            question=candidate.question,
            answer=candidate.answer,
            metadata=candidate.metadata,
        )


def exact_reward(problem: Problem, completion: str, finished: bool) -> float:
    """1 if the completion, but for surrounding white space, is the answer and was ended; else 0."""
    return float(finished and completion.strip() == problem.answer)


def whole_number(params: Params, key: str, default: int, low: int, high: int) -> int:
    """An integer parameter.

    Raises:
        ConfigError: not an integer from `low` to `high`.
    """
    value = params.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(
            f"environment parameter {key} must be an integer from {low} to {high}, not {value!r}"
        )
    return value


def refuse_unknown(name: str, params: Params, known: set[str]) -> None:
    """Raise ConfigError for a parameter that the environment does not have."""
    unknown = sorted(set(params) - known)
    if unknown:
        raise ConfigError(f"environment {name} has no parameter {unknown[0]!r}")
