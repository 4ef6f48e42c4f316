"""Spell a word backward: "reverse:house=" -> "esuoh".

The words are reasoning-gym's list (Apache-2.0), read from the installed package without importing
it. The list is part of what peers must share, so its hash is fixed here.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

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

_WORDS_FILE = "data/words3to10.txt"
_WORDS_SHA256 = "834c0c0748d16484cd646aaff67a1a6af25d5b0f52de0d0e7262c785086fcef2"


@cache
def _words(low: int, high: int) -> tuple[str, ...]:
    spec = find_spec("reasoning_gym")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("environment spell_backward needs the package reasoning-gym")
    path = Path(spec.submodule_search_locations[0]) / _WORDS_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    if hashlib.sha256(content).hexdigest() != _WORDS_SHA256:
        raise ConfigError(
            "environment spell_backward: reasoning-gym's word list is not the one of this version"
        )
    words = (word.strip() for word in content.decode().splitlines())
    return tuple(w for w in words if low <= len(w) <= high and w.isascii() and w.isalpha() and w.islower())


class SpellBackward(SplitEnvironment):
    """Parameters: min_letters (3), max_letters (7)."""

    def __init__(self, params: Params) -> None:
        super().__init__("spell_backward")
        refuse_unknown(self.name, params, {"min_letters", "max_letters"})
        low = whole_number(params, "min_letters", 3, 3, 10)
        high = whole_number(params, "max_letters", 7, 3, 10)
        self._words = _words(low, high)
        if not self._words:
            raise ConfigError("environment spell_backward: no word has that many letters")

    def candidate(self, draw: Draw) -> Candidate:
        word = self._words[draw.below(len(self._words))]
        return Candidate(f"reverse:{word}=", word[::-1])

    def reward(self, problem: Problem, completion: str, finished: bool) -> float:
        return exact_reward(problem, completion, finished)
