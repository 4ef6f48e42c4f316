"""The Merkle tree over the judged work of one version, as `WorkLedger.verifyWork` checks it.

Leaves are hashed twice and inner nodes once, over 64 bytes in sorted order (the commutative pairs of
OpenZeppelin's `MerkleProof`), so that no inner node passes as a leaf. A node without a sibling moves up
as it is. Leaves keep the order they are given in: ascending by (index, node) by convention.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from eth_hash.auto import keccak

from ..keys import address_bytes

MAX_LEAVES = 1 << 20
_EMPTY_ROOT = bytes(32)


class WorkLeaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One judged submission: node (EIP-55 text), its index, the SHA-256 of its file, and its credit."""

    version: int
    index: int
    node: str
    work_hash: bytes
    accepted: bool
    units: int


def _word(value: int, bits: int) -> bytes:
    if not 0 <= value < 1 << bits:
        raise ValueError(f"{value} does not fit in uint{bits}")
    return value.to_bytes(32, "big")


def leaf_hash(run_id: bytes, leaf: WorkLeaf) -> bytes:
    """keccak(keccak(abi.encode(runId, version, index, node, workHash, accepted, units))), 32 bytes.

    Raises:
        ValueError: a field does not fit its Solidity type.
    """
    if len(run_id) != 32 or len(leaf.work_hash) != 32:
        raise ValueError("run id and work hash have 32 bytes")
    encoded = b"".join(
        (
            run_id,
            _word(leaf.version, 64),
            _word(leaf.index, 32),
            address_bytes(leaf.node).rjust(32, b"\0"),
            leaf.work_hash,
            _word(int(leaf.accepted), 1),
            _word(leaf.units, 64),
        )
    )
    return bytes(keccak(keccak(encoded)))


def _parent(left: bytes, right: bytes) -> bytes:
    return bytes(keccak(left + right if left <= right else right + left))


def _levels(leaves: Sequence[bytes]) -> list[list[bytes]]:
    if len(leaves) > MAX_LEAVES:
        raise ValueError(f"more than {MAX_LEAVES} leaves")
    if any(len(leaf) != 32 for leaf in leaves):
        raise ValueError("leaves have 32 bytes")
    levels = [list(leaves)]
    while len(levels[-1]) > 1:
        level = levels[-1]
        parents = [_parent(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        levels.append(parents + level[len(level) & ~1 :])
    return levels


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Root over leaf hashes; 32 zero bytes if there are none (nothing can be proved against it).

    Raises:
        ValueError: a leaf of the wrong length, or too many.
    """
    return _levels(leaves)[-1][0] if leaves else _EMPTY_ROOT


def merkle_proof(leaves: Sequence[bytes], position: int) -> tuple[bytes, ...]:
    """Siblings from the leaf at `position` up to the root.

    Raises:
        ValueError: no such position.
    """
    if not 0 <= position < len(leaves):
        raise ValueError(f"no leaf at {position}")
    proof = []
    for level in _levels(leaves)[:-1]:
        sibling = position ^ 1
        if sibling < len(level):
            proof.append(level[sibling])
        position //= 2
    return tuple(proof)


def verify_proof(root: bytes, leaf: bytes, proof: Sequence[bytes]) -> bool:
    """Whether `proof` leads from `leaf` (a leaf hash) to `root`."""
    node = leaf
    for sibling in proof:
        if len(sibling) != 32:
            return False
        node = _parent(node, sibling)
    return node == root
