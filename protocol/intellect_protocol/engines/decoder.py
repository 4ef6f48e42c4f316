"""What the torch engine needs of a model: prefill, batched decoding, states, logits.

Two implementations: `model.NativeDecoder` (Llama, Qwen2 and Qwen3 architectures, fast) and
`hf_model.TransformersDecoder` (any other causal LM). A *state* is the hidden state after the final
norm, before the LM head: `logits(state)` gives the distribution of the next token, and the state
that produced a token is what TOPLOC commits to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a loaded model."""

    model_type: str
    parameters: int
    vocab_size: int
    hidden_size: int
    context_length: int
    cache_bytes_per_token: int  # keys and values of all layers


class PromptCache(Protocol):
    """Keys and values of prefilled prompts, and the state after each one's last token."""

    @property
    def states(self) -> torch.Tensor:
        """[prompts, hidden]: the state after each prompt's last token."""
        ...


Prompts = TypeVar("Prompts", bound=PromptCache)
PromptsIn = TypeVar("PromptsIn", bound=PromptCache, contravariant=True)


class DecodeBatch(Protocol[PromptsIn]):
    """Sequences that are decoded together; rows 0 ... width - 1 are in use or released.

    `can_refill` tells whether released rows can be given to new sequences while others go on.
    """

    can_refill: bool

    def admit(self, rows: torch.Tensor, prompts: PromptsIn, index: torch.Tensor) -> None:
        """Start rows `rows` [n] from the prompts `index` [n] of a cache."""
        ...

    def release(self, rows: torch.Tensor) -> None:
        """Rows [n] have ended; they are still decoded, to no effect, until `keep` or `admit`."""
        ...

    def keep(self, rows: torch.Tensor) -> None:
        """Make the given rows [n], ascending, the rows 0 ... n - 1."""
        ...

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token [width] to every row; returns the states [width, hidden]."""
        ...


class Decoder(Protocol[Prompts]):
    """A loaded model."""

    shape: ModelShape
    attention: str

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prompts:
        """Run prompts through the model."""
        ...

    def continuation_states(
        self, prompts: Prompts, index: torch.Tensor, completions: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """States that predict each token of `completions`, whose prompt is `index` [rows] of a cache.

        Returns:
            One tensor [len(completion), hidden] per row; its first state is the prompt's last.
        """
        ...

    def sequence_states(self, tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """States after each token of whole sequences: one [len, hidden] tensor per row."""
        ...

    def new_batch(self, max_rows: int) -> DecodeBatch[Prompts]:
        """An empty batch of at most `max_rows` rows."""
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab] of states [n, hidden]."""
        ...
