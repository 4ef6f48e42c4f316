"""TOPLOC commitments: short proofs that tokens came out of a given model's hidden states.

For each chunk of 32 generated tokens the worker takes the final hidden states that produced them (after the
last norm, before the LM head) as bf16, flattened; of these the 128 entries largest in magnitude; and
publishes a polynomial over GF(65497) through the points (index mod m, bf16 bits). The verifier recomputes the
states with its own forward pass, evaluates the polynomial at *its* top entries and compares sign, exponent
and mantissa. Numeric noise moves mantissas by a unit or two; another model moves exponents.

The wire form is that of the TOPLOC paper (arXiv 2501.16007) and its library: two big-endian bytes m, then 128
big-endian 16-bit coefficients in ascending powers. Among entries of equal magnitude at the 128th place the
lower index is taken; the library leaves that to torch.topk, whose choice depends on device and version, so
proofs of such chunks differ from the library's, and match it in all but the tied entries.

The verifier differs from the library's:

- a proof that is not exactly of that form is an error, not a crash;
- the proof's own modulus holds on every path; the verifier's entries that collide modulo m are left out of
  the comparison and counted;
- sign is compared;
- the polynomial is also evaluated away from the top entries. An honest one is noise there; a constant one
  (which would pass every comparison on real states, whose top entries share two or three exponents) is not.

What this cannot see, whatever the limits: policies a few small steps apart, and the last token of a row (no
state follows it). Seeded sampling covers both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from . import gf65497
from .errors import ProofError
from .top_entries import CHUNK_TOKENS, TOP_K, Bits, Ints, States, TopEntries, top_entries

PROOF_BYTES = 2 + 2 * TOP_K
MAX_MODULUS = gf65497.PRIME
MIN_MODULUS = 60001
MAX_MANTISSA_ERROR = 127.0
"""Largest difference of two 7-bit mantissas; reported where no exponent agrees."""

_NEGATIVE_DRAWS = 128

Flags: TypeAlias = npt.NDArray[np.bool_]


class Proof(msgspec.Struct, frozen=True):
    """A parsed proof: modulus in [60001, 65497] and 128 coefficients below 65497, ascending powers."""

    modulus: int
    coefficients: tuple[int, ...]


class ChunkReport(msgspec.Struct, frozen=True):
    """How one chunk's proof compares with the verifier's own hidden states.

    Attributes:
        tokens: generated tokens in the chunk, 1 to 32.
        compared: the verifier's top entries that were compared: min(128, entries) less `collisions`.
        collisions: the verifier's top entries left out because their indices coincide modulo the proof's m.
        exponent_mismatches: compared entries whose exponent differs (of either sign).
        sign_mismatches: compared entries of equal exponent and different sign.
        mantissa_mean: mean absolute mantissa difference where exponents agree, in units of the last bit.
        mantissa_median: the upper median of the same differences.
        negative_tested: random entries outside the top at which the polynomial was evaluated; 0 where none
            lie outside.
        negative_plausible: how many of those gave an exponent that occurs among the verifier's top entries.
    """

    tokens: int
    compared: int
    collisions: int
    exponent_mismatches: int
    sign_mismatches: int
    mantissa_mean: float
    mantissa_median: float
    negative_tested: int
    negative_plausible: int

    @property
    def negative_share(self) -> float:
        """Share of the negative check that looks like real values: about 0.01 for an honest polynomial."""
        return self.negative_plausible / self.negative_tested if self.negative_tested else 0.0


def chunk_count(tokens: int) -> int:
    """Proofs that a completion of `tokens` tokens carries: ceil(tokens / 32)."""
    return -(-tokens // CHUNK_TOKENS)


def _residues(index: Ints, modulus: Ints, count: Ints) -> Ints:
    """index mod m, with the unused places of each row set to distinct negative numbers."""
    place = np.arange(TOP_K)
    return np.where(place < count[:, None], index % modulus[:, None], -1 - place)


def _moduli(index: Ints, count: Ints) -> Ints:
    """For each chunk the largest m <= 65497 that keeps its indices distinct."""
    modulus = np.full(len(index), MAX_MODULUS, dtype=np.int64)
    pending = np.arange(len(index))
    while len(pending):
        ordered = np.sort(_residues(index[pending], modulus[pending], count[pending]), axis=1)
        pending = pending[(ordered[:, 1:] == ordered[:, :-1]).any(axis=1)]
        modulus[pending] -= 1
        if len(pending) and int(modulus[pending].min()) < MIN_MODULUS:
            raise ValueError("no modulus keeps the indices of this chunk distinct")
    return modulus


def encode(top: TopEntries) -> list[bytes]:
    """One proof of 258 bytes for each chunk.

    Raises:
        ValueError: no modulus in [60001, 65497] keeps the indices of a chunk distinct.
    """
    count = top.count
    modulus = _moduli(top.index, count)
    x = np.maximum(_residues(top.index, modulus, count), 0)
    coefficients = gf65497.interpolate(x, top.bits.astype(np.int64), count)
    words = np.concatenate([modulus[:, None], coefficients], axis=1).astype(">u2")
    return [row.tobytes() for row in words]


def build_many(rows: Sequence[States]) -> list[list[bytes]]:
    """`build` for several rows in one pass, which costs less than one call per row."""
    proofs = iter(encode(top_entries(rows)))
    return [[next(proofs) for _ in range(chunk_count(states.shape[0]))] for states in rows]


def build(states: States) -> list[bytes]:
    """Commit to the final hidden states that produced a completion.

    Args:
        states: [tokens, hidden], dtypes as in `top_entries.to_bf16_bits`; token i was drawn from state i.

    Returns:
        ceil(tokens / 32) proofs of 258 bytes each.

    Raises:
        ValueError: wrong shape, NaN or infinity, or indices that no modulus keeps distinct. There is no null
            proof.
        TypeError: wrong dtype.
    """
    return build_many([states])[0]


def _parse_words(proofs: Sequence[bytes]) -> Ints:
    """Modulus and coefficients of each proof, [proofs, 129]; ProofError for the first malformed one."""
    for number, proof in enumerate(proofs):
        if len(proof) != PROOF_BYTES:
            raise ProofError(f"proof {number} has {len(proof)} bytes, a proof has {PROOF_BYTES}")
    words = np.frombuffer(b"".join(proofs), dtype=">u2").reshape(-1, 1 + TOP_K).astype(np.int64)
    modulus, largest = words[:, 0], words[:, 1:].max(axis=1)
    sound = (modulus >= MIN_MODULUS) & (modulus <= MAX_MODULUS) & (largest < gf65497.PRIME)
    if sound.all():
        return words
    number = int(sound.argmin())
    if MIN_MODULUS <= modulus[number] <= MAX_MODULUS:
        problem = f"a coefficient of {largest[number]}, all must be below {gf65497.PRIME}"
    else:
        problem = f"modulus {modulus[number]}, allowed are {MIN_MODULUS} to {MAX_MODULUS}"
    raise ProofError(f"proof {number} has {problem}")


def parse(proof: bytes) -> Proof:
    """Read one proof strictly.

    Raises:
        ProofError: not 258 bytes, a modulus outside [60001, 65497], or a coefficient of 65497 or more.
    """
    modulus, *coefficients = _parse_words([proof])[0].tolist()
    return Proof(modulus, tuple(coefficients))


def check_form(tokens: int, hidden: int, proofs: Sequence[bytes]) -> None:
    """Everything about a row's proofs that needs no hidden states: their number, their form, their degree.

    Args:
        tokens: generated tokens of the row.
        hidden: size of a hidden state.
        proofs: as shipped by the worker.

    Raises:
        ProofError: naming the proof.
    """
    _checked_words(tokens, hidden, proofs)


def _checked_words(tokens: int, hidden: int, proofs: Sequence[bytes]) -> Ints:
    expected = chunk_count(tokens)
    if len(proofs) != expected:
        raise ProofError(f"{len(proofs)} proofs for {tokens} tokens, there must be {expected}")
    words = _parse_words(proofs)
    entries = np.minimum(CHUNK_TOKENS, tokens - CHUNK_TOKENS * np.arange(expected)) * hidden
    excess = ((words[:, 1:] != 0) & (np.arange(TOP_K) >= entries[:, None])).any(axis=1)
    if excess.any():
        number = int(excess.argmax())
        raise ProofError(f"proof {number} has more terms than its chunk has entries ({entries[number]})")
    return words


def verify_many(
    rows: Sequence[States], proofs: Sequence[Sequence[bytes]], seed: bytes = b""
) -> list[list[ChunkReport]]:
    """`verify` for several rows in one pass; the reports do not depend on how rows are batched."""
    if len(rows) != len(proofs):
        raise ValueError(f"{len(rows)} rows of states for {len(proofs)} rows of proofs")
    words = [
        _checked_words(states.shape[0], states.shape[1], own)
        for states, own in zip(rows, proofs, strict=True)
    ]
    if not words:
        return []
    flat = [proof for own in proofs for proof in own]
    reports = iter(_compare(top_entries(rows), np.concatenate(words), flat, seed))
    return [[next(reports) for _ in own] for own in proofs]


def verify(states: States, proofs: Sequence[bytes], seed: bytes = b"") -> list[ChunkReport]:
    """Compare a row's proofs with the verifier's own hidden states.

    Args:
        states: [tokens, hidden] of the verifier, dtypes as in `top_entries.to_bf16_bits`.
        proofs: as shipped by the worker.
        seed: the verifier's secret; together with the proof it chooses where the negative check looks, so the
            same seed gives the same report.

    Returns:
        One report per chunk; judging them against limits is the caller's part.

    Raises:
        ProofError: the worker's proofs are malformed or not exactly ceil(tokens / 32).
        ValueError: the verifier's states are not finite or ill-shaped: its own fault, not the worker's.
    """
    return verify_many([states], [proofs], seed)[0]


def _exponent(bits: Bits) -> Bits:
    return (bits >> np.uint16(7)) & np.uint16(0xFF)


def _negative_draws(entries: Ints, modulus: Ints, proofs: Sequence[bytes], seed: bytes) -> Ints:
    """Residues [chunks, 128] of random entries of each chunk, whether among its top ones or not."""
    key = hashlib.sha256(seed).digest()
    stream = b"".join(hashlib.shake_128(key + proof).digest(4 * _NEGATIVE_DRAWS) for proof in proofs)
    words = np.frombuffer(stream, dtype="<u4").reshape(len(proofs), _NEGATIVE_DRAWS)
    index = words % entries.astype(np.uint32)[:, None]
    return (index % modulus.astype(np.uint32)[:, None]).astype(np.int64)


class _Points(NamedTuple):
    """Where polynomials are evaluated, [chunks, 256]: the verifier's top entries and the negative draws.

    Attributes:
        residue: int64, ascending; those of unused places are `MAX_MODULUS`.
        bits: uint16, bf16 bits of a top entry.
        compared: bool, a top entry that shares its residue with no other.
        collided: bool, a top entry that does.
        tested: bool, a draw that is no top entry's residue, once for each residue.
    """

    residue: Ints
    bits: Bits
    compared: Flags
    collided: Flags
    tested: Flags


def _points(top: TopEntries, modulus: Ints, draws: Ints) -> _Points:
    # One sort of (residue, is a draw, bits) brings a residue's top entries together, its draws behind them.
    own = (top.index % modulus[:, None]) << 17 | top.bits.astype(np.int64)
    unused = np.arange(TOP_K) >= top.count[:, None]
    own[unused] = MAX_MODULUS << 17
    keys = np.concatenate([own, draws << 17 | 1 << 16], axis=1)
    keys.sort(axis=1)
    residue = keys >> 17
    repeated = np.zeros(keys.shape, dtype=np.bool_)
    repeated[:, 1:] = residue[:, 1:] == residue[:, :-1]
    drawn = (keys >> 16 & 1).astype(np.bool_)
    entry = ~drawn & (residue < MAX_MODULUS)
    collided = entry & repeated
    collided[:, :-1] |= collided[:, 1:]
    return _Points(residue, keys.astype(np.uint16), entry & ~collided, collided, drawn & ~repeated)


def compare(top: TopEntries, proofs: Sequence[bytes], seed: bytes = b"") -> list[ChunkReport]:
    """`verify` for top entries chosen elsewhere: one proof and one report per chunk.

    Raises:
        ProofError: a proof does not parse, or their number is not that of the chunks.
    """
    if len(proofs) != len(top.index):
        raise ProofError(f"{len(proofs)} proofs for {len(top.index)} chunks")
    return _compare(top, _parse_words(proofs), proofs, seed) if proofs else []


def _compare(top: TopEntries, words: Ints, proofs: Sequence[bytes], seed: bytes) -> list[ChunkReport]:
    modulus, coefficients = words[:, 0], words[:, 1:]
    points = _points(top, modulus, _negative_draws(top.entries, modulus, proofs, seed))
    claimed = gf65497.evaluate(coefficients, np.minimum(points.residue, MAX_MODULUS - 1)).astype(np.uint16)

    exponent = _exponent(claimed)
    same_exponent = points.compared & (exponent == _exponent(points.bits))
    sign_differs = same_exponent & ((claimed ^ points.bits) >= 0x8000)
    error = np.abs((claimed & 0x7F).astype(np.int16) - (points.bits & 0x7F).astype(np.int16))
    compared, matches = points.compared.sum(axis=1), same_exponent.sum(axis=1)
    mean = np.where(same_exponent, error, 0).sum(axis=1) / np.maximum(matches, 1)
    ordered = np.sort(np.where(same_exponent, error, 0x80), axis=1)
    median = np.take_along_axis(ordered, matches[:, None] // 2, axis=1)[:, 0]

    rows = np.arange(len(words))[:, None]
    occurs = np.zeros((len(words), 256), dtype=np.bool_)
    own_exponent = _exponent(top.bits)
    occurs[rows, np.where(np.arange(TOP_K) < top.count[:, None], own_exponent, own_exponent[:, :1])] = True
    plausible = points.tested & occurs[rows, exponent]

    columns = (
        top.tokens,
        compared,
        points.collided.sum(axis=1),
        compared - matches,
        sign_differs.sum(axis=1),
        np.where(matches, mean, MAX_MANTISSA_ERROR),
        np.where(matches, median, MAX_MANTISSA_ERROR).astype(np.float64),
        points.tested.sum(axis=1),
        plausible.sum(axis=1),
    )
    return [ChunkReport(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
