"""The seeded sampler: its definition, the same on numpy and torch, and the distance it is judged by."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intellect_protocol import sampling
from intellect_protocol.sampling import distance, log_probs, sample, uniform, uniforms

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "sampling.json").read_text())

Floats = npt.NDArray[np.float64]


def probabilities(logits: npt.NDArray[np.float32], temperature: float, top_k: int, top_p: float) -> Floats:
    """The distribution by its definition, one row, token by token."""
    scaled = logits / np.float32(temperature)
    ranked = sorted(range(len(scaled)), key=lambda token: (-float(scaled[token]), token))
    weights = np.exp((scaled - scaled.max()).astype(np.float64))
    kept = ranked[: top_k or len(ranked)]
    total, share, nucleus = math.fsum(weights[kept]), 0.0, []
    for token in kept:
        nucleus.append(token)
        share += weights[token]
        if share >= top_p * total:
            break
    result = np.zeros(len(scaled))
    result[nucleus] = weights[nucleus]
    return result / result.sum()


def first_exceeding(probability: Floats, u: float) -> int:
    total = 0.0
    last = 0
    for token, share in enumerate(probability):
        total += share
        last = token if share > 0 else last
        if total > u:
            return token
    return last


@st.composite
def draws(draw: st.DrawFn) -> tuple[npt.NDArray[np.float32], Floats, dict[str, Any]]:
    rows = draw(st.integers(1, 4))
    vocab = draw(st.sampled_from([1, 2, 5, 255, 256, 257, 600]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.standard_normal((rows, vocab)).astype(np.float32) * draw(st.sampled_from([0.0, 1.0, 8.0]))
    if draw(st.booleans()):
        logits = np.round(logits)  # ties
    options = {
        "temperature": draw(st.sampled_from([1.0, 0.7, 1.3])),
        "top_k": draw(st.sampled_from([0, 1, 3, 1000])),
        "top_p": draw(st.sampled_from([1.0, 0.9, 0.3])),
    }
    return logits.astype(np.float32), rng.random(rows), options


@settings(max_examples=150, deadline=None)
@given(draws())
def test_the_token_is_the_first_whose_cumulative_probability_exceeds_u(case: Any) -> None:
    logits, u, options = case
    tokens = sample(logits, u, **options).tokens
    for row, token in enumerate(tokens.tolist()):
        assert token == first_exceeding(probabilities(logits[row], **options), float(u[row]))


@settings(max_examples=150, deadline=None)
@given(draws())
def test_numpy_and_torch_draw_the_same_tokens(case: Any) -> None:
    logits, u, options = case
    ours = sample(logits, u, **options)
    theirs = sample(torch.from_numpy(logits), torch.from_numpy(u), **options)
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    np.testing.assert_allclose(ours.log_probs, theirs.log_probs.numpy(), atol=1e-6)
    tokens = np.flip(ours.tokens).copy()
    measured = distance(logits, tokens, u, **options)
    other = distance(torch.from_numpy(logits), torch.from_numpy(tokens), torch.from_numpy(u), **options)
    for left, right in zip(measured, other, strict=True):
        np.testing.assert_allclose(left, right.numpy(), atol=1e-6)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), top_k=st.sampled_from([0, 50]), top_p=st.sampled_from([1.0, 0.95]))
def test_numpy_and_torch_draw_the_same_tokens_of_a_large_vocabulary(
    seed: int, top_k: int, top_p: float
) -> None:
    rng = np.random.default_rng(seed)
    wide = torch.from_numpy((4 * rng.standard_normal((3, 49_152))).astype(np.float32))
    logits = wide.bfloat16().float()  # as a bf16 model gives them: many ties
    u = np.array([*rng.random(2), 1.0])
    ours = sample(logits.numpy(), u, 0.9, top_k, top_p).tokens
    assert ours.tolist() == sample(logits, torch.from_numpy(u), 0.9, top_k, top_p).tokens.tolist()


@settings(max_examples=50, deadline=None)
@given(draws())
def test_a_larger_u_never_draws_an_earlier_token(case: Any) -> None:
    logits, _, options = case
    u = np.linspace(0, 1, 60)
    tokens = sample(np.tile(logits[:1], (60, 1)), u, **options).tokens
    assert (np.diff(tokens) >= 0).all()
    assert set(tokens.tolist()) <= set(np.flatnonzero(probabilities(logits[0], **options)).tolist())


@settings(max_examples=100, deadline=None)
@given(draws(), st.data())
def test_distance_is_the_gap_to_the_tokens_interval(case: Any, data: st.DataObject) -> None:
    logits, u, options = case
    tokens = np.array([data.draw(st.integers(0, logits.shape[1] - 1)) for _ in u])
    measured = distance(logits, tokens, u, **options)
    for row, token in enumerate(tokens):
        probability = probabilities(logits[row], **options)
        lower, upper = probability[:token].sum(), probability[: token + 1].sum()
        expected = max(lower - u[row], u[row] - upper, 0.0)
        assert measured.distances[row] == pytest.approx(expected, abs=1e-9)
        assert measured.exact[row] == (token == first_exceeding(probability, float(u[row])))
        assert measured.top_prob[row] == pytest.approx(probability.max(), rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(draws())
def test_a_token_of_the_sampler_is_exact_and_has_no_distance(case: Any) -> None:
    logits, u, options = case
    measured = distance(logits, sample(logits, u, **options).tokens, u, **options)
    assert measured.exact.all()
    assert not measured.distances.any()


@settings(max_examples=50, deadline=None)
@given(draws())
def test_log_probs_are_those_of_the_policy_before_top_k_and_top_p(case: Any) -> None:
    logits, u, options = case
    drawn = sample(logits, u, **options)
    tokens = torch.from_numpy(drawn.tokens)
    wide = torch.from_numpy(logits).double() / options["temperature"]
    expected = torch.log_softmax(wide, -1).gather(1, tokens[:, None])[:, 0].numpy()
    assert drawn.log_probs.dtype == np.float32
    np.testing.assert_allclose(drawn.log_probs, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(drawn.log_probs, log_probs(logits, drawn.tokens, options["temperature"]))
    measured = distance(logits, drawn.tokens, u, **options)
    np.testing.assert_array_equal(drawn.log_probs, measured.log_probs)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_ends_of_the_unit_interval_draw_the_first_and_last_possible_token(library: str) -> None:
    logits = np.full((2, 300), -np.inf, dtype=np.float32)
    logits[:, 40] = logits[:, 270] = 1.0
    u = np.array([0.0, 1.0])
    convert = np.asarray if library == "numpy" else torch.from_numpy
    assert sample(convert(logits), convert(u)).tokens.tolist() == [40, 270]
    measured = distance(convert(logits), convert(np.array([270, 0])), convert(u))
    assert measured.distances.tolist() == [0.5, 1.0]


def test_frequencies_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.2, 0.0001, 0.2999], dtype=np.float32))
    u = uniforms(b"\x05" * 32, 0, 20_000)
    tokens = sample(np.tile(logits, (len(u), 1)), u).tokens
    shares = np.bincount(tokens, minlength=4) / len(u)
    np.testing.assert_allclose(shares, [0.5, 0.2, 0.0001, 0.2999], atol=0.01)


def test_large_batches_are_worked_on_in_slices_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    logits, u = rng.standard_normal((50, 300)).astype(np.float32), rng.random(50)
    whole = distance(logits, np.arange(50), u, top_k=20)
    monkeypatch.setattr(sampling, "_SLICE_ELEMENTS", 1000)
    sliced = distance(logits, np.arange(50), u, top_k=20)
    for left, right in zip(whole, sliced, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_logits_that_are_not_finite_are_refused(bad: float, library: str) -> None:
    logits = np.zeros((3, 10), dtype=np.float32)
    logits[1, 4] = bad
    convert = np.asarray if library == "numpy" else torch.from_numpy
    with np.errstate(invalid="ignore"), pytest.raises(ValueError, match="logits contain NaN"):
        sample(convert(logits), convert(np.zeros(3)))


def test_a_row_of_impossible_tokens_is_refused() -> None:
    with np.errstate(invalid="ignore"), pytest.raises(ValueError, match="logits contain NaN"):
        sample(np.full((1, 4), -np.inf, dtype=np.float32), np.zeros(1))


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}],
)
def test_parameters_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        sample(np.zeros((1, 4), dtype=np.float32), np.zeros(1), **options)


@pytest.mark.parametrize("token", [-1, 4])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        distance(np.zeros((1, 4), dtype=np.float32), np.array([token]), np.zeros(1))


def test_shapes_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="do not match"):
        sample(np.zeros((2, 4), dtype=np.float32), np.zeros(1))
    with pytest.raises(ValueError, match="tokens for"):
        distance(np.zeros((2, 4), dtype=np.float32), np.zeros(3, dtype=np.int64), np.zeros(2))


@given(sigma=st.binary(min_size=32, max_size=32), t=st.integers(0, 2**32 - 1))
def test_a_uniform_is_the_head_of_a_hash(sigma: bytes, t: int) -> None:
    digest = hashlib.sha256(sigma + t.to_bytes(4, "little")).digest()
    assert uniform(sigma, t) == int.from_bytes(digest[:8], "big") / 2**64
    assert 0 <= uniform(sigma, t) <= 1


def test_uniforms_are_consecutive() -> None:
    sigma = b"\x01" * 32
    assert uniforms(sigma, 3, 4).tolist() == [uniform(sigma, t) for t in (3, 4, 5, 6)]


@pytest.mark.parametrize("vector", VECTORS["uniforms"], ids=lambda vector: f"t={vector['t']}")
def test_example_uniforms_are_reproduced(vector: dict[str, Any]) -> None:
    assert uniform(bytes.fromhex(vector["sigma"]), vector["t"]).hex() == vector["u"]


@pytest.mark.parametrize("vector", VECTORS["draws"], ids=lambda vector: vector["name"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_example_draws_are_reproduced(vector: dict[str, Any], library: str) -> None:
    convert = np.asarray if library == "numpy" else torch.from_numpy
    u = uniforms(bytes.fromhex(vector["sigma"]), 0, len(vector["tokens"]))
    logits = np.tile(np.array(vector["logits"], dtype=np.float32), (len(u), 1))
    options = {name: vector[name] for name in ("temperature", "top_k", "top_p")}
    assert sample(convert(logits), convert(u), **options).tokens.tolist() == vector["tokens"]
