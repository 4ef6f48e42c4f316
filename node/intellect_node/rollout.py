"""Making one unit of work: seeds, prompts, completions, rewards, and the rollout file.

Everything in a unit follows from its seed S, so this is a short walk: S gives the prompts, S and the
positions give the streams of every sample, the engine turns them into completions and commitments, the
environments into rewards. `UnitBuilder` has one method per subject.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import trio

from intellect_protocol.assignment import PromptSlot, prompt_slots, stream_seed, unit_seed
from intellect_protocol.checkpoint import Probe
from intellect_protocol.engines.base import (
    Completion,
    EngineInfo,
    GenerateRequest,
    RowScore,
    Sampling,
    ScoreRow,
)
from intellect_protocol.errors import EngineError, NumericError
from intellect_protocol.rollouts import EngineNote, Rollout, RolloutUnit, UnitMeta
from intellect_protocol.run import RunConfig

ROLLOUT_FORMAT = 1
# Median |difference| of the probe's log-probs in nats. Honest engines agree exactly in float32 on one machine
# and to about 1e-5 across kernels; in bfloat16 SmolLM2 had medians of 0.05 to 0.10, but single unlikely
# tokens up to 5, which rules the mean out. Another model is off by more than 1.
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}


@dataclass(frozen=True)
class Policy:
    """A verified version of the policy, on disk.

    `checkpoint_hash` and `block_hash` are C and B of the assignment, 32 bytes each.
    """

    version: int
    checkpoint_hash: bytes
    block_hash: bytes
    block_number: int
    folder: Path
    probe: Probe


class PolicyEngine(Protocol):
    """What of an engine's client a node uses."""

    @property
    def info(self) -> EngineInfo: ...
    async def update(self, checkpoint_dir: Path) -> EngineInfo: ...
    async def unload(self) -> None: ...
    async def probe(self, prompt: Sequence[int]) -> list[float]: ...
    async def generate(
        self, requests: Sequence[GenerateRequest], sampling: Sampling
    ) -> list[list[Completion]]: ...
    async def score(
        self, rows: Sequence[ScoreRow], sampling: Sampling, *, secret: bytes = ...
    ) -> list[RowScore]: ...


class Tasks(Protocol):
    """The run's environments with its tokenizer; see `validation.context.Tasks`."""

    def prompt_tokens(self, slot: PromptSlot) -> list[int]: ...
    def reward(self, slot: PromptSlot, completion: Sequence[int]) -> float: ...


class Group(msgspec.Struct, frozen=True):
    """One prompt of a unit with the stream seeds of its samples."""

    slot: PromptSlot
    prompt: list[int]
    seeds: list[bytes]


class UnitBuilder:
    """Builds units with one engine; the engine must not be used by others meanwhile."""

    def __init__(self, run: RunConfig, node: bytes, engine: PolicyEngine, tasks: Tasks) -> None:
        """
        Args:
            node: 20 address bytes of the node key.
        """
        self.run = run
        self.node = node
        self.engine = engine
        self.tasks = tasks

    async def adopt(self, policy: Policy) -> None:
        """Load a policy's weights and prove it: the probe's log-probs must be the manifest's.

        Raises:
            EngineError: reason ``probe`` where they are not, or the engine failed.
        """
        await self.engine.update(policy.folder)
        check_probe(
            await self.engine.probe(policy.probe.prompt), policy.probe.logprobs, self.run.terms.model.dtype
        )

    def stream_seeds(self, seed: bytes, prompt: int) -> list[bytes]:
        """sigma of every sample of a prompt."""
        return [stream_seed(seed, prompt, s) for s in range(self.run.terms.sampling.samples_per_prompt)]

    async def complete(self, groups: Sequence[Group]) -> list[list[Completion]]:
        """Completions of every group, in the order of its seeds."""
        terms = self.run.terms.sampling
        sampling = Sampling(
            temperature=terms.temperature, top_k=terms.top_k, top_p=terms.top_p, stop_ids=terms.stop_ids
        )
        requests = [
            GenerateRequest(prompt=group.prompt, seeds=group.seeds, max_tokens=terms.max_tokens)
            for group in groups
        ]
        return await self.engine.generate(requests, sampling)

    def proofs(self, completion: Completion) -> list[bytes]:
        """The commitments to ship with a completion."""
        return completion.proofs

    def reward(self, slot: PromptSlot, completion: Completion) -> float:
        """Task reward of a completion."""
        return self.tasks.reward(slot, completion.tokens)

    async def build(self, policy: Policy, index: int) -> RolloutUnit:
        """Unit `index` of the policy's version, which must have been adopted.

        Raises:
            EngineError: the engine failed or gave non-finite numbers; nothing is left behind.
        """
        seed = unit_seed(
            self.run.run_id,
            policy.version,
            policy.checkpoint_hash,
            policy.block_hash,
            self.node,
            index,
        )
        groups = await trio.to_thread.run_sync(self._groups, seed)
        completions = await self.complete(groups)
        rows = await trio.to_thread.run_sync(self._rows, groups, completions)
        info = self.engine.info
        note = EngineNote(info.engine, info.version, info.dtype, info.attention, info.device)
        meta = UnitMeta(
            format=ROLLOUT_FORMAT,
            run_id=self.run.run_id,
            version=policy.version,
            checkpoint_hash=policy.checkpoint_hash,
            node=self.node,
            index=index,
            engine=note,
        )
        return RolloutUnit(meta=meta, rows=rows)

    def _groups(self, seed: bytes) -> list[Group]:
        return [
            Group(slot, self.tasks.prompt_tokens(slot), self.stream_seeds(seed, p))
            for p, slot in enumerate(prompt_slots(seed, self.run.terms))
        ]

    def _rows(self, groups: Sequence[Group], completions: Sequence[Sequence[Completion]]) -> list[Rollout]:
        return [
            self._row(group, p, s, completion)
            for p, (group, samples) in enumerate(zip(groups, completions, strict=True))
            for s, completion in enumerate(samples)
        ]

    def _row(self, group: Group, prompt: int, sample: int, completion: Completion) -> Rollout:
        logprobs = np.asarray(completion.logprobs, dtype=np.float32)
        reward = self.reward(group.slot, completion)
        if not np.isfinite(logprobs).all() or not math.isfinite(reward):
            raise NumericError(
                f"sample {sample} of prompt {prompt} has a log-prob or reward that is not finite"
            )
        return Rollout(
            prompt=prompt,
            sample=sample,
            environment=group.slot.environment,
            task_index=group.slot.task_index,
            target_length=group.slot.target_length,
            prompt_tokens=group.prompt,
            completion_tokens=completion.tokens,
            logprobs=logprobs,
            finish_reason=completion.finish_reason,
            reward=reward,
            proofs=self.proofs(completion),
        )


def check_probe(measured: Sequence[float], expected: Sequence[float], dtype: str) -> None:
    """Compare an engine's probe with the manifest's.

    Raises:
        EngineError: reason ``probe``: another number of values, not finite, or too far on average.
    """
    if len(measured) != len(expected) or not measured:
        raise EngineError("probe", f"{len(measured)} probe values, the manifest has {len(expected)}")
    distance = float(np.median(np.abs(np.asarray(measured) - np.asarray(expected))))
    limit = PROBE_TOLERANCE[dtype]
    if not distance <= limit:
        raise EngineError(
            "probe", f"log-probs differ from the manifest's by {distance:.4g} at the median, limit {limit:g}"
        )
