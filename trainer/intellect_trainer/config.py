"""The trainer's configuration: defaults < recipe < file < environment < flags.

The defaults are INTELLECT-2's recipe (arXiv 2505.07291, section 3.5). A recipe is a named set of values
for a model that was seen to learn with them. What all peers of a run must share (temperature, async level,
...) is not here but in `run.toml`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from intellect_protocol.errors import ConfigError
from intellect_protocol.settings import Settings, load_settings


class TrainerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values of one operator's trainer."""

    recipe: str = "intellect-2"
    # The step
    groups_per_step: int = 256
    updates_per_step: int = 8
    fill_timeout_s: float = 0.0  # after this long without a full batch, train on what is there; 0: never
    min_groups: int = 1  # fewest groups to train on after fill_timeout_s
    republish_after_s: float = 1800.0  # without any new unit, the same weights as a new version; 0: never
    # Loss
    clip_epsilon: float = 0.2
    clip_delta: float = 4.0
    kl_coefficient: float = 0.001
    entropy_coefficient: float = 1e-4
    advantage_epsilon: float = 1e-4
    # Optimizer
    learning_rate: float = 3e-7
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.01
    warmup_updates: int = 25
    max_grad_norm: float = 0.1
    # Compute
    dtype: str = "bfloat16"  # of the forward and backward pass; master weights are float32
    dither_master: bool = True  # see `master_weights`
    attention: str = "eager"
    micro_batch_tokens: int = 4096  # padded tokens
    threads: int = 1
    seed: int = 0
    # Evaluation and files
    eval_every: int = 10  # versions; 0: only the first and the last
    eval_tasks: int = 200
    keep_checkpoints: int = 8
    poll_interval_s: float = 0.05

    def check(self) -> None:
        """Check values against each other.

        Raises:
            ConfigError: a value is out of range.
        """
        for name in ("advantage_epsilon", "learning_rate", "max_grad_norm", "poll_interval_s"):
            _require(_finite(self, name) and getattr(self, name) > 0, f"{name} must be positive")
        for name in (
            "kl_coefficient", "entropy_coefficient", "weight_decay", "fill_timeout_s", "republish_after_s",
        ):  # fmt: skip
            _require(_finite(self, name) and getattr(self, name) >= 0, f"{name} must not be negative")
        for name in ("groups_per_step", "updates_per_step", "min_groups", "micro_batch_tokens", "threads"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1")
        for name in ("warmup_updates", "eval_every", "eval_tasks"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative")
        _require(0 < self.clip_epsilon < 1, "clip_epsilon must lie between 0 and 1")
        _require(
            1 + self.clip_epsilon <= self.clip_delta <= 1e6,
            "clip_delta must lie between 1 + clip_epsilon and 1e6",
        )
        _require(0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, "beta1 and beta2 must lie in [0, 1)")
        _require(
            self.updates_per_step <= self.groups_per_step, "updates_per_step is larger than groups_per_step"
        )
        _require(self.min_groups <= self.groups_per_step, "min_groups is larger than groups_per_step")
        _require(self.dtype in ("float32", "bfloat16"), "dtype must be float32 or bfloat16")
        _require(self.attention in ("eager", "sdpa"), "attention must be eager or sdpa")
        _require(self.keep_checkpoints >= 2, "keep_checkpoints must be at least 2")
        _require(0 <= self.seed < 1 << 63, "seed is out of range")


def _finite(config: TrainerConfig, name: str) -> bool:
    return math.isfinite(getattr(config, name))


def _require(ok: bool, text: str) -> None:
    if not ok:
        raise ConfigError(f"trainer configuration: {text}")


RECIPES: dict[str, dict[str, Any]] = {
    "intellect-2": {},
    # The small decoder of models/tiny.py, on sorting or spelling.
    "tiny": {
        "groups_per_step": 64, "updates_per_step": 2, "learning_rate": 5e-4, "warmup_updates": 0,
        "dtype": "float32", "attention": "sdpa", "micro_batch_tokens": 8192,
        "eval_every": 5, "fill_timeout_s": 20.0, "min_groups": 8, "republish_after_s": 60.0,
    },
    # SmolLM2-135M-Instruct on one-digit sums.
    "smollm2": {
        "groups_per_step": 16, "updates_per_step": 1, "learning_rate": 1e-5, "beta2": 0.95,
        "warmup_updates": 5, "micro_batch_tokens": 1024,
        "eval_every": 5, "eval_tasks": 64, "fill_timeout_s": 60.0, "min_groups": 4,
        "republish_after_s": 180.0,
    },
}  # fmt: skip


def resolve_config(
    *, file: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]
) -> Settings[TrainerConfig]:
    """Put the layers on top of each other; the recipe may be named in any of them.

    Raises:
        ConfigError: an unknown key or recipe, or a value of the wrong type or out of range.
    """
    given = load_settings(TrainerConfig, role="trainer", file=file, environ=environ, flags=flags)
    recipe = given.value.recipe
    if recipe not in RECIPES:
        raise ConfigError(f"unknown recipe {recipe!r}: choose one of {', '.join(RECIPES)}")
    values = {key: value for key, value in RECIPES[recipe].items() if given.origins[key] == "default"}
    config = msgspec.structs.replace(given.value, **values)
    config.check()
    return Settings(config, given.origins | dict.fromkeys(values, f"recipe {recipe}"))
