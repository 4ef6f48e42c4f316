"""Reading a checkpoint folder into tensors: config.json and *.safetensors, nothing else.

A checkpoint comes from peers. Its manifest has been verified before it reaches an engine, yet what
the publisher wrote is still only data: no pickle, no code from the folder, names and shapes are
checked by the decoder that takes the tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, WireError
from ..wire import decode_json

if TYPE_CHECKING:
    import torch

MAX_CONFIG_BYTES = 1 << 20
MAX_WEIGHT_FILES = 4096


def read_json(path: Path, *, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object from a file of at most `max_bytes`.

    Raises:
        ConfigError: unreadable, too large or not a JSON object.
    """
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    try:
        value = decode_json(content, max_bytes=max_bytes)
    except WireError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return value


def weight_files(checkpoint_dir: Path) -> list[Path]:
    """The *.safetensors files of a checkpoint, by name.

    Raises:
        ConfigError: there is none, or there are too many.
    """
    files = sorted(checkpoint_dir.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{checkpoint_dir}: no *.safetensors file")
    if len(files) > MAX_WEIGHT_FILES:
        raise ConfigError(f"{checkpoint_dir}: more than {MAX_WEIGHT_FILES} weight files")
    return files


def weight_bytes(checkpoint_dir: Path) -> int:
    """Size of all weight files in bytes."""
    return sum(path.stat().st_size for path in weight_files(checkpoint_dir))


def load_tensors(checkpoint_dir: Path, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, converted to `dtype` on `device`.

    Raises:
        ConfigError: a file is not safetensors, a tensor is not floating point or comes twice.
    """
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(checkpoint_dir):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    tensor: torch.Tensor = file.get_tensor(name)
                    if name in tensors:
                        raise ConfigError(f"{path}: tensor {name} comes twice")
                    if not tensor.is_floating_point():
                        raise ConfigError(f"{path}: tensor {name} has type {tensor.dtype}")
                    # A copy: the file behind the mapping may be evicted while the engine lives.
                    tensors[name] = tensor.to(device=device, dtype=dtype, copy=True)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: {error}") from error
    return tensors
