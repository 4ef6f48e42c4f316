"""A run's prompts and rewards in token ids: what node and validator must compute alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..assignment import PromptSlot
from ..errors import ConfigError
from ..run import RunTerms
from ..wire import sha256
from .base import Problem
from .prompts import Prompts
from .registry import make


class RunTasks:
    """The environments of a run with the tokenizer of its checkpoints; see `validation.context.Tasks`."""

    def __init__(self, terms: RunTerms, prompts: Prompts) -> None:
        """
        Raises:
            ConfigError: an environment that does not exist here, or a parameter it does not know.
        """
        self._environments = {each.name: make(each.name, each.params) for each in terms.environments}
        self._prompts = prompts
        self._stop_ids = frozenset(terms.sampling.stop_ids)
        self._last: tuple[PromptSlot, Problem] | None = None  # the samples of a prompt come together

    def prompt_tokens(self, slot: PromptSlot) -> list[int]:
        """The prompt that a slot stands for."""
        return self._prompts.encode(self._problem(slot))

    def reward(self, slot: PromptSlot, completion: Sequence[int]) -> float:
        """Task reward of a completion (token ids, the stop token included where there is one)."""
        finished = bool(completion) and completion[-1] in self._stop_ids
        text = self._prompts.decode(completion)
        return self._environments[slot.environment].reward(self._problem(slot), text, finished)

    def _problem(self, slot: PromptSlot) -> Problem:
        last = self._last
        if last is not None and last[0] == slot:
            return last[1]
        problem = self._environments[slot.environment].problem(slot.task_index)
        if slot.target_length:
            problem = msgspec.structs.replace(problem, target_length=slot.target_length)
        self._last = slot, problem
        return problem


def load_tasks(terms: RunTerms, checkpoint_dir: Path) -> RunTasks:
    """The tasks of a run with the tokenizer in a checkpoint folder, which must be the run's.

    Raises:
        ConfigError: the tokenizer is missing, malformed or not the one that the terms name.
    """
    prompts = Prompts(checkpoint_dir, chat=terms.model.chat)
    found = sha256((checkpoint_dir / "tokenizer.json").read_bytes()).hex()
    wanted = terms.model.tokenizer_hash
    if found != wanted:
        raise ConfigError(f"{checkpoint_dir}: tokenizer.json is {found[:16]}, the run's is {wanted[:16]}")
    return RunTasks(terms, prompts)
