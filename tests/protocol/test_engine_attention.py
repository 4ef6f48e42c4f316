"""Attention kernels and implementations: one policy, four orders of summation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_models import generate, make_model, make_requests, rows_of, score
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from intellect_protocol.engines.attention import KERNELS, eager_attention
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.errors import ConfigError

PROMPT = [(7 * i) % 90 for i in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3")


def engine_of(folder: Path, attention: str) -> TorchEngine:
    engine = TorchEngine(device="cpu", dtype="float32", attention=attention)
    engine.load(folder)
    return engine


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(0, 5), st.booleans(), st.integers(0, 1000))
def test_eager_attention_is_softmax_attention(
    heads: int, length: int, extra: int, boolean: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, heads, length, 8, generator=generator)
    key, value = (torch.randn(2, heads, length + extra, 8, generator=generator) for _ in range(2))
    seen = torch.rand(2, 1, length, length + extra, generator=generator) < 0.7
    seen[..., 0] = True
    mask = seen if boolean else torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    torch.testing.assert_close(
        eager_attention(query, key, value, attn_mask=mask),
        functional.scaled_dot_product_attention(query, key, value, attn_mask=mask),
    )
    torch.testing.assert_close(
        eager_attention(query, key[..., :length, :], value[..., :length, :], is_causal=True),
        functional.scaled_dot_product_attention(
            query, key[..., :length, :], value[..., :length, :], is_causal=True
        ),
    )


@pytest.mark.parametrize("attention", KERNELS[1:])
def test_every_kernel_says_its_name_and_gives_the_same_log_probs(folder: Path, attention: str) -> None:
    engine = engine_of(folder, attention)
    assert engine.info().attention == attention
    expected = torch.tensor(engine_of(folder, "auto").probe(PROMPT))
    torch.testing.assert_close(torch.tensor(engine.probe(PROMPT)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("attention", ["eager", "transformers-eager"])
def test_a_rollout_of_one_kernel_is_verified_by_another(folder: Path, attention: str) -> None:
    requests = make_requests(3, 2, max_tokens=40)
    rows = rows_of(requests, generate(engine_of(folder, attention), requests))
    for own in score(engine_of(folder, "sdpa"), rows):
        assert max(own.distances) < 1e-3
        assert all(report.exponent_mismatches <= 2 for report in own.chunk_reports)


def test_eager_kernels_round_in_an_order_of_their_own(folder: Path) -> None:
    # Otherwise a calibration would compare a kernel with itself.
    prompts = {name: engine_of(folder, name).probe(PROMPT) for name in ("sdpa", "eager")}
    assert prompts["sdpa"] != prompts["eager"]


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention must be one of"):
        TorchEngine(device="cpu", attention="flash")
