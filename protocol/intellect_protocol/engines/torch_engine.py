"""The default engine: torch on any device, fast on CPUs.

Loads a checkpoint folder into the native decoder where the architecture is known and into
transformers where it is not, chooses the dtype, and keeps calls inside the memory of the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from .. import sampling as seeded
from ..errors import ConfigError, NumericError, PreflightError, UsageError
from .attention import KERNELS
from .base import (
    CompletionSink,
    EngineInfo,
    GenerateRequest,
    Progress,
    Sampling,
    ScoreRow,
    ScoreSink,
)
from .decoder import Decoder
from .generation import Generation
from .hf_model import TransformersDecoder
from .model import NativeDecoder
from .model_config import NativeConfig, native_config
from .scoring import Scoring
from .weights import load_tensors, read_json, weight_bytes

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Below this a step is all overhead, which bf16 kernels have more of.
_MIN_BF16_PARAMETERS = 20_000_000
_BATCH_TOKENS = 8192
# Weights while they are converted and packed, and activations, over the size of the weights alone.
_LOAD_OVERHEAD = 1.5


def choose_device(device: str) -> torch.device:
    """The device for "cpu", "cuda", "cuda:<index>" or "auto" (CUDA where there is one).

    Raises:
        PreflightError: CUDA is asked for and there is none, or not that many devices.
        ConfigError: another word.
    """
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:<index>, not {device!r}")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise PreflightError(f"device {device}: no usable CUDA device here; --device cpu runs without")
    if int(index or 0) >= torch.cuda.device_count():
        raise PreflightError(f"device {device}: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device(f"cuda:{int(index or 0)}")


def choose_dtype(dtype: str, device: torch.device, parameters: int) -> torch.dtype:
    """The dtype for "float32", "bfloat16" or "auto".

    "auto" takes bf16 where the hardware multiplies it (AMX or avx512_bf16; elsewhere bf16 products
    are 6 to 20 times slower than fp32) and the model is large enough to gain.

    Raises:
        ConfigError: another word.
    """
    if dtype in _DTYPES:
        return _DTYPES[dtype]
    if dtype != "auto":
        raise ConfigError(f"dtype must be auto, float32 or bfloat16, not {dtype!r}")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast and parameters >= _MIN_BF16_PARAMETERS else torch.float32


class TorchEngine:
    """See `base.Engine`."""

    def __init__(
        self, *, device: str = "auto", dtype: str = "auto", max_rows: int = 64, attention: str = "auto"
    ) -> None:
        """Choose the device; weights come with `load`.

        Args:
            attention: one of `attention.KERNELS`; "auto" is the native decoder's "sdpa". An architecture that
                it does not know runs through transformers with the same kernel.

        Raises:
            PreflightError, ConfigError: as `choose_device`.
        """
        self._device = choose_device(device)
        if dtype not in (*_DTYPES, "auto"):
            raise ConfigError(f"dtype must be auto, float32 or bfloat16, not {dtype!r}")
        if attention not in KERNELS:
            raise ConfigError(f"attention must be one of {', '.join(KERNELS)}, not {attention!r}")
        self._wanted_dtype, self._max_rows = dtype, max_rows
        self._attention = "sdpa" if attention == "auto" else attention
        self._dtype = torch.float32
        self._config: dict[str, Any] = {}
        self._decoder: Decoder[Any] | None = None

    def load(self, checkpoint_dir: Path) -> EngineInfo:
        config = read_json(checkpoint_dir / "config.json")
        size_bytes = weight_bytes(checkpoint_dir)
        # Files hold 2 or 4 bytes per parameter; the threshold lies far from both readings.
        dtype = choose_dtype(self._wanted_dtype, self._device, size_bytes // 4)
        self._check_memory(size_bytes)
        native = native_config(config)
        with torch.inference_mode():
            decoder = self._decode_with(native, checkpoint_dir, dtype)
        self._decoder, self._config, self._dtype = decoder, config, dtype
        return self.info()

    def _decode_with(
        self, native: NativeConfig | None, checkpoint_dir: Path, dtype: torch.dtype
    ) -> Decoder[Any]:
        own, _, kernel = self._attention.rpartition("-")
        if own or native is None:
            return TransformersDecoder(checkpoint_dir, dtype, self._device, kernel)
        return NativeDecoder(native, load_tensors(checkpoint_dir, dtype, self._device), kernel)

    def _check_memory(self, size_bytes: int) -> None:
        needed = int(size_bytes * _LOAD_OVERHEAD)
        available = self._available_bytes()
        if needed > available:
            raise PreflightError(
                f"the model needs about {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB are free on "
                f"{self._device}"
            )

    def _available_bytes(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.mem_get_info(self._device)[0])
        return int(psutil.virtual_memory().available)

    def update(self, checkpoint_dir: Path) -> EngineInfo:
        old = self._loaded()
        config = read_json(checkpoint_dir / "config.json")
        native = native_config(config)
        same = config.get("model_type") == self._config.get("model_type")
        if not same or native != native_config(self._config):
            raise ConfigError(f"{checkpoint_dir}: not the architecture of the loaded model")
        self._check_memory(weight_bytes(checkpoint_dir))
        with torch.inference_mode():
            decoder = self._decode_with(native, checkpoint_dir, self._dtype)
        if decoder.shape != old.shape:
            raise ConfigError(f"{checkpoint_dir}: not the architecture of the loaded model")
        self._decoder, self._config = decoder, config
        return self.info()

    def limit_rows(self, max_rows: int) -> None:
        """Decode at most this many sequences at once from the next call on."""
        self._max_rows = max_rows

    def unload(self) -> None:
        self._decoder = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def info(self) -> EngineInfo:
        """What is loaded."""
        decoder = self._loaded()
        return EngineInfo(
            engine="torch",
            version=version("intellect-node"),
            dtype=str(self._dtype).removeprefix("torch."),
            attention=decoder.attention,
            device=str(self._device),
            torch=str(torch.__version__),
            model_type=decoder.shape.model_type,
            parameters=decoder.shape.parameters,
            vocab_size=decoder.shape.vocab_size,
            hidden_size=decoder.shape.hidden_size,
            context_length=decoder.shape.context_length,
            max_rows=self._max_rows,
        )

    def _loaded(self) -> Decoder[Any]:
        if self._decoder is None:
            raise UsageError("the engine has no policy loaded")
        return self._decoder

    def _check_tokens(self, tokens: Sequence[int], length: int) -> None:
        shape = self._loaded().shape
        if tokens and (min(tokens) < 0 or max(tokens) >= shape.vocab_size):
            raise UsageError(f"a token id is not in the vocabulary of {shape.vocab_size}")
        if length > shape.context_length:
            raise UsageError(f"{length} tokens exceed the model's context of {shape.context_length}")

    @torch.inference_mode()
    def probe(self, prompt: Sequence[int]) -> list[float]:
        decoder = self._loaded()
        if len(prompt) < 2:
            raise UsageError("a probe has at least two tokens")
        self._check_tokens(prompt, len(prompt))
        states = decoder.sequence_states([prompt[:-1]])[0]
        tokens = torch.tensor(prompt[1:], device=states.device)
        try:
            values: list[float] = seeded.log_probs(decoder.logits(states), tokens).tolist()
        except ValueError as error:
            raise NumericError(str(error)) from error
        return values

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[GenerateRequest],
        sampling: Sampling,
        deliver: CompletionSink,
        progress: Progress,
    ) -> None:
        decoder = self._loaded()
        sampling.check()
        for request in requests:
            request.check()
            self._check_tokens(request.prompt, len(request.prompt) + request.max_tokens)
        Generation(
            decoder,
            requests,
            sampling,
            max_rows=self._affordable_rows(requests),
            prefill_tokens=_BATCH_TOKENS,
            deliver=deliver,
            progress=progress,
        ).run()

    def _affordable_rows(self, requests: Sequence[GenerateRequest]) -> int:
        """Rows whose caches and states fit into half of the free memory, should all reach their limit."""
        shape = self._loaded().shape
        longest = max((len(request.prompt) + request.max_tokens for request in requests), default=1)
        # Capacities double, and the old half is alive while the new one fills.
        row_bytes = 2 * longest * (shape.cache_bytes_per_token + 2 * shape.hidden_size)
        return max(1, min(self._max_rows, self._available_bytes() // 2 // row_bytes))

    @torch.inference_mode()
    def score(
        self,
        rows: Sequence[ScoreRow],
        sampling: Sampling,
        secret: bytes,
        deliver: ScoreSink,
        progress: Progress,
    ) -> None:
        decoder = self._loaded()
        sampling.check()
        for row in rows:
            row.check()
            self._check_tokens(row.prompt, len(row.prompt) + len(row.completion))
            self._check_tokens(row.completion, 0)
        Scoring(
            decoder,
            rows,
            sampling,
            secret,
            max_rows=self._max_rows,
            batch_tokens=_BATCH_TOKENS,
            deliver=deliver,
            progress=progress,
        ).run()
