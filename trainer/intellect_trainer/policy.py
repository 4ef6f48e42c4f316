"""The policy as a torch module: loading a checkpoint folder, and log-probs and entropies of tokens.

Only the states that predict completion tokens go through the LM head; prompts and padding do not pay for
the vocabulary. Log-probs and entropies come from one function with a hand-written backward pass, because
autograd would keep four [tokens, vocabulary] arrays where one is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from intellect_protocol.errors import ConfigError

from .packing import MicroBatch, TrainRow, pack

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_policy(folder: Path, *, dtype: str, attention: str) -> nn.Module:
    """Load a causal LM from a local folder of safetensors, in evaluation mode (no dropout).

    Args:
        dtype: "float32" or "bfloat16", of the parameters.
        attention: attention kernel, "eager" or "sdpa".

    Raises:
        ConfigError: not a model folder, or a model whose logits are more than a product with its LM head.
    """
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no config.json, so not a model folder")
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=_DTYPES[dtype],
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{folder}: cannot be loaded as a causal language model: {first_line}") from error
    model.eval()
    _check(model, folder)
    return model


def _check(model: nn.Module, folder: Path) -> None:
    """Some architectures cap or scale logits after the head, or make their own attention masks.

    `token_statistics` would be wrong for them, so it is compared with the model's plain forward pass.
    """
    vocab_size = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    tokens = [token % vocab_size for token in range(3, 13)]
    completions = [tokens[4:7], tokens[6:10]]
    group = [TrainRow(tokens[:4], row, np.zeros(len(row), np.float32), 0.0) for row in completions]
    expected = []
    with torch.no_grad():
        (batch,) = pack([group], max_tokens=1 << 20)
        ours, _ = token_statistics(model, batch, temperature=1.0)
        for row in group:
            ids = torch.tensor([[*row.prompt_tokens, *row.completion_tokens]])
            log_p = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), dim=-1)
            expected += [log_p[at - 1, ids[0, at]] for at in range(4, ids.shape[1])]
    if not torch.allclose(ours, torch.stack(expected), rtol=0.02, atol=0.1):
        raise ConfigError(f"{folder}: this architecture is not supported: its log-probs cannot be reproduced")


def _states(model: Any, batch: MicroBatch) -> Tensor:
    """[lines * width, hidden] final hidden states."""
    mask = batch.visible
    if mask is not None and model.config._attn_implementation == "eager":
        # The eager kernel adds its mask.
        mask = torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min)
    states: Tensor = model.base_model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=mask, use_cache=False
    ).last_hidden_state
    return states.flatten(0, 1)


def _head(model: Any) -> nn.Module:
    head: nn.Module = model.get_output_embeddings()
    return head


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """bf16 autocast where `dtype` asks for it."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
        yield


def token_statistics(model: nn.Module, batch: MicroBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of a micro-batch's completion tokens.

    Returns:
        [n] log-softmax(logits / T) of the tokens and [n] entropy of that distribution in nats, both
        float32, with gradient where gradients are on.
    """
    logits = _logits(model, batch, temperature)
    logprobs, entropies = _TokenStatistics.apply(logits, batch.targets)  # type: ignore[no-untyped-call]
    return logprobs, entropies


@torch.no_grad()
def token_logprobs(model: nn.Module, batch: MicroBatch, *, temperature: float) -> Tensor:
    """The log-probs of `token_statistics` alone, without gradient."""
    logits = _logits(model, batch, temperature)
    return logits.gather(1, batch.targets[:, None])[:, 0] - logits.logsumexp(dim=-1)


def _logits(model: nn.Module, batch: MicroBatch, temperature: float) -> Tensor:
    """[n, vocabulary] float32 logits / T."""
    logits: Tensor = _head(model)(_states(model, batch)[batch.positions]).float()
    return logits if temperature == 1 else logits / temperature


class _TokenStatistics(torch.autograd.Function):
    """Log-prob of a target and entropy of the distribution, for logits z [n, vocabulary].

    logp = z_t - logsumexp(z) and H = -sum p log p, so d logp / dz = onehot(t) - p and
    dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(logits, dim=-1)
        logprobs = log_p.gather(1, targets[:, None])[:, 0]
        entropies = -(log_p.exp() * log_p).sum(dim=-1)
        ctx.save_for_backward(log_p, targets, entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        log_p, targets, entropies = ctx.saved_tensors
        to_logprob, to_entropy = grads
        # p * (-to_logprob - to_entropy * (log p + H)), in one buffer
        factor = (log_p + entropies[:, None]).mul_(-to_entropy[:, None]).sub_(to_logprob[:, None])
        result = factor.mul_(log_p.exp())
        result.scatter_add_(1, targets[:, None], to_logprob[:, None])
        return result, None
