"""The GRPO loss with the two-sided clip, token by token.

With r = exp(logp - logp_old) and the advantage A of the token's sample, per completion token

    surrogate = min( min(r, delta) * A,  clip(r, 1 - eps, 1 + eps) * A )
    k3        = exp(logp_ref - logp) - (logp_ref - logp) - 1
    loss      = ( -surrogate + c_kl * k3 - c_entropy * H ) / N

- Two-sided clip: INTELLECT-2 (arXiv 2505.07291), section 3.4. For A < 0 the plain PPO minimum leaves r
  unbounded above, so one token with r = 1000 takes over the update; delta bounds it. For A > 0 the second
  term is already the smaller one wherever r > 1 + eps, so delta changes nothing there.
- k3: Schulman's unbiased, non-negative estimator of KL(policy || reference), with its gradient through
  logp (DeepSeekMath, arXiv 2402.03300, equation 4).
- H: entropy of the policy's distribution at the token, in nats.
- N: completion tokens of the **whole** batch of the update, over all micro-batches and ranks, so that
  every token weighs the same however the batch is cut (token-level loss; DAPO, arXiv 2503.14476). Padding
  is not in the tensors at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# exp() overflows float32 at 88. Above e^20 both branches are constant (delta, 1 + eps), so the bound
# changes neither value nor gradient; it only keeps inf * 0 out of the backward pass.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossTerms:
    """Coefficients of the loss."""

    clip_epsilon: float
    clip_delta: float
    kl_coefficient: float
    entropy_coefficient: float

    def __post_init__(self) -> None:
        if not 1 + self.clip_epsilon <= self.clip_delta <= 1e6:
            raise ValueError("clip_delta must lie between 1 + clip_epsilon and 1e6")


@dataclass(frozen=True)
class LossSums:
    """Sums over the tokens of one micro-batch, for metrics; divide by the number of tokens."""

    tokens: int
    kl: float
    entropy: float
    clipped: float  # tokens whose surrogate has no gradient because a bound holds
    ratio_max: float
    log_ratio_abs: float


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    reference_logprobs: Tensor,
    entropies: Tensor,
    advantages: Tensor,
    *,
    terms: LossTerms,
    total_tokens: int,
) -> tuple[Tensor, LossSums]:
    """Loss of one micro-batch's completion tokens, as its share of the update's loss.

    Args:
        logprobs: [n] log-softmax(logits / T) of the tokens under the policy, with gradient.
        old_logprobs: [n] the same under the policy that generated them, without gradient.
        reference_logprobs: [n] the same under the reference policy, without gradient.
        entropies: [n] nats, with gradient.
        advantages: [n] of each token's sample.
        total_tokens: N, completion tokens of the whole update.

    Returns:
        The scalar loss (sum over tokens / N) and sums for metrics.
    """
    ratio = (logprobs - old_logprobs).clamp(max=_MAX_LOG_RATIO).exp()
    bounded = ratio.clamp(max=terms.clip_delta) * advantages
    clipped = ratio.clamp(1 - terms.clip_epsilon, 1 + terms.clip_epsilon) * advantages
    surrogate = torch.minimum(bounded, clipped)
    to_reference = reference_logprobs - logprobs
    kl = to_reference.exp() - to_reference - 1
    per_token = -surrogate + terms.kl_coefficient * kl - terms.entropy_coefficient * entropies
    with torch.no_grad():
        held = (ratio > 1 + terms.clip_epsilon) & (advantages > 0)
        held |= (ratio < 1 - terms.clip_epsilon) & (advantages < 0)
        held |= (ratio > terms.clip_delta) & (advantages < 0)
        sums = LossSums(
            tokens=logprobs.numel(),
            kl=float(kl.sum()),
            entropy=float(entropies.sum()),
            clipped=float(held.sum()),
            ratio_max=float(ratio.max()) if ratio.numel() else 0.0,
            log_ratio_abs=float((logprobs - old_logprobs).abs().sum()),
        )
    return per_token.sum() / total_tokens, sums
