"""The Merkle tree over the work of a version."""

from __future__ import annotations

import pytest
from eth_abi.abi import encode
from eth_hash.auto import keccak
from hypothesis import given
from hypothesis import strategies as st

from intellect_protocol.keys import checksum_address
from intellect_protocol.ledger.merkle import WorkLeaf, leaf_hash, merkle_proof, merkle_root, verify_proof

hashes = st.binary(min_size=32, max_size=32)
leaves = st.builds(
    WorkLeaf,
    version=st.integers(0, 2**64 - 1),
    index=st.integers(0, 2**32 - 1),
    node=st.binary(min_size=20, max_size=20).map(checksum_address),
    work_hash=hashes,
    accepted=st.booleans(),
    units=st.integers(0, 2**64 - 1),
)


@given(hashes, leaves)
def test_a_leaf_is_hashed_twice_over_its_abi_encoding(run_id: bytes, leaf: WorkLeaf) -> None:
    encoded = encode(
        ["bytes32", "uint64", "uint32", "address", "bytes32", "bool", "uint64"],
        [run_id, leaf.version, leaf.index, leaf.node, leaf.work_hash, leaf.accepted, leaf.units],
    )
    assert leaf_hash(run_id, leaf) == keccak(keccak(encoded))


@given(st.lists(hashes, min_size=1, max_size=70, unique=True), st.data())
def test_every_leaf_and_no_other_is_proved(nodes: list[bytes], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(nodes) - 1))
    stranger = data.draw(hashes.filter(lambda node: node not in nodes))
    root, proof = merkle_root(nodes), merkle_proof(nodes, position)
    assert verify_proof(root, nodes[position], proof)
    assert not verify_proof(root, stranger, proof)
    assert len(proof) <= max(len(nodes) - 1, 0).bit_length()


def test_small_trees_have_the_documented_shape() -> None:
    a, b, c = sorted(bytes([i]) * 32 for i in (1, 2, 3))
    ab = keccak(a + b)
    assert merkle_root([]) == bytes(32)
    assert merkle_root([a]) == a
    assert merkle_root([a, b]) == merkle_root([b, a]) == ab
    # A node without a sibling moves up as it is; pairs are hashed in sorted order.
    assert merkle_root([a, b, c]) == keccak(min(ab, c) + max(ab, c))


def test_fields_that_do_not_fit_their_type_are_refused() -> None:
    node = "0x" + 40 * "0"
    good = WorkLeaf(1, 1, node, bytes(32), True, 1)
    assert len(leaf_hash(bytes(32), good)) == 32
    for bad in (
        WorkLeaf(1 << 64, 1, node, bytes(32), True, 1),
        WorkLeaf(1, 1 << 32, node, bytes(32), True, 1),
        WorkLeaf(1, -1, node, bytes(32), True, 1),
        WorkLeaf(1, 1, node, bytes(31), True, 1),
        WorkLeaf(1, 1, node, bytes(32), True, 1 << 64),
    ):
        with pytest.raises(ValueError, match=r"fit|bytes"):
            leaf_hash(bytes(32), bad)
    with pytest.raises(ValueError, match="32 bytes"):
        merkle_root([bytes(31)])
    with pytest.raises(ValueError, match="no leaf"):
        merkle_proof([bytes(32)], 1)
