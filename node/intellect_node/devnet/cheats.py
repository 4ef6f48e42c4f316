"""Dishonest nodes: the daemon of `join` with exactly one part of its unit builder replaced.

Each class is one attack that pays if nobody checks. They exist to be caught, live with the devnet,
and are started only by `cheat_node`; `join` has no way to reach them.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import trio

from intellect_protocol.assignment import PromptSlot
from intellect_protocol.engines.base import Completion

from ..rollout import Group, Policy, UnitBuilder
from .kinds import CHEAT_KINDS

_BEST_OF = 4


class WrongModel(UnitBuilder):
    """Runs half of the policy's layers: cheaper, and another model."""

    async def adopt(self, policy: Policy) -> None:
        cheap = policy.folder.with_name(f"{policy.folder.name}-half")
        await trio.to_thread.run_sync(halve_layers, policy.folder, cheap)
        await self.engine.update(cheap)
        await trio.to_thread.run_sync(shutil.rmtree, cheap)


class EditedTokens(UnitBuilder):
    """Writes the tokens of a right answer over wrong ones."""

    async def complete(self, groups: Sequence[Group]) -> list[list[Completion]]:
        units = await super().complete(groups)
        return [self._edited(group, samples) for group, samples in zip(groups, units, strict=True)]

    def _edited(self, group: Group, samples: list[Completion]) -> list[Completion]:
        rewards = [self.tasks.reward(group.slot, sample.tokens) for sample in samples]
        best = samples[max(range(len(samples)), key=rewards.__getitem__)]
        return [
            sample
            if reward == max(rewards)
            else msgspec.structs.replace(
                sample, tokens=best.tokens, logprobs=best.logprobs, finish_reason=best.finish_reason
            )
            for sample, reward in zip(samples, rewards, strict=True)
        ]


class ForgedReward(UnitBuilder):
    """Declares every answer right."""

    def reward(self, slot: PromptSlot, completion: Completion) -> float:
        return 1.0


class BestOfN(UnitBuilder):
    """Draws several honest completions per sample and ships the best; every proof is real."""

    async def complete(self, groups: Sequence[Group]) -> list[list[Completion]]:
        wider = [
            msgspec.structs.replace(
                group, seeds=[secrets.token_bytes(32) for _ in range(_BEST_OF * len(group.seeds))]
            )
            for group in groups
        ]
        drawn = await super().complete(wider)
        return [self._best(group, samples) for group, samples in zip(groups, drawn, strict=True)]

    def _best(self, group: Group, samples: Sequence[Completion]) -> list[Completion]:
        return [
            max(samples[start :: len(group.seeds)], key=lambda c: self.tasks.reward(group.slot, c.tokens))
            for start in range(len(group.seeds))
        ]


class ConstantProof(UnitBuilder):
    """Commits to a constant: top entries of real states share few exponents, so it looks plausible."""

    def proofs(self, completion: Completion) -> list[bytes]:
        # Modulus 65497; the constant 3.0 in bf16; 127 zero coefficients.
        constant = (65497).to_bytes(2, "big") + b"\x40\x40" + bytes(2 * 127)
        return [constant for _ in completion.proofs]


class ReplayedProof(UnitBuilder):
    """Ships the commitments of the first completion it ever made with all others."""

    _kept: list[bytes] | None = None

    def proofs(self, completion: Completion) -> list[bytes]:
        if self._kept is None:
            self._kept = completion.proofs
        return [self._kept[i % len(self._kept)] for i in range(len(completion.proofs))]


CHEATS: dict[str, type[UnitBuilder]] = dict(
    zip(
        CHEAT_KINDS,
        (WrongModel, EditedTokens, ForgedReward, BestOfN, ConstantProof, ReplayedProof),
        strict=True,
    )
)


def halve_layers(folder: Path, out: Path) -> None:
    """Copy a checkpoint with the upper half of its layers adding nothing to the residual stream."""
    import json

    from safetensors.torch import load_file, save_file

    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder, out)
    layers = int(json.loads((folder / "config.json").read_text())["num_hidden_layers"])
    for path in out.glob("*.safetensors"):
        tensors = load_file(path)
        for layer in range(layers // 2, layers):
            for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                for key in (key for key in tensors if key.endswith(f"layers.{layer}.{name}")):
                    tensors[key].zero_()
        save_file(tensors, path)
