"""The loss and its gradient against an independent float64 reference written from the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intellect_trainer.advantage import group_advantages, has_signal
from intellect_trainer.loss import LossTerms, grpo_loss

EPS, DELTA, KL, ENTROPY = 0.2, 4.0, 0.05, 0.01
TERMS = LossTerms(EPS, DELTA, KL, ENTROPY)


def _reference_loss(
    logits: np.ndarray,
    targets: np.ndarray,
    old: np.ndarray,
    ref: np.ndarray,
    advantages: np.ndarray,
    total: int,
) -> float:
    """The sum over tokens of the formula in 06-training, one scalar at a time, in float64."""
    loss = 0.0
    for z, target, logp_old, logp_ref, advantage in zip(logits, targets, old, ref, advantages, strict=True):
        log_p = z - (z.max() + math.log(sum(math.exp(v - z.max()) for v in z)))
        logp = log_p[target]
        ratio = math.exp(logp - logp_old)
        surrogate = min(min(ratio, DELTA) * advantage, min(max(ratio, 1 - EPS), 1 + EPS) * advantage)
        k3 = math.exp(logp_ref - logp) - (logp_ref - logp) - 1
        entropy = -sum(math.exp(v) * v for v in log_p)
        loss += -surrogate + KL * k3 - ENTROPY * entropy
    return loss / total


def _numeric_gradient(function, at: np.ndarray, step: float = 1e-6) -> np.ndarray:
    gradient = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up) - function(down)) / (2 * step)
    return gradient


def _ours(logits: np.ndarray, targets, old, ref, advantages, total) -> tuple[float, np.ndarray]:
    from intellect_trainer.policy import _TokenStatistics

    z = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    logprobs, entropies = _TokenStatistics.apply(z, torch.tensor(targets))
    loss, _ = grpo_loss(
        logprobs,
        torch.tensor(old, dtype=torch.float64),
        torch.tensor(ref, dtype=torch.float64),
        entropies,
        torch.tensor(advantages, dtype=torch.float64),
        terms=TERMS,
        total_tokens=total,
    )
    loss.backward()
    assert z.grad is not None
    return float(loss.detach()), z.grad.numpy()


def _case(seed: int, log_ratios: list[float], advantages: list[float]):
    """Logits whose tokens have exactly these log ratios to the old policy."""
    rng = np.random.default_rng(seed)
    n, vocab = len(log_ratios), 7
    logits = rng.normal(size=(n, vocab)) * 2
    targets = rng.integers(vocab, size=n)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    logp = log_p[np.arange(n), targets]
    return logits, targets, logp - np.array(log_ratios), logp + rng.normal(size=n), np.array(advantages)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.tuples(st.floats(-3, 6), st.floats(-3, 3)), min_size=1, max_size=6),
)
def test_loss_and_gradient_equal_the_float64_reference(seed, tokens) -> None:
    # Away from the kinks, where a two-sided difference means nothing.
    kinks = [math.log(1 - EPS), math.log(1 + EPS), math.log(DELTA)]
    ratios = [r + 0.01 if any(abs(r - kink) < 1e-3 for kink in kinks) else r for r, _ in tokens]
    logits, targets, old, ref, advantages = _case(seed, ratios, [a for _, a in tokens])
    total = len(tokens) + 3
    loss, gradient = _ours(logits, targets, old, ref, advantages, total)

    def reference(z: np.ndarray) -> float:
        return _reference_loss(z, targets, old, ref, advantages, total)

    assert loss == pytest.approx(reference(logits), rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(gradient, _numeric_gradient(reference, logits), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "surrogate_has_gradient"),
    [
        (math.log(1000.0), -1.0, False),  # far above delta with A < 0: plain PPO would push here
        (math.log(3.0), -1.0, True),  # between 1 + eps and delta with A < 0
        (math.log(0.5), -1.0, False),
        (math.log(3.0), 1.0, False),
        (math.log(0.5), 1.0, True),
        (0.0, 1.0, True),
    ],
)
def test_each_side_of_the_clip_holds_where_it_should(log_ratio, advantage, surrogate_has_gradient) -> None:
    logp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    terms = LossTerms(EPS, DELTA, 0.0, 0.0)
    constant = torch.zeros(1, dtype=torch.float64)
    loss, sums = grpo_loss(
        logp,
        logp.detach() - log_ratio,
        constant,
        constant,
        torch.tensor([advantage]),
        terms=terms,
        total_tokens=1,
    )
    loss.backward()
    assert (logp.grad != 0).item() is surrogate_has_gradient
    assert sums.clipped == (0 if surrogate_has_gradient else 1)
    assert sums.ratio_max == pytest.approx(math.exp(log_ratio))


def test_delta_bounds_the_loss_of_a_runaway_token() -> None:
    logp, old = torch.tensor([-1.0], requires_grad=True), torch.tensor([-60.0])
    zero = torch.zeros(1)
    loss, _ = grpo_loss(
        logp, old, zero, zero, torch.tensor([-2.0]), terms=LossTerms(0.2, 4.0, 0, 0), total_tokens=1
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx(8.0)
    assert torch.isfinite(logp.grad).all()


def test_the_kl_term_has_a_gradient_towards_the_reference() -> None:
    logp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-2.0], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    loss, sums = grpo_loss(
        logp, logp.detach(), reference, zero, zero, terms=LossTerms(0.2, 4.0, 1.0, 0), total_tokens=1
    )
    loss.backward()
    assert sums.kl == pytest.approx(math.exp(-1.0) + 1.0 - 1.0)
    assert logp.grad.item() == pytest.approx(1 - math.exp(-1.0))


@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=16))
def test_advantages_are_the_population_standard_score_of_the_group(rewards) -> None:
    values = np.array(rewards, dtype=np.float64)
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    expected = [(value - mean) / (deviation + 1e-4) for value in values]
    np.testing.assert_allclose(group_advantages(rewards, eps=1e-4), expected, rtol=1e-5, atol=1e-6)


def test_a_group_passes_the_online_filter_only_if_its_task_rewards_differ() -> None:
    assert has_signal([0.0, 0.0, 1.0])
    assert not has_signal([1.0, 1.0, 1.0])
    assert not has_signal([0.1, float(np.float32(0.1))])
