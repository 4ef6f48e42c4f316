"""What a validator knows about a unit besides its file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..assignment import PromptSlot, prompt_slots, unit_seed
from ..engines.base import RowScore, Sampling, ScoreRow
from ..rollouts import FileLimits
from ..run import RunConfig
from .findings import ALL_CHECKS, Check


class Tasks(Protocol):
    """The run's environments together with its tokenizer: prompts and rewards in token ids.

    Both methods are deterministic: every validator and every node gets the same answer.
    """

    def prompt_tokens(self, slot: PromptSlot) -> list[int]:
        """The prompt that a slot stands for."""
        ...

    def reward(self, slot: PromptSlot, completion: Sequence[int]) -> float:
        """Task reward of a completion (token ids, the stop token included where there is one)."""
        ...


class Scorer(Protocol):
    """A supervised engine that holds the weights of the unit's version."""

    async def score(self, rows: Sequence[ScoreRow], sampling: Sampling, secret: bytes) -> list[RowScore]:
        """Prefill rows; see `engines.base.Engine.score`. The answer is in the order of the rows.

        Raises:
            EngineError: the engine failed; the work is to be judged again.
        """
        ...


@dataclass(frozen=True)
class UnitContext:
    """One submission's claims and the run it belongs to.

    Attributes:
        version, checkpoint_hash, block_hash: the policy version, its recorded manifest hash C (32 bytes)
            and the hash B of the block that recorded it (32 bytes), all as the ledger has them.
        node: 20 address bytes of the node key.
        index: which unit of this node and version.
        file_hash, size_bytes, work_signature: as submitted.
        secret: the validator's, chooses where the commitments' negative check looks; recorded with the
            verdict, so that an audit repeats it.
        checks: which checks run. All, except in tests that show what a check is good for.
    """

    run: RunConfig
    version: int
    checkpoint_hash: bytes
    block_hash: bytes
    node: bytes
    index: int
    file_hash: bytes
    size_bytes: int
    work_signature: bytes
    tasks: Tasks
    secret: bytes = b""
    checks: frozenset[Check] = field(default=ALL_CHECKS, kw_only=True)

    @property
    def seed(self) -> bytes:
        """S of the unit, 32 bytes."""
        return unit_seed(
            self.run.run_id, self.version, self.checkpoint_hash, self.block_hash, self.node, self.index
        )

    @property
    def slots(self) -> list[PromptSlot]:
        """The unit's prompts, in order."""
        return prompt_slots(self.seed, self.run.terms)

    @property
    def file_limits(self) -> FileLimits:
        """Bounds on the file. Rows longer than the run allows are read, to be refused by name in check 6."""
        terms = self.run.terms
        return FileLimits(
            max_rows=terms.sampling.prompts_per_unit * terms.sampling.samples_per_prompt,
            max_prompt_tokens=terms.model.max_positions,
            max_completion_tokens=terms.model.max_positions,
            max_file_bytes=self.run.revision.window.max_submission_bytes,
        )

    @property
    def sampling(self) -> Sampling:
        """How the run draws tokens, as an engine wants it."""
        terms = self.run.terms.sampling
        return Sampling(
            temperature=terms.temperature, top_k=terms.top_k, top_p=terms.top_p, stop_ids=terms.stop_ids
        )
