"""What an engine is: requests, completions, scores, and the interface every engine implements.

An engine holds one policy. It generates completions with the seeded sampler and commits to the
hidden states behind them, and it scores completions of others: a prefill that gives log-probs,
sampling distances and the verdict of the commitments. Tensors never leave the engine; everything
here is plain data, so that a parent process needs neither torch nor transformers.

`Engine` is synchronous and lives in a child process (`child.py`); the rest of the project talks to
it through `supervisor.open_engine`, whose client has the same methods as coroutines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from ..errors import UsageError
from ..toploc import ChunkReport

MAX_ROWS = 65_536
MAX_ROW_TOKENS = 131_072
MAX_STOP_IDS = 64
SEED_BYTES = 32

FinishReason = Literal["stop", "length"]


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are drawn; the same for every row of a call."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1.0: off
    stop_ids: list[int] = msgspec.field(default_factory=list)  # drawn as any token, then the row ends

    def check(self) -> None:
        """Raise UsageError where a value makes no sense."""
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise UsageError(f"temperature must be positive and finite, not {self.temperature}")
        if self.top_k < 0:
            raise UsageError(f"top_k must not be negative, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be in (0, 1], not {self.top_p}")
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise UsageError(f"more than {MAX_STOP_IDS} stop ids")


class GenerateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The samples of one prompt (a group): one completion for each seed."""

    prompt: list[int]
    seeds: list[bytes]  # sigma of each sample, 32 bytes (04-verification, section 1)
    max_tokens: int  # tokens to generate at most, the stop token included

    def check(self) -> None:
        """Raise UsageError where a value is out of its limits."""
        if not self.prompt:
            raise UsageError("an empty prompt cannot be continued")
        if not 1 <= self.max_tokens <= MAX_ROW_TOKENS - len(self.prompt):
            raise UsageError(f"prompt and completion must fit into {MAX_ROW_TOKENS} tokens")
        if any(len(seed) != SEED_BYTES for seed in self.seeds):
            raise UsageError(f"a sample's seed has {SEED_BYTES} bytes")


class Completion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sample: what the policy said after the prompt, and what proves it."""

    tokens: list[int]  # [n], n >= 1; the stop token is the last one where finish_reason is "stop"
    logprobs: list[float]  # [n] log-softmax(logits / T) of the raw policy (before top-k/top-p), float32
    finish_reason: FinishReason
    proofs: list[bytes]  # [ceil(n / 32)] TOPLOC commitments of the states that produced the tokens


class ScoreRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One completion to be scored; rows with the same prompt that stand together share its prefill."""

    prompt: list[int]
    completion: list[int]
    seed: bytes  # sigma of the sample
    proofs: list[bytes]

    def check(self) -> None:
        """Raise UsageError where a value is out of its limits."""
        if not self.prompt or not self.completion:
            raise UsageError("a row to score has a prompt and a completion")
        if len(self.prompt) + len(self.completion) > MAX_ROW_TOKENS:
            raise UsageError(f"prompt and completion must fit into {MAX_ROW_TOKENS} tokens")
        if len(self.seed) != SEED_BYTES:
            raise UsageError(f"a sample's seed has {SEED_BYTES} bytes")


class RowScore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the scoring policy says about a row; n is the length of the completion."""

    logprobs: list[float]  # [n] log-softmax(logits / T) of the completion's tokens, float32
    distances: list[float]  # [n] gap between the token's uniform and its CDF interval, 0 if inside
    exact: list[bool]  # [n] the token is the scorer's own draw
    top_prob: list[float]  # [n] largest probability of the distribution that was drawn from
    chunk_reports: list[ChunkReport]  # [ceil(n / 32)], empty where proof_error is set
    proof_error: str = ""  # why the proofs could not be read; "" if they were


class EngineInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What made a completion; recorded with each submission."""

    engine: str  # "torch", "vllm"
    version: str
    dtype: str  # "float32", "bfloat16"
    attention: str  # attention kernel
    device: str  # "cpu", "cuda:0"
    torch: str
    model_type: str
    parameters: int
    vocab_size: int
    hidden_size: int
    context_length: int  # positions the model was made for
    max_rows: int  # sequences decoded or scored at once


CompletionSink = Callable[[int, int, Completion], None]
"""Receives (request index, seed index, completion), in any order."""
ScoreSink = Callable[[int, RowScore], None]
"""Receives (row index, score), in any order."""
Progress = Callable[[int], None]
"""Receives the number of tokens computed since the call began; called only when it has grown."""


class Engine(Protocol):
    """One policy on one device. Not thread-safe: one call at a time."""

    def load(self, checkpoint_dir: Path) -> EngineInfo:
        """Load config.json and *.safetensors of a folder.

        Raises:
            ConfigError: the folder does not hold a model that this engine can run.
            PreflightError: the device or the memory does not suffice.
        """
        ...

    def update(self, checkpoint_dir: Path) -> EngineInfo:
        """Swap in the weights of another version of the loaded model; the next call uses them.

        Raises:
            ConfigError: another architecture, or tensors that do not fit.
        """
        ...

    def probe(self, prompt: Sequence[int]) -> list[float]:
        """Log-probs of a fixed token sequence at T = 1.

        Returns:
            [len(prompt) - 1] float32: for every position after the first, log-softmax(logits) of the
            token that stands there. Two engines that hold the same weights agree up to their dtype.
        """
        ...

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        sampling: Sampling,
        deliver: CompletionSink,
        progress: Progress,
    ) -> None:
        """Generate one completion per seed and deliver each as soon as it is complete.

        Raises:
            UsageError: a request out of its limits.
            NumericError: a logit is not finite.
        """
        ...

    def score(
        self,
        rows: Sequence[ScoreRow],
        sampling: Sampling,
        secret: bytes,
        deliver: ScoreSink,
        progress: Progress,
    ) -> None:
        """Prefill rows under the loaded policy and deliver each one's score.

        Args:
            secret: chooses where the negative check of the commitments looks (`toploc.verify`'s seed);
                the same secret gives the same reports.

        Raises:
            UsageError: a row out of its limits (token ids outside the vocabulary included).
            NumericError: a logit is not finite.
        """
        ...

    def unload(self) -> None:
        """Free the weights and caches."""
        ...
