"""Attacks on the commitments: forged, replayed and malformed proofs of honest tokens."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from adversaries import (
    FlippedSigns,
    TypicalConstant,
    TypicalStates,
    hidden_states,
    typical_state,
    typical_value,
)
from arena import Arena, codes
from example_unit import with_row
from verdicts import assert_only_caught_by

from intellect_node.devnet.cheats import ConstantProof
from intellect_protocol import toploc
from intellect_protocol.rollouts import RolloutUnit
from intellect_protocol.validation.findings import Check, Outcome


@pytest.fixture(scope="module")
def unit(arena: Arena) -> RolloutUnit:
    return arena.build()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("attack", "code"),
    [
        (ConstantProof, "commitment_negative"),
        (TypicalConstant, "commitment_negative"),
        (FlippedSigns, "commitment_signs"),
        (TypicalStates, "commitment_exponents"),
    ],
)
def test_forged_commitments_are_fraud(
    attack: type[ConstantProof | FlippedSigns | TypicalConstant | TypicalStates],
    code: str,
    dtype: str,
    arena: Arena,
    arena_bf16: Arena,
    unit: RolloutUnit,
) -> None:
    attacked = arena if dtype == "float32" else arena_bf16
    factory = attack
    seen = unit.rows[:8]
    if attack is TypicalConstant:
        states = hidden_states(arena.engine._loaded(), seen[0].prompt_tokens, [seen[0].completion_tokens])
        factory = type("Constant", (TypicalConstant,), {"bits": typical_value(states)})
    if attack is TypicalStates:
        state = typical_state(
            arena.engine._loaded(), seen[0].prompt_tokens, [row.completion_tokens for row in seen]
        )
        factory = type("Typical", (TypicalStates,), {"typical": state})
    assert_only_caught_by(attacked, attacked.build(factory), {Check.COMMITMENT: code})


def test_flipped_signs_pass_every_comparison_but_that_of_signs(arena: Arena) -> None:
    judgement = arena.judge(arena.build(FlippedSigns))
    assert codes(judgement) == {"commitment_signs"}


def test_a_proof_of_another_row_is_fraud_in_that_row_alone(arena: Arena, unit: RolloutUnit) -> None:
    one, other = longest(unit)
    cheat = with_row(unit, one, proofs=unit.rows[other].proofs)
    assert_only_caught_by(arena, cheat, {Check.COMMITMENT: "commitment_exponents"})
    assert {finding.row for finding in arena.judge(cheat).findings} == {one}


def longest(unit: RolloutUnit) -> list[int]:
    """The two rows with most tokens: of two chunks each."""
    rows = sorted(range(len(unit.rows)), key=lambda n: -len(unit.rows[n].completion_tokens))[:2]
    assert len(unit.rows[rows[1]].proofs) == 2
    return rows


def words(proof: bytes) -> np.ndarray:
    return np.frombuffer(proof, dtype=">u2").copy()


def with_word(proof: bytes, place: int, value: int) -> bytes:
    changed = words(proof)
    changed[place] = value
    return changed.tobytes()


Malform = Callable[[list[bytes]], list[bytes]]
MALFORMED: dict[str, Malform] = {
    "none": lambda own: [],
    "one too few": lambda own: own[:-1],
    "one too many": lambda own: [*own, own[0]],
    "as many as tokens": lambda own: own * 7,
    "empty": lambda own: [b"", *own[1:]],
    "a byte short": lambda own: [own[0][:-1], *own[1:]],
    "a byte long": lambda own: [own[0] + b"\0", *own[1:]],
    "three in one": lambda own: [own[0] * 3, *own[1:]],
    "zeros": lambda own: [bytes(toploc.PROOF_BYTES)] * len(own),
    "all bits set": lambda own: [b"\xff" * toploc.PROOF_BYTES] * len(own),
    "modulus 0": lambda own: [with_word(own[0], 0, 0), *own[1:]],
    "modulus 1": lambda own: [with_word(own[0], 0, 1), *own[1:]],
    "modulus 60000": lambda own: [with_word(own[0], 0, 60_000), *own[1:]],
    "modulus 65498": lambda own: [with_word(own[0], 0, 65_498), *own[1:]],
    "coefficient 65497": lambda own: [with_word(own[0], 5, 65_497), *own[1:]],
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_proofs_are_fraud_before_any_state_is_computed(
    kind: str, arena: Arena, unit: RolloutUnit
) -> None:
    row = longest(unit)[0]
    cheat = with_row(unit, row, proofs=MALFORMED[kind](unit.rows[row].proofs))
    judgement = arena.judge(cheat)
    assert {(f.check, f.code, f.row) for f in judgement.findings} == {(Check.COMMITMENT, "proof_form", row)}
    assert judgement.fraud
    assert arena.judge(cheat, Check.COMMITMENT).outcome is Outcome.ACCEPTED


def test_terms_that_a_short_chunk_has_no_entries_for_are_fraud(arena: Arena, unit: RolloutUnit) -> None:
    """64 entries of one token's state leave half of the polynomial free to bend elsewhere."""
    short = next(n for n, row in enumerate(unit.rows) if len(row.completion_tokens) % 32 == 1)
    proofs = list(unit.rows[short].proofs)
    proofs[-1] = with_word(proofs[-1], 128, 7)
    assert_only_caught_by(arena, with_row(unit, short, proofs=proofs), {Check.COMMITMENT: "proof_form"})


def test_chunks_in_another_order_are_fraud(arena: Arena, unit: RolloutUnit) -> None:
    row = longest(unit)[0]
    cheat = with_row(unit, row, proofs=unit.rows[row].proofs[::-1])
    assert_only_caught_by(arena, cheat, {Check.COMMITMENT: "commitment_exponents"})


@pytest.mark.parametrize("seed", range(4))
def test_random_well_formed_proofs_are_fraud(seed: int, arena: Arena, unit: RolloutUnit) -> None:
    rng = np.random.default_rng(seed)
    rows = []
    for row in unit.rows:
        proofs = [
            np.concatenate([[65_497 - seed], rng.integers(0, 65_497, 128)]).astype(">u2").tobytes()
            for _ in row.proofs
        ]
        short = [toploc.chunk_count(len(row.completion_tokens)) - 1] * (len(row.completion_tokens) % 32 == 1)
        for place in short:
            proofs[place] = row.proofs[place]
        rows.append(msgspec.structs.replace(row, proofs=proofs))
    cheat = RolloutUnit(unit.meta, rows)
    assert_only_caught_by(arena, cheat, {Check.COMMITMENT: "commitment_exponents"})
