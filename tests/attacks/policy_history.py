"""A policy's versions by real training steps: what a node that did not update would still run."""

from __future__ import annotations

import shutil
from pathlib import Path

from arena import Arena
from safetensors.torch import save_file

from intellect_node.rollout import UnitBuilder
from intellect_protocol.checkpoint import is_checkpoint_file
from intellect_protocol.rollouts import RolloutUnit
from intellect_trainer.advantage import group_advantages
from intellect_trainer.config import TrainerConfig
from intellect_trainer.learner import Learner
from intellect_trainer.packing import TrainRow
from intellect_trainer.policy import load_policy

# The recipe of the tiny model, without its slow start.
CONFIG = TrainerConfig(
    recipe="tiny",
    updates_per_step=2,
    learning_rate=5e-4,
    warmup_updates=0,
    max_grad_norm=0.1,
    dtype="float32",
    dither_master=False,
)


def train_policy(arena: Arena, out: Path, steps: int) -> list[Path]:
    """Checkpoints of versions 0 to `steps`: one GRPO step each, on a unit of the version before."""
    policy = load_policy(arena.folder, dtype="float32", attention="eager")
    reference = load_policy(arena.folder, dtype="float32", attention="eager")
    learner = Learner(policy, reference, CONFIG, temperature=arena.run.terms.sampling.temperature)
    folders = [arena.folder]
    for version in range(1, steps + 1):
        arena.engine.update(folders[-1])
        unit = arena.build(UnitBuilder, index=100 + version)
        learner.step(_groups(unit), version=version)
        folder = out / f"v{version}"
        folder.mkdir()
        for path in arena.folder.iterdir():
            if is_checkpoint_file(path.name) and path.suffix != ".safetensors":
                shutil.copyfile(path, folder / path.name)
        weights = {name: p.detach().clone() for name, p in policy.named_parameters()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        folders.append(folder)
    arena.engine.update(arena.folder)
    return folders


def _groups(unit: RolloutUnit) -> list[list[TrainRow]]:
    groups: dict[int, list[TrainRow]] = {}
    for prompt in dict.fromkeys(row.prompt for row in unit.rows):
        rows = [row for row in unit.rows if row.prompt == prompt]
        advantages = group_advantages([row.reward for row in rows], eps=CONFIG.advantage_epsilon)
        groups[prompt] = [
            TrainRow(row.prompt_tokens, row.completion_tokens, row.logprobs, float(advantage))
            for row, advantage in zip(rows, advantages, strict=True)
        ]
    return list(groups.values())


def at_version(arena: Arena, folder: Path) -> Arena:
    """The arena with another version as its policy; shares the engine, which now holds that version."""
    arena.engine.update(folder)
    return Arena(arena.run, folder, arena.engine, arena.tasks)
