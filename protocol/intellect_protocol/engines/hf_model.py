"""Any causal LM through transformers: slower, for architectures that `model` does not know.

Prompts are padded on the left, a running batch takes no new rows until it is empty, and the cache
is whatever the model's own class keeps. The state is `base_model`'s last hidden state and the
logits are its product with the output embeddings; a model that does more than that between the two
is found out when it is loaded, by comparing with its own forward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from .decoder import ModelShape


@dataclass(frozen=True)
class HfPrompts:
    """Prefilled prompts, left-padded; `cache` is transformers' own."""

    states: torch.Tensor  # [prompts, hidden]
    cache: Any
    mask: torch.Tensor  # [prompts, longest] 1 where a token stands
    lengths: torch.Tensor  # [prompts]


class TransformersDecoder:
    """A loaded model; see `decoder.Decoder`."""

    def __init__(
        self, checkpoint_dir: Path, dtype: torch.dtype, device: torch.device, attention: str = "sdpa"
    ) -> None:
        """Load a folder; only safetensors, no code from it.

        Args:
            attention: "sdpa" or "eager", transformers' own.

        Raises:
            ConfigError: transformers does not know the architecture or it computes logits in another way.
        """
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(
                checkpoint_dir,
                dtype=dtype,
                attn_implementation=attention,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
            )
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            raise ConfigError(f"{checkpoint_dir}: {str(error).splitlines()[0]}") from error
        self._model: Any = model.eval().to(device)
        self.device, self.attention = device, f"transformers-{attention}"
        config = model.config.get_text_config()
        self._head = model.get_output_embeddings()
        self._softcap = getattr(config, "final_logit_softcapping", None)
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.shape = ModelShape(
            model_type=str(config.model_type),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            context_length=config.max_position_embeddings,
            cache_bytes_per_token=2 * config.num_hidden_layers * kv_heads * head_dim * dtype.itemsize,
        )
        self._check_head()

    def _check_head(self) -> None:
        tokens = torch.arange(4, device=self.device)[None] % self.shape.vocab_size
        states = self._model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        own = self._model(input_ids=tokens, use_cache=False).logits.float()
        if not torch.allclose(self.logits(states[0]), own[0], rtol=1e-2, atol=1e-2):
            name = self.shape.model_type
            raise ConfigError(f"{name}: its logits are not a product of its last hidden state")

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(states).float()
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> HfPrompts:
        longest = max(map(len, prompts))
        tokens = torch.tensor([[*[0] * (longest - len(row)), *row] for row in prompts], device=self.device)
        lengths = torch.tensor([len(row) for row in prompts], device=self.device)
        mask = (torch.arange(longest, device=self.device) >= longest - lengths[:, None]).long()
        out = self._model.base_model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            use_cache=True,
        )
        return HfPrompts(out.last_hidden_state[:, -1], out.past_key_values, mask, lengths)

    def sequence_states(self, tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        longest = max(map(len, tokens))
        padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in tokens], device=self.device)
        lengths = torch.tensor([len(row) for row in tokens], device=self.device)
        mask = (torch.arange(longest, device=self.device) < lengths[:, None]).long()
        states = self._model.base_model(
            input_ids=padded, attention_mask=mask, use_cache=False
        ).last_hidden_state
        return [row[: len(own)] for row, own in zip(states, tokens, strict=True)]

    def continuation_states(
        self, prompts: HfPrompts, index: torch.Tensor, completions: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        first = prompts.states[index]
        longest = max(len(completion) - 1 for completion in completions)
        if longest == 0:
            return list(first[:, None])
        tokens = [[*row[:-1], *[0] * (longest - len(row) + 1)] for row in completions]
        steps = torch.arange(longest, device=self.device)
        cache = _select(prompts.cache, index)
        own = torch.ones_like(steps).expand(len(index), -1)
        states = self._model.base_model(
            input_ids=torch.tensor(tokens, device=self.device),
            attention_mask=torch.cat((prompts.mask[index], own), -1),
            position_ids=prompts.lengths[index][:, None] + steps,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return [
            torch.cat((first[row : row + 1], states[row, : len(completion) - 1]))
            for row, completion in enumerate(completions)
        ]

    def new_batch(self, max_rows: int) -> HfBatch:
        del max_rows
        return HfBatch(self._model)


def _select(cache: Any, index: torch.Tensor) -> Any:
    """A copy of a transformers cache with the batch entries `index`."""
    chosen = copy.deepcopy(cache)
    chosen.batch_select_indices(index)
    return chosen


class HfBatch:
    """Rows that started together; see `decoder.DecodeBatch`."""

    can_refill = False

    def __init__(self, model: Any) -> None:
        self._model = model

    def admit(self, rows: torch.Tensor, prompts: HfPrompts, index: torch.Tensor) -> None:
        del rows  # an empty batch fills from row 0
        self._cache = _select(prompts.cache, index)
        self._mask = prompts.mask[index]
        self._positions = prompts.lengths[index]

    def release(self, rows: torch.Tensor) -> None:
        del rows

    def keep(self, rows: torch.Tensor) -> None:
        self._cache.batch_select_indices(rows)
        self._mask, self._positions = self._mask[rows], self._positions[rows]

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        self._mask = torch.cat((self._mask, torch.ones_like(self._mask[:, :1])), -1)
        states: torch.Tensor = self._model.base_model(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=self._positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state[:, 0]
        self._positions = self._positions + 1
        return states
