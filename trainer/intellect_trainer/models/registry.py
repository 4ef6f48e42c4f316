"""`--model tiny|smollm2|PATH` to a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from intellect_protocol.errors import UsageError

# Long enough for every answer of the small environments and its end.
_TINY_MAX_TOKENS = 16


def make_policy(model: str, out: Path, *, environment: str | None, seed: int, dtype: str) -> str:
    """Make version 0's folder; returns a line that says what was made.

    Args:
        model: "tiny", "smollm2" or a local Hugging Face folder.
        environment: what `tiny` is warmed up on.
        dtype: "float32" or "bfloat16", of a local folder's weights.

    Raises:
        UsageError: `out` exists, or a value makes no sense.
        ConfigError: no such environment, or not a model folder.
        PreflightError: the model cannot be had here.
    """
    if out.exists():
        raise UsageError(f"{out} exists; nothing was changed")
    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f"dtype must be float32 or bfloat16, not {dtype!r}")
    if model == "tiny":
        from .tiny import make_tiny

        if environment is None:
            raise UsageError("--model tiny needs --environment")
        rate = make_tiny(environment, out, max_tokens=_TINY_MAX_TOKENS, seed=seed)
        return f"{out}: tiny, warmed up on {environment} to a pass rate of {rate:.2f}"
    if model == "smollm2":
        from .smollm2 import smollm2_folder

        shutil.copytree(smollm2_folder(), out)
        return f"{out}: SmolLM2-135M-Instruct"
    from .local import copy_local

    copy_local(Path(model), out, dtype=dtype)
    return f"{out}: {model} in {dtype}"
