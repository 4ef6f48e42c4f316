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
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from . import gf65497
from .errors import ProofError
from .top_entries import CHUNK_TOKENS, TOP_K, Ints, States, TopEntries, top_entries

PROOF_BYTES = 2 + 2 * TOP_K
MAX_MODULUS = gf65497.PRIME
MIN_MODULUS = 60001
MAX_MANTISSA_ERROR = 127.0
"""Largest difference of two 7-bit mantissas; reported where no exponent agrees."""

_NEGATIVE_DRAWS = 192

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


def _parse_words(proof: bytes, where: str) -> npt.NDArray[np.int64]:
    if len(proof) != PROOF_BYTES:
        raise ProofError(f"{where} has {len(proof)} bytes, a proof has {PROOF_BYTES}")
    words = np.frombuffer(proof, dtype=">u2").astype(np.int64)
    if not MIN_MODULUS <= words[0] <= MAX_MODULUS:
        raise ProofError(f"{where} has modulus {words[0]}, allowed are {MIN_MODULUS} to {MAX_MODULUS}")
    if int(words[1:].max()) >= gf65497.PRIME:
        raise ProofError(f"{where} has a coefficient of {words[1:].max()}, all must be below {gf65497.PRIME}")
    return words


def parse(proof: bytes) -> Proof:
    """Read one proof strictly.

    Raises:
        ProofError: not 258 bytes, a modulus outside [60001, 65497], or a coefficient of 65497 or more.
    """
    words = _parse_words(proof, "proof")
    return Proof(int(words[0]), tuple(words[1:].tolist()))


def check_form(tokens: int, hidden: int, proofs: Sequence[bytes]) -> None:
    """Everything about a row's proofs that needs no hidden states: their number, their form, their degree.

    Args:
        tokens: generated tokens of the row.
        hidden: size of a hidden state.
        proofs: as shipped by the worker.

    Raises:
        ProofError: naming the proof.
    """
    expected = chunk_count(tokens)
    if len(proofs) != expected:
        raise ProofError(f"{len(proofs)} proofs for {tokens} tokens, there must be {expected}")
    for number, proof in enumerate(proofs):
        words = _parse_words(proof, f"proof {number}")
        entries = min(CHUNK_TOKENS, tokens - CHUNK_TOKENS * number) * hidden
        if words[1 + entries :].any():
            raise ProofError(f"proof {number} has more terms than its chunk has entries ({entries})")


def verify_many(
    rows: Sequence[States], proofs: Sequence[Sequence[bytes]], seed: bytes = b""
) -> list[list[ChunkReport]]:
    """`verify` for several rows in one pass; the reports do not depend on how rows are batched."""
    if len(rows) != len(proofs):
        raise ValueError(f"{len(rows)} rows of states for {len(proofs)} rows of proofs")
    for states, own in zip(rows, proofs, strict=True):
        check_form(states.shape[0], states.shape[1], own)
    reports = iter(compare(top_entries(rows), [proof for own in proofs for proof in own], seed))
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


def _exponent(bits: Ints) -> Ints:
    return (bits >> 7) & 0xFF


def _collisions(residues: Ints) -> Flags:
    """Marks every entry of a row that shares its residue with another."""
    order = np.argsort(residues, axis=1, kind="stable")
    ordered = np.take_along_axis(residues, order, axis=1)
    same = ordered[:, 1:] == ordered[:, :-1]
    shared = np.zeros(residues.shape, dtype=np.bool_)
    shared[:, 1:] |= same
    shared[:, :-1] |= same
    result = np.empty_like(shared)
    np.put_along_axis(result, order, shared, axis=1)
    return result


def _negative_draws(
    top: TopEntries, residues: Ints, modulus: Ints, proofs: Sequence[bytes], seed: bytes
) -> Ints:
    """Residues [chunks, 192] away from the top entries; -1 marks a draw that does not count."""
    key = hashlib.sha256(seed).digest()
    stream = b"".join(hashlib.shake_128(key + proof).digest(4 * _NEGATIVE_DRAWS) for proof in proofs)
    words = np.frombuffer(stream, dtype="<u4").reshape(len(proofs), _NEGATIVE_DRAWS).astype(np.int64)
    drawn = np.sort((words % top.entries[:, None]) % modulus[:, None], axis=1)
    repeated = np.zeros(drawn.shape, dtype=np.bool_)
    repeated[:, 1:] = drawn[:, 1:] == drawn[:, :-1]
    # One sorted list over all rows: a row's residues are set apart from the next row's by 2**16.
    base = np.arange(len(proofs))[:, None] << 16
    taken = np.sort(np.where(residues >= 0, residues, residues[:, :1]) + base, axis=1).reshape(-1)
    place = np.minimum(np.searchsorted(taken, drawn + base), len(taken) - 1)
    return np.where((taken[place] == drawn + base) | repeated, -1, drawn)


def compare(top: TopEntries, proofs: Sequence[bytes], seed: bytes = b"") -> list[ChunkReport]:
    """`verify` for top entries chosen elsewhere: one proof and one report per chunk.

    Raises:
        ProofError: a proof does not parse, or their number is not that of the chunks.
    """
    if len(proofs) != len(top.index):
        raise ProofError(f"{len(proofs)} proofs for {len(top.index)} chunks")
    if not proofs:
        return []
    words = np.stack([_parse_words(proof, f"proof {number}") for number, proof in enumerate(proofs)])
    modulus, coefficients = words[:, 0], words[:, 1:]
    count = top.count
    used = np.arange(TOP_K) < count[:, None]
    residues = _residues(top.index, modulus, count)
    collided = _collisions(residues)
    compared = used & ~collided
    draws = _negative_draws(top, residues, modulus, proofs, seed)
    values = gf65497.evaluate(coefficients, np.maximum(np.concatenate([residues, draws], axis=1), 0))
    claimed, elsewhere = values[:, :TOP_K], values[:, TOP_K:]

    own = top.bits.astype(np.int64)
    own_exponent = _exponent(own)
    same_exponent = compared & (_exponent(claimed) == own_exponent)
    sign_differs = same_exponent & ((claimed >> 15) != (own >> 15))
    error = np.abs((claimed & 0x7F) - (own & 0x7F))
    matches = same_exponent.sum(axis=1)
    mean = np.where(same_exponent, error, 0).sum(axis=1) / np.maximum(matches, 1)
    ordered = np.sort(np.where(same_exponent, error, 0x80), axis=1)
    median = np.take_along_axis(ordered, np.minimum(matches // 2, TOP_K - 1)[:, None], axis=1)[:, 0]

    occurs = np.zeros((len(words), 256), dtype=np.bool_)
    rows = np.arange(len(words))[:, None]
    occurs[rows, np.where(used, own_exponent, own_exponent[:, :1])] = True
    tested = draws >= 0
    plausible = tested & occurs[rows, _exponent(elsewhere)]

    columns = (
        top.tokens,
        compared.sum(axis=1),
        collided.sum(axis=1),
        compared.sum(axis=1) - matches,
        sign_differs.sum(axis=1),
        np.where(matches, mean, MAX_MANTISSA_ERROR),
        np.where(matches, median, MAX_MANTISSA_ERROR).astype(np.float64),
        tested.sum(axis=1),
        plausible.sum(axis=1),
    )
    return [ChunkReport(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
