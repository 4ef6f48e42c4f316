"""Score one row of 32,768 tokens and print by how much the process has grown at its peak."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import example_unit
import numpy as np
import torch
from example_unit import load, write_tiny_model

from intellect_protocol.engines.base import RowScore, Sampling, ScoreRow
from intellect_protocol.toploc import PROOF_BYTES, chunk_count

PROMPT, COMPLETION, VOCABULARY = 1024, 31_744, 8192


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def row(prompt: int, completion: int) -> ScoreRow:
    rng = np.random.default_rng(0)
    proofs = [bytes(PROOF_BYTES)] * chunk_count(completion)
    tokens = rng.integers(0, VOCABULARY, prompt + completion).tolist()
    return ScoreRow(tokens[:prompt], tokens[prompt:], bytes(32), proofs)


def main(folder: Path) -> None:
    example_unit.VOCAB, example_unit.POSITIONS = VOCABULARY, PROMPT + COMPLETION
    torch.set_num_threads(1)
    engine = load(write_tiny_model(folder, seed=0))
    scores: dict[int, RowScore] = {}
    engine.score([row(100, 100)], Sampling(), b"", scores.__setitem__, lambda tokens: None)
    before = peak_bytes()
    engine.score([row(PROMPT, COMPLETION)], Sampling(), b"", scores.__setitem__, lambda tokens: None)
    result = {
        "tokens": PROMPT + COMPLETION,
        "scored": len(scores[0].logprobs),
        "growth_bytes": peak_bytes() - before,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
