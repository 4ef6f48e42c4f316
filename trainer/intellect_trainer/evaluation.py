"""Held-out evaluation: greedy pass@1 on tasks that are never trained on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from intellect_protocol.run import RunConfig
from torch import nn

from .generation import generate


class Evaluator:
    def __init__(self) -> None:
        self.tasks = 0

    def score(self, model: nn.Module, check: Callable[[], None]) -> float:
        raise NotImplementedError


def open_evaluator(run: RunConfig, folder: Path, *, count: int) -> Evaluator:
    raise NotImplementedError
