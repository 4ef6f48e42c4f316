"""Writing a model folder as a run's version 0: one safetensors file in the run's dtype, config, tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from intellect_protocol.checkpoint import is_checkpoint_file
from intellect_protocol.errors import UsageError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def write_model_folder(model: Any, tokenizer: Any, out: Path, *, dtype: str, stop_ids: list[int]) -> None:
    """Write `model` and `tokenizer` to `out`, which appears whole or not at all.

    Args:
        dtype: "float32" or "bfloat16", of every tensor.
        stop_ids: token ids that end a completion; they go into generation_config.json.

    Raises:
        UsageError: `out` exists.
    """
    if out.exists():
        raise UsageError(f"{out} exists; nothing was changed")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    module: nn.Module = model
    # Tied weights are one parameter under one name.
    weights = {name: p.detach().to(_DTYPES[dtype]) for name, p in module.named_parameters()}
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    model.config.dtype = dtype
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(partial)
    model.generation_config.eos_token_id = stop_ids
    model.generation_config.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for path in partial.iterdir():
        if not is_checkpoint_file(path.name):
            path.unlink()
    partial.rename(out)
