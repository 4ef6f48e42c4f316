"""Assignment: what a node must generate follows from seeds it cannot choose.

For policy version v with checkpoint hash C recorded in block B, node N and unit index i:

    S     = SHA-256("intellect/assign/1" | run_id | u64 v | C | B | N | u32 i)
    draw  = SHA-256("intellect/prompt/1" | S | u32 p)             the unit's prompt p
    sigma = SHA-256("intellect/sample/1" | S | u32 p | u32 s)     stream of its sample s

A draw is read as little-endian u64 words: word 0 picks the environment (mod the sum of weights,
in the order of the run's terms), word 1 is the task index given to it, word 2 picks the target
length (mod the number of target lengths). See `sampling` for what a stream seed does.
"""

from __future__ import annotations

import struct

import msgspec

from .run import RunTerms
from .wire import sha256, u32, u64


class PromptSlot(msgspec.Struct, frozen=True):
    """One prompt of a unit."""

    environment: str
    task_index: int  # u64; the environment maps it to a problem of its train split
    target_length: int  # tokens; 0 where the run asks for none


def unit_seed(
    run_id: bytes, version: int, checkpoint_hash: bytes, block_hash: bytes, node: bytes, index: int
) -> bytes:
    """S of one unit (32 bytes).

    Args:
        run_id, checkpoint_hash, block_hash: 32 bytes each.
        node: the node key's 20 address bytes.

    Raises:
        ValueError: a field has the wrong length.
    """
    if any(len(field) != 32 for field in (run_id, checkpoint_hash, block_hash)) or len(node) != 20:
        raise ValueError("run id, checkpoint hash and block hash have 32 bytes, a node address has 20")
    return sha256(b"intellect/assign/1", run_id, u64(version), checkpoint_hash, block_hash, node, u32(index))


def prompt_slot(seed: bytes, prompt: int, terms: RunTerms) -> PromptSlot:
    """The environment, task and target length of prompt `prompt` of the unit with seed `seed`."""
    draw = sha256(b"intellect/prompt/1", seed, u32(prompt))
    which, task_index, length = struct.unpack("<3Q", draw[:24])
    targets = terms.sampling.target_lengths
    return PromptSlot(
        environment=_pick_environment(which, terms),
        task_index=task_index,
        target_length=targets[length % len(targets)] if targets else 0,
    )


def _pick_environment(draw: int, terms: RunTerms) -> str:
    rest = draw % sum(environment.weight for environment in terms.environments)
    for environment in terms.environments:
        if rest < environment.weight:
            return environment.name
        rest -= environment.weight
    raise AssertionError("weights are positive")


def prompt_slots(seed: bytes, terms: RunTerms) -> list[PromptSlot]:
    """All prompts of a unit, in order."""
    return [prompt_slot(seed, p, terms) for p in range(terms.sampling.prompts_per_unit)]


def stream_seed(seed: bytes, prompt: int, sample: int) -> bytes:
    """sigma: the 32-byte seed of the uniforms of sample `sample` of prompt `prompt`."""
    return sha256(b"intellect/sample/1", seed, u32(prompt), u32(sample))
