"""A fuzzer for the commitments' verifier: whatever bytes come, no crash, and no verdict but fraud."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from intellect_protocol import toploc
from intellect_protocol.engines.base import RowScore
from intellect_protocol.errors import ProofError
from intellect_protocol.top_entries import Bits, to_bf16_bits
from intellect_protocol.validation.commitment import check_commitments
from intellect_protocol.validation.findings import Finding, Kind
from intellect_protocol.validation.limits import LIMITS_BF16

SHAPES = [(1, 64), (20, 64), (33, 64), (40, 576), (70, 96)]
KINDS = ["bytes", "short", "long", "empty", "well-formed", "low degree"]
KINDS += ["swap", "flip", "scale", "count", "nothing"]
Mutation = tuple[str, list[bytes]]


def states_of(tokens: int, hidden: int, seed: int) -> Bits:
    """Like real ones: a few channels hold most of the large values."""
    rng = np.random.default_rng(seed)
    states = rng.standard_normal((tokens, hidden)).astype(np.float32)
    states[:, rng.integers(0, hidden, 3)] *= 20
    return to_bf16_bits(states)


def word(rng: random.Random) -> int:
    edges = [0, 1, 0x3F80, 0x7F80, 0x8000, 60_000, 60_001, 65_496, 65_497, 65_498, 65_535]
    return rng.choice([*edges, rng.getrandbits(16)])


def mutated(honest: list[bytes], rng: random.Random) -> Mutation:
    """The proofs of a row, after something has been done to them that an honest worker never does."""
    proofs = list(honest)
    place = rng.randrange(len(proofs))
    proof = bytearray(proofs[place])
    kind = rng.choice(KINDS)
    if kind == "bytes":
        proofs[place] = rng.randbytes(toploc.PROOF_BYTES)
    elif kind == "short":
        proofs[place] = bytes(proof[: rng.randrange(len(proof))])
    elif kind == "long":
        proofs[place] = bytes(proof) + rng.randbytes(rng.randrange(1, 5000))
    elif kind == "empty":
        proofs[place] = b""
    elif kind == "well-formed":
        words = [rng.randint(60_001, 65_497), *(rng.randrange(65_497) for _ in range(128))]
        proofs[place] = np.array(words, ">u2").tobytes()
    elif kind == "low degree":
        words = [rng.randint(60_001, 65_497), *(word(rng) for _ in range(rng.randrange(1, 8)))]
        proofs[place] = np.array(words + [0] * (129 - len(words)), ">u2").tobytes()
    elif kind == "swap":
        first, second = rng.sample(range(1, 129), 2)
        words = np.frombuffer(bytes(proof), ">u2").copy()
        words[[first, second]] = words[[second, first]]
        proofs[place] = words.tobytes()
    elif kind == "flip":
        # Not the constant term: one more or less there moves all values by one bit, as honest noise does.
        proof[rng.randrange(4, len(proof))] ^= 1 << rng.randrange(8)
        proofs[place] = bytes(proof)
    elif kind == "scale":
        words = np.frombuffer(bytes(proof), ">u2").astype(np.int64)
        words[1:] = words[1:] * rng.randrange(2, 65_497) % 65_497
        proofs[place] = words.astype(">u2").tobytes()
    elif kind == "count":
        proofs = proofs * rng.randrange(2, 5)
    else:
        proofs = []
    return kind, proofs


def graded(tokens: int, reports: list[toploc.ChunkReport]) -> list[Finding]:
    score = RowScore([0.0] * tokens, [0.0] * tokens, [True] * tokens, [0.5] * tokens, reports)
    return check_commitments([score], LIMITS_BF16)


def fuzz(cases: int, seed: int) -> Counter[str]:
    """Feed `cases` mutations; returns how many ended how.

    Raises:
        AssertionError: one was accepted, or left the verifier by another way than a report or a ProofError.
    """
    rng = random.Random(seed)
    rows = [states_of(tokens, hidden, seed + place) for place, (tokens, hidden) in enumerate(SHAPES)]
    honest = [toploc.build(row) for row in rows]
    ends: Counter[str] = Counter()
    for _ in range(cases):
        number = rng.randrange(len(rows))
        kind, proofs = mutated(honest[number], rng)
        if proofs == honest[number]:
            continue
        try:
            reports = toploc.verify(rows[number], proofs, rng.randbytes(4))
        except ProofError:
            ends["refused"] += 1
            continue
        found = graded(len(rows[number]), reports)
        assert any(finding.kind is Kind.FRAUD for finding in found), (kind, SHAPES[number], proofs)
        ends[kind] += 1
    return ends


def test_nothing_that_a_fuzzer_makes_of_honest_proofs_passes() -> None:
    ends = fuzz(1500, seed=1)
    assert ends["refused"] > 300
    assert {"well-formed", "low degree", "swap", "flip", "scale"} < set(ends)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_nothing_passes_in_a_long_run_of_the_fuzzer_either(seed: int) -> None:
    assert fuzz(50_000, seed=100 + seed).total() > 45_000


def test_the_fuzzers_honest_proofs_pass() -> None:
    for place, (tokens, hidden) in enumerate(SHAPES):
        row = states_of(tokens, hidden, 1 + place)
        score = RowScore(
            [0.0] * tokens,
            [0.0] * tokens,
            [True] * tokens,
            [0.5] * tokens,
            toploc.verify(row, toploc.build(row)),
        )
        assert check_commitments([score], LIMITS_BF16) == []
