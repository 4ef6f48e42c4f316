"""Checkpoints as a cheat would run them: quantised, truncated, or some optimizer steps old.

An altered checkpoint is a folder like any other, with the same tensors in the same dtype, so that the same
engine generates with it. Quantised weights are rounded to the grid and back ("fake quantisation"), which
gives the products of weight-only quantisation; kernels that also quantise activations are farther off.

Embeddings, the LM head, norms and biases stay as they are, as in the quantisers in use (bitsandbytes
`LLM.int8`, GPTQ, llm-compressor's FP8): what is left untouched makes the cheat harder to see.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from intellect_protocol.engines.weights import read_json, weight_files
from intellect_protocol.errors import ConfigError, UsageError

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_LAYER_COUNTS = ("num_hidden_layers", "n_layer")
_NOT_QUANTISED = ("embed", "lm_head", "wte", "wpe")
_INT4_GROUP = 128
_MOMENTUM = 0.9
_E4M3_MAX = 448.0

Alter = Callable[[str, "torch.Tensor"], "torch.Tensor | None"]
"""(tensor name, tensor) -> what stands in its place, or None where it is left out."""


class Kind(StrEnum):
    """What is done to the weights."""

    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
    DROPPED_LAYER = "dropped_layer"
    OLDER = "older"


class Alteration(msgspec.Struct, frozen=True):
    """One alteration.

    Attributes:
        steps: optimizer steps that the altered weights lag behind; only for OLDER.
        learning_rate: root mean square of one step's change of a weight; only for OLDER. Adam's steps have
            about this size, whatever the gradient.
        seed: chooses the direction of those steps.
    """

    kind: Kind
    steps: int = 0
    learning_rate: float = 1e-5
    seed: int = 0

    @property
    def name(self) -> str:
        """The name in reports and files, e.g. "int4" or "older_8"."""
        return f"{self.kind.value}_{self.steps}" if self.kind is Kind.OLDER else self.kind.value


def int8_per_channel(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] rounded to 255 levels, symmetric, with one scale per output channel."""
    import torch

    wide = weight.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return ((wide / scale).round() * scale).to(weight.dtype)


def int4_groups(weight: torch.Tensor, group: int = _INT4_GROUP) -> torch.Tensor:
    """[out, in] rounded to 15 levels, symmetric, one scale per `group` inputs (the last may be shorter)."""
    import torch

    wide = weight.float()
    parts = []
    for part in wide.split(group, dim=-1):
        scale = (part.abs().amax(-1, keepdim=True) / 7).clamp(min=torch.finfo(torch.float32).tiny)
        parts.append((part / scale).round() * scale)
    return torch.cat(parts, dim=-1).to(weight.dtype)


def fp8_per_channel(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] rounded to FP8 E4M3 (OCP OFP8: 3 mantissa bits, largest 448), a scale per output channel."""
    import torch

    wide = weight.float()
    scale = (wide.abs().amax(-1, keepdim=True) / _E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return ((wide / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)


def steps_older(
    weight: torch.Tensor, steps: int, learning_rate: float, generator: torch.Generator
) -> torch.Tensor:
    """The weight as it may have been some Adam steps ago.

    Each step's direction is standard normal per weight and follows the one before with correlation 0.9 (the
    usual beta1). Weights in bf16 are the rounding of finer master weights, of which a small step moves only a
    few over an edge: they are rounded up or down with the chance that keeps the mean, which moves as many.
    """
    import torch

    change = torch.zeros(weight.shape, dtype=torch.float32)
    direction = torch.zeros(weight.shape, dtype=torch.float32)
    for step in range(steps):
        keep = _MOMENTUM if step else 0.0
        noise = torch.randn(weight.shape, generator=generator)
        direction.mul_(keep).add_(noise, alpha=(1 - keep * keep) ** 0.5)
        change.add_(direction, alpha=learning_rate)
    old = weight.float() - change
    if weight.dtype != torch.bfloat16:
        return old.to(weight.dtype)
    words = old.view(torch.int32) + torch.randint(
        0, 1 << 16, weight.shape, generator=generator, dtype=torch.int32
    )
    return (words & -(1 << 16)).view(torch.float32).to(torch.bfloat16)


def alter_checkpoint(source: Path, out: Path, alteration: Alteration) -> None:
    """Write the altered checkpoint to `out`, which appears whole or not at all.

    Memory: one weight file of `source` and one tensor in float32 at a time. The same arguments give the same
    bytes.

    Raises:
        UsageError: `out` exists, or `steps` or `learning_rate` is not positive where it counts.
        ConfigError: `source` is not a checkpoint folder, or has no layer to drop.
    """
    if out.exists():
        raise UsageError(f"{out} exists; nothing was changed")
    config = read_json(source / "config.json")
    files = weight_files(source)
    alter = _alter(alteration, config)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for path in files:
        _rewrite(path, partial / path.name, alter)
    for path in source.iterdir():
        # An index of shards may name tensors that are gone; the engine reads every file and needs none.
        if path.is_file() and path not in files and not path.name.endswith(".index.json"):
            shutil.copyfile(path, partial / path.name)
    (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    partial.rename(out)


def _rewrite(source: Path, out: Path, alter: Alter) -> None:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    try:
        with safe_open(source, framework="pt", device="cpu") as file:
            for name in sorted(file.keys()):
                altered = alter(name, file.get_tensor(name))
                if altered is not None:
                    tensors[name] = altered.contiguous()
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{source}: {error}") from error
    if tensors:
        save_file(tensors, out, metadata={"format": "pt"})


def _alter(alteration: Alteration, config: dict[str, Any]) -> Alter:
    """What the alteration does to each tensor; changes `config` where the model gets another shape."""
    match alteration.kind:
        case Kind.INT8:
            return _on_products(int8_per_channel)
        case Kind.INT4:
            return _on_products(int4_groups)
        case Kind.FP8:
            return _on_products(fp8_per_channel)
        case Kind.DROPPED_LAYER:
            return _without_last_layer(config)
        case Kind.OLDER:
            return _older(alteration)


def _on_products(quantise: Callable[[torch.Tensor], torch.Tensor]) -> Alter:
    def alter(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim != 2 or any(part in name for part in _NOT_QUANTISED):
            return tensor
        return quantise(tensor)

    return alter


def _without_last_layer(config: dict[str, Any]) -> Alter:
    names = [name for name in _LAYER_COUNTS if isinstance(config.get(name), int) and config[name] > 1]
    if not names:
        raise ConfigError("config.json: no count of at least two layers, so none can be dropped")
    last = config[names[0]] - 1
    for name in names:
        config[name] = last
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][:last]

    def alter(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        match = _LAYER.search(name)
        return None if match and int(match[1]) == last else tensor

    return alter


def _older(alteration: Alteration) -> Alter:
    import torch

    if alteration.steps < 1 or not alteration.learning_rate > 0:
        raise UsageError("steps and learning rate of older weights must be positive")

    def alter(name: str, tensor: torch.Tensor) -> torch.Tensor:
        digest = hashlib.sha256(f"{alteration.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return steps_older(tensor, alteration.steps, alteration.learning_rate, generator)

    return alter
