"""Any causal language model in a local Hugging Face folder, rewritten as a run's version 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from intellect_protocol.errors import ConfigError

from ..policy import load_policy
from .folder import write_model_folder


def copy_local(source: Path, out: Path, *, dtype: str) -> None:
    """Write the model in `source` to `out` in `dtype`.

    Raises:
        ConfigError: `source` does not hold a model and a fast tokenizer that can be loaded without code.
        UsageError: `out` exists.
    """
    from transformers import AutoTokenizer

    model: Any = load_policy(source, dtype=dtype, attention="eager")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{source}: the tokenizer cannot be loaded: {error}") from error
    stop = model.generation_config.eos_token_id
    stop = tokenizer.eos_token_id if stop is None else stop
    stop_ids = [stop] if isinstance(stop, int) else list(stop or [])
    if not tokenizer.is_fast or not stop_ids:
        raise ConfigError(f"{source}: a tokenizer.json and an end-of-sequence token are needed")
    write_model_folder(model, tokenizer, out, dtype=dtype, stop_ids=stop_ids)
