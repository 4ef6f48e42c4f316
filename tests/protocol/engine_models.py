"""Small random models in checkpoint folders, made on the spot by transformers."""

from __future__ import annotations

import hashlib
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers

from intellect_protocol.engines.base import Completion, GenerateRequest, RowScore, Sampling, ScoreRow
from intellect_protocol.engines.torch_engine import TorchEngine

VOCABULARY = 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}


def make_model(folder: Path, kind: str = "qwen2", *, seed: int = 0) -> Path:
    """Save a random model of one architecture with weights large enough to have opinions."""
    torch.manual_seed(seed)
    model: Any
    if kind == "qwen2":
        model = transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(**_SIZES, num_key_value_heads=4, tie_word_embeddings=True)
        )
    elif kind == "qwen3":
        model = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**_SIZES, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False)
        )
    elif kind == "llama":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **_SIZES, num_key_value_heads=2, attention_bias=True, mlp_bias=True, rope_parameters=rope
            )
        )
    else:
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=64,
                n_layer=2,
                n_head=4,
                n_positions=512,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in ("model.norm.weight", "transformer.ln_f.weight"):
                parameter.mul_(5.0)
            elif parameter.ndim == 2:
                parameter.mul_(3.0)
            elif name.endswith("bias"):
                parameter.uniform_(-0.2, 0.2)
    model.save_pretrained(folder)
    return folder


def reference(folder: Path) -> Any:
    """The same model in transformers, float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def seed(*parts: int) -> bytes:
    """A stream seed from small numbers."""
    return hashlib.sha256(repr(parts).encode()).digest()


def make_requests(prompts: int = 5, samples: int = 4, max_tokens: int = 40) -> list[GenerateRequest]:
    """Groups with prompts of different lengths."""
    return [
        GenerateRequest(
            prompt=[(7 * p + 3 * i) % (VOCABULARY - 1) + 1 for i in range(3 + 2 * p)],
            seeds=[seed(p, s) for s in range(samples)],
            max_tokens=max_tokens + p,
        )
        for p in range(prompts)
    ]


def make_engine(folder: Path, *, dtype: str = "float32", max_rows: int = 64) -> TorchEngine:
    """An engine in this process."""
    torch.set_num_threads(1)
    engine = TorchEngine(device="cpu", dtype=dtype, max_rows=max_rows)
    engine.load(folder)
    return engine


def generate(
    engine: TorchEngine, requests: list[GenerateRequest], sampling: Sampling | None = None
) -> list[list[Completion]]:
    """All completions, in the order of requests and seeds."""
    done: dict[tuple[int, int], Completion] = {}

    def deliver(request: int, sample: int, completion: Completion) -> None:
        assert (request, sample) not in done
        done[request, sample] = completion

    engine.generate(requests, sampling or Sampling(), deliver, lambda tokens: None)
    return [[done[r, s] for s in range(len(request.seeds))] for r, request in enumerate(requests)]


def assert_same(one: list[list[Completion]], two: list[list[Completion]]) -> None:
    """The same tokens, and log-probs up to float32 rounding."""
    assert [[c.tokens for c in own] for own in one] == [[c.tokens for c in own] for own in two]
    for left, right in zip(chain(*one), chain(*two), strict=True):
        assert left.finish_reason == right.finish_reason
        assert max(abs(a - b) for a, b in zip(left.logprobs, right.logprobs, strict=True)) < 1e-4
        assert len(left.proofs) == len(right.proofs)


def rows_of(requests: list[GenerateRequest], completions: list[list[Completion]]) -> list[ScoreRow]:
    """What a validator would score."""
    return [
        ScoreRow(request.prompt, completion.tokens, sigma, completion.proofs)
        for request, own in zip(requests, completions, strict=True)
        for sigma, completion in zip(request.seeds, own, strict=True)
    ]


def score(engine: TorchEngine, rows: list[ScoreRow], sampling: Sampling | None = None) -> list[RowScore]:
    """All scores, in the order of the rows."""
    done: dict[int, RowScore] = {}
    engine.score(rows, sampling or Sampling(), b"secret", done.__setitem__, lambda tokens: None)
    return [done[number] for number in range(len(rows))]
