"""Held-out evaluation: greedy pass@1 on tasks that are never trained on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from intellect_protocol.environments import registry
from intellect_protocol.environments.base import Environment, Problem
from intellect_protocol.environments.prompts import Prompts
from intellect_protocol.run import RunConfig

from .generation import generate

# Environments give 1 for a right and properly ended answer and less for anything else.
_PASSED = 1.0


class Evaluator:
    """Held-out tasks of a run's environments.

    Args:
        tasks: (environment, problem) pairs.
        prompts: the checkpoint's tokenizer.
    """

    def __init__(
        self,
        tasks: list[tuple[Environment, Problem]],
        prompts: Prompts,
        *,
        max_tokens: int,
        stop_ids: list[int],
    ) -> None:
        self._tasks = tasks
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._encoded = [prompts.encode(problem) for _, problem in tasks]

    @property
    def tasks(self) -> int:
        """How many tasks there are."""
        return len(self._tasks)

    def score(self, model: nn.Module, check: Callable[[], None] = lambda: None) -> float:
        """Share of the tasks that greedy decoding solves; `check` may raise to stop early."""
        completions = generate(
            model, self._encoded, max_tokens=self._max_tokens, stop_ids=self._stop_ids, check=check
        )
        passed = 0
        for (environment, problem), tokens in zip(self._tasks, completions, strict=True):
            finished = tokens[-1] in self._stop_ids
            passed += environment.reward(problem, self._prompts.decode(tokens), finished) >= _PASSED
        return passed / len(self._tasks)


def open_evaluator(run: RunConfig, folder: Path, *, count: int) -> Evaluator:
    """The evaluator of a run: `count` tasks, the same number from each environment.

    Args:
        folder: a checkpoint of the run, for its tokenizer.

    Raises:
        ConfigError: an environment or the tokenizer cannot be used.
    """
    terms = run.terms
    share = max(1, count // len(terms.environments))
    environments = [registry.make(entry.name, dict(entry.params)) for entry in terms.environments]
    return Evaluator(
        [(environment, problem) for environment in environments for problem in environment.heldout(share)],
        Prompts(folder, chat=terms.model.chat),
        max_tokens=terms.sampling.max_tokens,
        stop_ids=terms.sampling.stop_ids,
    )
