"""Hidden states and logits of given completions, for what an engine's scores do not show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from intellect_protocol.engines.decoder import Decoder
from intellect_protocol.engines.hf_model import TransformersDecoder
from intellect_protocol.engines.model import NativeDecoder
from intellect_protocol.engines.model_config import native_config
from intellect_protocol.engines.weights import load_tensors, read_json

Row = tuple[Sequence[int], Sequence[int]]
"""(prompt, completion) token ids."""


@torch.inference_mode()
def load_decoder(folder: Path, dtype: str) -> Decoder[Any]:
    """The policy in a checkpoint folder, on the CPU.

    Raises:
        ConfigError: the folder does not hold a model that can be run.
    """
    kind, device = getattr(torch, dtype), torch.device("cpu")
    native = native_config(read_json(folder / "config.json"))
    if native is None:
        return TransformersDecoder(folder, kind, device)
    return NativeDecoder(native, load_tensors(folder, kind, device))


@torch.inference_mode()
def states_of(decoder: Decoder[Any], rows: Sequence[Row]) -> list[torch.Tensor]:
    """[len(completion), hidden] per row: the states that its tokens were drawn from."""
    sequences = [[*prompt, *completion[:-1]] for prompt, completion in rows]
    states = decoder.sequence_states(sequences)
    return [own[len(prompt) - 1 :] for own, (prompt, _) in zip(states, rows, strict=True)]


def policy_states(folder: Path, dtype: str, rows: Sequence[Row]) -> list[torch.Tensor]:
    """`states_of` with the policy of a folder. Errors as `load_decoder`."""
    return states_of(load_decoder(folder, dtype), rows)
