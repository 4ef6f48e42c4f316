"""TOPLOC commitments: the wire form, what a comparison reports, and what hostile bytes can do."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from intellect_protocol import toploc
from intellect_protocol.errors import ProofError
from intellect_protocol.gf65497 import PRIME, evaluate, interpolate
from intellect_protocol.top_entries import TOP_K, Bits, TopEntries, to_bf16_bits, top_entries

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "vectors" / "toploc.json").read_text())[
    "cases"
]


def case_states(case: dict[str, Any], name: str) -> Bits:
    return np.frombuffer(base64.b64decode(case[name]), dtype="<u2").reshape(case["tokens"], case["hidden"])


def case_proofs(case: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(proof) for proof in case["proofs"]]


def library_choice(states: Bits) -> TopEntries:
    """The entries that the reference library takes: torch.topk, whose order among ties is its own."""
    rows = [states[start : start + 32] for start in range(0, len(states), 32)]
    index = []
    for row in rows:
        magnitudes = (
            torch.from_numpy(row.astype(np.uint16).view(np.int16).reshape(-1)).view(torch.bfloat16).abs()
        )
        index.append(magnitudes.topk(TOP_K).indices.numpy())
    return TopEntries(
        index=np.stack(index),
        bits=np.stack([row.reshape(-1)[chosen] for row, chosen in zip(rows, index, strict=True)]),
        entries=np.array([row.size for row in rows]),
        tokens=np.array([len(row) for row in rows]),
    )


def last_place_is_contested(chunk: Bits) -> bool:
    ordered = np.sort(chunk.reshape(-1) & 0x7FFF)[::-1]
    return bool(len(ordered) > TOP_K and ordered[TOP_K - 1] == ordered[TOP_K])


def random_bits(seed: int, tokens: int, hidden: int) -> Bits:
    states = np.random.default_rng(seed).standard_normal((tokens, hidden)).astype(np.float32)
    return to_bf16_bits(states)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_reference_librarys_proofs_are_reproduced_byte_for_byte(case: dict[str, Any]) -> None:
    states, proofs = case_states(case, "states"), case_proofs(case)
    assert toploc.encode(library_choice(states)) == proofs
    built = toploc.build(states)
    assert len(built) == len(proofs)
    for number, (own, theirs) in enumerate(zip(built, proofs, strict=True)):
        if not last_place_is_contested(states[32 * number : 32 * number + 32]):
            assert own == theirs


@pytest.mark.parametrize("states", ["states", "noisy_states"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_comparisons_agree_with_the_reference_verifier(case: dict[str, Any], states: str) -> None:
    reports = toploc.compare(library_choice(case_states(case, states)), case_proofs(case))
    expected = case["verify_same" if states == "states" else "verify_noisy"]
    assert [[r.exponent_mismatches, r.mantissa_mean, r.mantissa_median] for r in reports] == expected
    assert all(report.sign_mismatches == 0 and report.negative_share < 0.1 for report in reports)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 70),
    hidden=st.sampled_from([1, 3, 64, 65, 576]),
    kind=st.sampled_from(["bits", "float32", "float16", "torch-bf16", "torch-fp32", "torch-fp16"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_own_states_match_exactly_whatever_their_shape_and_dtype(
    tokens: int, hidden: int, kind: str, seed: int
) -> None:
    values = np.random.default_rng(seed).standard_normal((tokens, hidden)).astype(np.float32)
    half = values.astype(np.float16)
    states: Any = {
        "bits": to_bf16_bits(values),
        "float32": values,
        "float16": half,
        "torch-bf16": torch.from_numpy(values).bfloat16(),
        "torch-fp32": torch.from_numpy(values),
        "torch-fp16": torch.from_numpy(half),
    }[kind]
    proofs = toploc.build(states)
    assert [len(proof) for proof in proofs] == [258] * -(-tokens // 32)
    assert proofs == toploc.build(to_bf16_bits(half if "16" in kind and "bf16" not in kind else values))
    reports = toploc.verify(states, proofs)
    assert [report.tokens for report in reports] == [32] * (tokens // 32) + [tokens % 32] * (tokens % 32 > 0)
    for report in reports:
        assert report.compared == min(128, report.tokens * hidden)
        assert report.exponent_mismatches == report.sign_mismatches == report.collisions == 0
        assert report.mantissa_mean == report.mantissa_median == 0
        assert (report.negative_tested == 0) == (report.tokens * hidden <= 128)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(0, 6), min_size=1, max_size=400),
    k_scale=st.integers(0, 0x7F7F // 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_ties_in_magnitude_go_to_the_lower_index(values: list[int], k_scale: int, seed: int) -> None:
    magnitudes = np.array(values) * k_scale
    signs = np.random.default_rng(seed).integers(0, 2, len(values)) << 15
    top = top_entries([(magnitudes | signs).astype(np.uint16)[None]])
    ranked = sorted(range(len(values)), key=lambda i: (-int(magnitudes[i]), i))
    count = min(128, len(values))
    assert top.index[0, :count].tolist() == sorted(ranked[:count])


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 70),
    hidden=st.sampled_from([1, 5, 64, 130, 500, 513, 1030, 5000]),
    levels=st.sampled_from([1, 2, 5, 300]),
    outliers=st.integers(0, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_top_entries_are_the_largest_of_each_chunk_however_they_lie(
    tokens: int, hidden: int, levels: int, outliers: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, levels, (tokens, hidden)) * (0x4000 // levels)
    bits[:, rng.integers(0, hidden, outliers)] += 0x3000  # channels that are large in every token
    bits |= rng.integers(0, 2, bits.shape) << 15
    states = bits.astype(np.uint16)
    top = top_entries([states, states])
    for chunk in range(len(top.index)):
        start = 32 * (chunk % toploc.chunk_count(tokens))
        flat = states[start : start + 32].reshape(-1)
        count = min(128, len(flat))
        ranked = np.argsort(-(flat & 0x7FFF).astype(np.int64), kind="stable")[:count]
        assert top.index[chunk, :count].tolist() == sorted(ranked.tolist())
        assert top.bits[chunk, :count].tolist() == flat[np.sort(ranked)].tolist()
        assert (int(top.entries[chunk]), int(top.count[chunk])) == (len(flat), count)


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_rounding_to_bf16_is_that_of_torch(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    expected = torch.from_numpy(array).bfloat16().view(torch.uint16).numpy()
    assert to_bf16_bits(array).tolist() == expected.tolist()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, 3.4e38])
def test_states_that_are_not_finite_are_refused_on_both_sides(bad: float) -> None:
    states = np.ones((33, 8), dtype=np.float32)
    proofs = toploc.build(states)
    states[32, 3] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        toploc.build(states)
    with pytest.raises(ValueError, match="NaN or infinity"):
        toploc.verify(states, proofs)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (8,), (2, 2, 2)])
def test_states_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="hidden states must be"):
        toploc.build(np.zeros(shape, dtype=np.float32))


def test_states_of_another_dtype_are_refused() -> None:
    with pytest.raises(TypeError):
        toploc.build(np.zeros((2, 2)))
    with pytest.raises(TypeError):
        toploc.build(torch.zeros(2, 2, dtype=torch.int64))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_reports_do_not_depend_on_how_rows_are_batched(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [random_bits(int(rng.integers(1 << 30)), int(rng.integers(1, 80)), 96) for _ in range(5)]
    proofs = toploc.build_many(rows)
    assert proofs == [toploc.build(row) for row in rows]
    noisy = [row ^ np.uint16(1) for row in rows]
    together = toploc.verify_many(noisy, proofs, b"seed")
    assert together == [toploc.verify(row, own, b"seed") for row, own in zip(noisy, proofs, strict=True)]


def test_nothing_to_commit_to_gives_nothing() -> None:
    assert toploc.build_many([]) == []
    assert toploc.verify_many([], []) == []


def colliding_chunk() -> Bits:
    """One token of 200,000 values whose 128 largest include two that are 65497 apart."""
    flat = np.zeros(200_000, dtype=np.float32)
    flat[:126] = np.linspace(2, 3, 126)
    flat[[1000, 1000 + PRIME]] = 2.5
    return to_bf16_bits(flat[None])


def test_the_modulus_is_the_largest_that_keeps_the_indices_distinct() -> None:
    proof = toploc.build(colliding_chunk())[0]
    assert toploc.parse(proof).modulus == PRIME - 1
    report = toploc.verify(colliding_chunk(), [proof])[0]
    assert (report.exponent_mismatches, report.mantissa_mean, report.collisions) == (0, 0.0, 0)


def test_entries_that_collide_modulo_the_proofs_m_are_left_out_and_counted() -> None:
    states = colliding_chunk()
    other = states.copy()
    other[0, 1000 + PRIME] = 0
    other[0, 500] = to_bf16_bits(np.array([2.5], dtype=np.float32))[0]
    proof = toploc.build(other)[0]
    assert toploc.parse(proof).modulus == PRIME
    report = toploc.verify(states, [proof])[0]
    assert (report.collisions, report.compared, report.exponent_mismatches) == (2, 126, 0)


def test_a_chunk_that_no_modulus_keeps_distinct_cannot_be_committed_to() -> None:
    # 128 indices whose differences are divisible by every modulus from 60001 on would be hard to find;
    # two equal indices have all of them.
    index = np.arange(TOP_K)[None].copy()
    index[0, 1] = 0
    top = TopEntries(index, np.ones((1, TOP_K), np.uint16), np.array([1000]), np.array([1]))
    with pytest.raises(ValueError, match="no modulus"):
        toploc.encode(top)


def test_a_proof_says_what_its_coefficients_say() -> None:
    states = random_bits(3, 32, 64)
    parsed = toploc.parse(toploc.build(states)[0])
    top = top_entries([states])
    values = evaluate(np.array([parsed.coefficients]), top.index % parsed.modulus)
    assert values[0].tolist() == top.bits[0].tolist()


@settings(max_examples=30, deadline=None)
@given(modulus=st.integers(toploc.MIN_MODULUS, PRIME), seed=st.integers(0, 2**32 - 1))
def test_the_proofs_own_modulus_holds_for_indices_beyond_it(modulus: int, seed: int) -> None:
    """At hidden 4096 a chunk has twice as many entries as residues."""
    rng = np.random.default_rng(seed)
    index = np.sort(rng.choice(4096 * 32, TOP_K, replace=False))[None]
    assume(len(set((index % modulus)[0].tolist())) == TOP_K)
    bits = rng.integers(0x3F80, 0x4080, (1, TOP_K)).astype(np.uint16)
    top = TopEntries(index, bits, np.array([4096 * 32]), np.array([32]))
    coefficients = interpolate(index % modulus, bits.astype(np.int64), np.array([TOP_K]))
    report = toploc.compare(top, [forged(modulus, coefficients[0].tolist())])[0]
    assert (report.compared, report.exponent_mismatches, report.mantissa_mean) == (TOP_K, 0, 0.0)
    assert report.sign_mismatches == report.collisions == 0


def words(proof: bytes) -> npt.NDArray[np.uint16]:
    return np.frombuffer(proof, dtype=">u2").astype(np.uint16)


def forged(modulus: int, coefficients: list[int]) -> bytes:
    return np.array([modulus, *coefficients], dtype=">u2").tobytes()


def test_a_constant_polynomial_passes_every_comparison_and_fails_the_negative_check() -> None:
    states = case_states(CASES[3], "states")[:32]
    top = top_entries([states])
    exponents = (top.bits >> 7) & 0xFF
    common = int(np.bincount(exponents[0]).argmax())
    report = toploc.verify(states, [forged(PRIME, [common << 7 | 40, *[0] * 127])])[0]
    assert report.exponent_mismatches <= 60
    assert report.mantissa_mean <= 40
    assert report.negative_share == 1.0
    honest = toploc.verify(states, toploc.build(states))[0]
    assert honest.negative_tested > 100
    assert honest.negative_share < 0.1


def test_a_polynomial_with_flipped_signs_is_told_from_the_real_one() -> None:
    states = random_bits(5, 32, 64)
    report = toploc.verify(states, toploc.build(states ^ np.uint16(0x8000)))[0]
    assert (report.exponent_mismatches, report.sign_mismatches) == (0, 128)


def test_a_proof_of_other_states_disagrees_almost_everywhere() -> None:
    report = toploc.verify(random_bits(1, 32, 576), toploc.build(random_bits(2, 32, 576)))[0]
    assert report.exponent_mismatches > 100
    assert report.mantissa_mean > 10


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 32))
def test_small_noise_shows_in_the_mantissas_and_not_in_the_exponents(seed: int, tokens: int) -> None:
    rng = np.random.default_rng(seed)
    states = rng.standard_normal((tokens, 576)).astype(np.float32)
    noisy = states * (1 + 0.004 * rng.standard_normal(states.shape).astype(np.float32))
    report = toploc.verify(noisy, toploc.build(states))[0]
    assert report.exponent_mismatches <= 12
    assert 0.1 < report.mantissa_mean < 2


def test_the_negative_check_looks_elsewhere_for_another_seed() -> None:
    states = random_bits(8, 32, 576)
    constant = [forged(PRIME, [int(top_entries([states]).bits[0, 0]), *[0] * 126, 1])]
    reports = {toploc.verify(states, constant, seed)[0].negative_tested for seed in (b"a", b"b", b"c", b"d")}
    assert len(reports) > 1
    assert toploc.verify(states, constant, b"a") == toploc.verify(states, constant, b"a")


@pytest.mark.parametrize(
    ("proof", "text"),
    [
        (b"", "0 bytes"),
        (bytes(257), "257 bytes"),
        (bytes(259), "259 bytes"),
        (forged(0, [0] * 128), "modulus 0"),
        (forged(60000, [0] * 128), "modulus 60000"),
        (forged(65498, [0] * 128), "modulus 65498"),
        (forged(65535, [0] * 128), "modulus 65535"),
        (forged(PRIME, [0] * 127 + [PRIME]), "coefficient of 65497"),
    ],
)
def test_a_malformed_proof_is_an_error_that_says_what_is_wrong(proof: bytes, text: str) -> None:
    with pytest.raises(ProofError, match=text):
        toploc.parse(proof)
    with pytest.raises(ProofError, match=f"proof 0 .*{text}"):
        toploc.verify(random_bits(0, 4, 64), [proof])


def test_the_first_malformed_proof_of_a_row_is_named() -> None:
    states = random_bits(0, 100, 64)
    proofs = toploc.build(states)
    proofs[2] = proofs[3] = forged(1, [0] * 128)
    with pytest.raises(ProofError, match="proof 2 has modulus 1"):
        toploc.verify(states, proofs)
    short = random_bits(0, 33, 2)
    proofs = toploc.build(short)
    proofs[1] = proofs[0]
    with pytest.raises(ProofError, match=r"proof 1 has more terms than its chunk has entries \(2\)"):
        toploc.verify(short, proofs)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_number_of_proofs_must_be_exact(count: int) -> None:
    states = random_bits(0, 40, 64)
    with pytest.raises(ProofError, match=f"{count} proofs for 40 tokens, there must be 2"):
        toploc.verify(states, (toploc.build(states) * 2)[:count])


def test_a_chunk_of_few_entries_has_no_terms_past_them() -> None:
    states = random_bits(0, 1, 64)
    proof = toploc.build(states)[0]
    assert not words(proof)[65:].any()
    changed = words(proof)
    changed[65] = 1
    with pytest.raises(ProofError, match="more terms than its chunk has entries"):
        toploc.verify(states, [changed.astype(">u2").tobytes()])


@settings(max_examples=300, deadline=None)
@given(proofs=st.lists(st.binary(max_size=300) | st.binary(min_size=258, max_size=258), max_size=3))
def test_arbitrary_bytes_never_crash_and_never_pass(proofs: list[bytes]) -> None:
    states = random_bits(0, 32, 64)
    assume(proofs != toploc.build(states))
    try:
        reports = toploc.verify(states, proofs)
    except ProofError:
        return
    assert reports[0].exponent_mismatches > 60


@settings(max_examples=200, deadline=None)
@given(
    modulus=st.integers(toploc.MIN_MODULUS, toploc.MAX_MODULUS),
    head=st.lists(st.integers(0, PRIME - 1), min_size=1, max_size=8),
    tokens=st.integers(1, 32),
)
def test_well_formed_forgeries_never_crash_and_never_pass(modulus: int, head: list[int], tokens: int) -> None:
    states = case_states(CASES[3], "states")[:tokens]
    report = toploc.verify(states, [forged(modulus, head + [0] * (128 - len(head)))])[0]
    assert report.exponent_mismatches > 28 or report.mantissa_mean > 10 or report.negative_share > 0.5
