"""Environments by name."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import ConfigError
from . import reasoning_gym_task
from .arithmetic import Arithmetic
from .base import Environment, Params
from .sort_digits import SortDigits
from .spell_backward import SpellBackward

_ENVIRONMENTS: dict[str, Callable[[Params], Environment]] = {
    "arithmetic": Arithmetic,
    "sort_digits": SortDigits,
    "spell_backward": SpellBackward,
}


def names() -> list[str]:
    """The environments of this project; `reasoning_gym:<task>` comes on top."""
    return sorted(_ENVIRONMENTS)


def make(name: str, params: Params | None = None) -> Environment:
    """The environment `name` of a run configuration.

    Raises:
        ConfigError: no such environment, or a parameter that makes no sense to it.
    """
    if name.startswith(reasoning_gym_task.PREFIX):
        return reasoning_gym_task.ReasoningGymTask(name, params or {})
    if name not in _ENVIRONMENTS:
        raise ConfigError(f"no environment {name!r}; there are {', '.join(names())} and reasoning_gym:<task>")
    return _ENVIRONMENTS[name](params or {})
