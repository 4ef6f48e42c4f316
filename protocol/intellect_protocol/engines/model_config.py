"""Reading config.json of the architectures that are decoded natively.

The fields are those that transformers writes for Llama, Qwen2 and Qwen3; a value that would change
the computation in a way the native decoder does not know makes `native_config` return None, and
the model then runs through transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

_FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: its base and, for "llama3", the frequency scaling."""

    kind: str  # "default", "linear" or "llama3"
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_length: int = 0


@dataclass(frozen=True)
class NativeConfig:
    """Everything the native decoder needs to know about a model."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    tied: bool
    rope: Rope


def native_config(config: dict[str, Any]) -> NativeConfig | None:
    """The native decoder's view of config.json, or None where transformers must run the model.

    Raises:
        ConfigError: a size is missing or makes no sense.
    """
    if (
        config.get("model_type") not in _FAMILIES
        or config.get("hidden_act", "silu") != "silu"
        or config.get("use_sliding_window")
        or any(kind != "full_attention" for kind in config.get("layer_types") or [])
        or "quantization_config" in config
    ):
        return None
    rope = _rope(config)
    if rope is None:
        return None
    heads = _size(config, "num_attention_heads", 1 << 12)
    hidden = _size(config, "hidden_size", 1 << 16)
    kv_heads = _size(config, "num_key_value_heads", 1 << 12, heads)
    head_dim = _size(config, "head_dim", 1 << 12, hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(f"config.json: {heads} heads, {kv_heads} kv heads of size {head_dim} do not fit")
    return NativeConfig(
        model_type=config["model_type"],
        vocab_size=_size(config, "vocab_size", 1 << 22),
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size", 1 << 20),
        layers=_size(config, "num_hidden_layers", 1 << 10),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        context_length=_size(config, "max_position_embeddings", 1 << 24),
        # transformers writes the field always; older files rely on the class's default, which is untied.
        tied=config.get("tie_word_embeddings") is True,
        rope=rope,
    )


def _rope(config: dict[str, Any]) -> Rope | None:
    # `rope_parameters` since transformers 5, `rope_theta` and `rope_scaling` before.
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ConfigError("config.json: rope_parameters is not an object")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = _number(parameters, "rope_theta", _number(config, "rope_theta", 10_000.0))
    if parameters.get("partial_rotary_factor", 1.0) != 1.0 or config.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    if kind == "default":
        return Rope("default", theta)
    if kind == "linear":
        return Rope("linear", theta, _number(parameters, "factor", 1.0))
    if kind == "llama3":
        return Rope(
            "llama3",
            theta,
            _number(parameters, "factor", 1.0),
            _number(parameters, "low_freq_factor", 1.0),
            _number(parameters, "high_freq_factor", 4.0),
            _size(parameters, "original_max_position_embeddings", 1 << 24),
        )
    return None


def _size(config: dict[str, Any], key: str, limit: int, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise ConfigError(f"config.json: {key} must be an integer from 1 to {limit}, not {value!r}")
    return value


def _number(config: dict[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e12:
        raise ConfigError(f"config.json: {key} must be a positive number, not {value!r}")
    return float(value)
