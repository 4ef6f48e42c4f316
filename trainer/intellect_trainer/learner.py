"""One step of GRPO: from groups of rollouts to optimizer updates on fp32 master weights.

The groups of a step are shuffled and dealt into `updates_per_step` minibatches, one optimizer update each
(as INTELLECT-2 makes eight updates of one set of rollouts). The shuffle depends on seed and version alone,
so a step that is repeated after a crash is the same step. Gradients are accumulated over micro-batches and
normalised by the tokens of the whole update.

An update whose loss or gradient is not finite is skipped: weights and optimizer state stay as they were.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from .config import TrainerConfig
from .loss import LossSums, LossTerms, grpo_loss
from .packing import MicroBatch, TrainRow, pack
from .policy import precision, token_logprobs, token_statistics

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMetrics:
    """What one step did, as means over its tokens (ratio_max: maximum) or its updates (grad_norm, loss)."""

    loss: float
    grad_norm: float
    kl: float
    entropy: float
    clip_fraction: float
    ratio_max: float
    log_ratio_abs: float
    tokens: int
    updates: int
    updates_skipped: int
    learning_rate: float


class Learner:
    """The policy being trained, the reference policy, and the optimizer.

    Args:
        policy: fp32 master weights, trained in place.
        reference: the policy of version 0, for the KL term.
        temperature: of the run's sampling; log-probs are log-softmax(logits / T).
    """

    def __init__(
        self, policy: nn.Module, reference: nn.Module, config: TrainerConfig, *, temperature: float
    ) -> None:
        self.policy = policy
        self.reference = reference.requires_grad_(False)
        self.updates = 0
        self._config = config
        self._terms = LossTerms(
            config.clip_epsilon, config.clip_delta, config.kl_coefficient, config.entropy_coefficient
        )
        self._temperature = temperature
        self.optimizer = torch.optim.AdamW(
            policy.parameters(),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )

    def learning_rate(self) -> float:
        """Linear warm-up over `warmup_updates` updates, then constant."""
        return self._config.learning_rate * min(1.0, (self.updates + 1) / max(1, self._config.warmup_updates))

    def step(
        self, groups: Sequence[Sequence[TrainRow]], *, version: int, check: Callable[[], None] = lambda: None
    ) -> StepMetrics:
        """Train on `groups` towards `version`; `check` is called before each micro-batch and may raise.

        After an exception the weights are between two versions: the step must be repeated from a resume
        checkpoint.
        """
        order = np.random.default_rng([self._config.seed, version]).permutation(len(groups))
        parts = [part for part in np.array_split(order, self._config.updates_per_step) if len(part)]
        sums: list[LossSums] = []
        losses: list[float] = []
        norms: list[float] = []
        skipped = 0
        rate = self.learning_rate()
        for part in parts:
            rate = self.learning_rate()
            loss, norm, of_update = self._update([groups[index] for index in part], rate, check)
            if math.isfinite(loss) and math.isfinite(norm):
                losses.append(loss)
                norms.append(norm)
                sums += of_update
            else:
                skipped += 1
                logger.warning(
                    "version %d: an update was skipped, its loss is %s and its gradient norm %s",
                    version, loss, norm,
                )  # fmt: skip
        tokens = sum(part.tokens for part in sums)
        return StepMetrics(
            loss=_mean(losses),
            grad_norm=_mean(norms),
            kl=sum(part.kl for part in sums) / max(1, tokens),
            entropy=sum(part.entropy for part in sums) / max(1, tokens),
            clip_fraction=sum(part.clipped for part in sums) / max(1, tokens),
            ratio_max=max((part.ratio_max for part in sums), default=0.0),
            log_ratio_abs=sum(part.log_ratio_abs for part in sums) / max(1, tokens),
            tokens=tokens,
            updates=len(parts) - skipped,
            updates_skipped=skipped,
            learning_rate=rate,
        )

    def _update(
        self, groups: Sequence[Sequence[TrainRow]], rate: float, check: Callable[[], None]
    ) -> tuple[float, float, list[LossSums]]:
        """One optimizer update; returns loss, gradient norm before clipping, and sums for metrics."""
        self.optimizer.zero_grad(set_to_none=True)
        total = sum(len(row.completion_tokens) for group in groups for row in group)
        loss_sum = 0.0
        sums = []
        for batch in pack(groups, max_tokens=self._config.micro_batch_tokens):
            check()
            loss, part = self._loss(batch, total)
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += float(loss.detach())
            sums.append(part)
        norm = float(nn.utils.clip_grad_norm_(self.policy.parameters(), self._config.max_grad_norm))
        if math.isfinite(loss_sum) and math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return loss_sum, norm, sums

    def _loss(self, batch: MicroBatch, total_tokens: int) -> tuple[Tensor, LossSums]:
        with precision(self._config.dtype):
            logprobs, entropies = token_statistics(self.policy, batch, temperature=self._temperature)
            reference = (
                token_logprobs(self.reference, batch, temperature=self._temperature)
                if self._config.kl_coefficient
                else logprobs.detach()
            )
        return grpo_loss(
            logprobs,
            batch.old_logprobs,
            reference,
            entropies,
            batch.advantages,
            terms=self._terms,
            total_tokens=total_tokens,
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
