"""The examples of docs/protocol.md: today's code gives them, and so do the rules in plain Python."""

import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest
from blake3 import blake3

from intellect_protocol import keys

ROOT = Path(__file__).parents[2]
VECTORS: dict[str, Any] = json.loads((ROOT / "tests" / "vectors" / "protocol.json").read_text())


def sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


RUN, C, B, NODE = b"\x01" * 32, b"\x02" * 32, b"\x03" * 32, keys.LocalSigner(b"\x04" * 32)


def test_the_code_still_gives_every_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import make_vectors

    assert json.loads(json.dumps(make_vectors.vectors())) == VECTORS
    sys.modules.pop("make_vectors")


def test_the_run_id_is_the_hash_of_the_terms() -> None:
    terms = bytes.fromhex(VECTORS["run"]["terms_msgpack"])
    assert sha256(b"intellect/run-config/1", terms).hex() == VECTORS["run"]["run_id"]
    assert list(msgpack.unpackb(terms)) == [
        "name", "protocol", "model", "environments", "sampling", "ledger", "keys",
    ]  # fmt: skip


def test_assignment_and_uniforms_follow_from_the_seed() -> None:
    expected = VECTORS["assignment"]
    seed = sha256(b"intellect/assign/1", RUN, u64(3), C, B, NODE.address_bytes, u32(7))
    assert seed.hex() == expected["seed"]
    which, task, length = struct.unpack("<3Q", sha256(b"intellect/prompt/1", seed, u32(1))[:24])
    slot = expected["prompt_1"]
    assert slot["environment"] == ("sort_digits" if which % 3 < 2 else "arithmetic")
    assert (slot["task_index"], slot["target_length"]) == (task, [10, 20][length % 2])
    sigma = sha256(b"intellect/sample/1", seed, u32(1), u32(2))
    assert sigma.hex() == expected["sigma_1_2"]
    for t, value in enumerate(expected["uniforms"]):
        assert int.from_bytes(sha256(sigma, u32(t))[:8], "big") / 2**64 == value


def test_digests_and_signature() -> None:
    content = sha256(b"payload", sha256(b"body"))
    assert content.hex() == VECTORS["content_hash"]
    request = sha256(
        b"intellect/rpc/1", RUN, u64(31337), bytes([38]), b"\x05" * 38, bytes([11]), b"GetVerdicts",
        content, u64(1000), b"\x06" * 16,
    )  # fmt: skip
    assert request.hex() == VECTORS["request_digest"]
    work = sha256(b"intellect/work/1", RUN, u64(3), C, u64(7), b"\x07" * 32, u64(1234))
    assert work.hex() == VECTORS["work"]["digest"]
    assert keys.recover_address(work, bytes.fromhex(VECTORS["work"]["signature"])) == NODE.address
    receipt = sha256(
        b"intellect/receipt/1", RUN, u64(3), u64(7), bytes([20]), NODE.address_bytes, b"\x07" * 32, u64(1000)
    )
    assert receipt.hex() == VECTORS["receipt_digest"]


def test_an_odd_chunk_moves_up_the_merkle_tree() -> None:
    leaves = [blake3(b"\x00" + bytes([i]) * 32).digest() for i in range(5)]

    def inner(left: bytes, right: bytes) -> bytes:
        return blake3(b"\x01" + left + right).digest()

    pairs = [inner(leaves[0], leaves[1]), inner(leaves[2], leaves[3])]
    roots = {
        "1": leaves[0],
        "2": pairs[0],
        "3": inner(pairs[0], leaves[2]),
        "5": inner(inner(*pairs), leaves[4]),
    }
    assert {count: root.hex() for count, root in roots.items()} == VECTORS["chunk_merkle_roots"]


def test_state_hash_and_checkpoint_hash() -> None:
    expected = VECTORS["checkpoint"]
    state = blake3(
        u32(1) + b"a" + u32(4) + b"BF16" + u32(2) + u64(1) + u64(2) + b"\x80\x3f\x00\x40"
        + u32(1) + b"b" + u32(3) + b"F32" + u32(1) + u64(2) + struct.pack("<2f", 1.0, -2.0)
    )  # fmt: skip
    assert state.hexdigest() == expected["state_hash"]
    manifest = bytes.fromhex(expected["manifest"])
    assert sha256(manifest).hex() == expected["checkpoint_hash"]
    fields = msgpack.unpackb(manifest)
    joined = b"{}" + bytes.fromhex(expected["safetensors"])
    assert [f["name"] for f in fields["files"]] == ["config.json", "model.safetensors"]
    assert fields["chunk_size"] == 16 * 1024
    assert fields["chunks"] == [blake3(joined).digest()]
    assert fields["state_hash"].hex() == expected["state_hash"]


def test_the_work_root_pairs_hashes_in_sorted_order() -> None:
    from eth_hash.auto import keccak

    hashes = []
    for i in range(3):
        words = (
            RUN, (3).to_bytes(32, "big"), i.to_bytes(32, "big"), NODE.address_bytes.rjust(32, b"\0"),
            bytes([i]) * 32, int(i % 2 == 0).to_bytes(32, "big"), (8 * i).to_bytes(32, "big"),
        )  # fmt: skip
        hashes.append(keccak(keccak(b"".join(words))))
    assert [h.hex() for h in hashes] == VECTORS["work_root"]["leaves"]
    first = keccak(b"".join(sorted(hashes[:2])))
    assert keccak(b"".join(sorted([first, hashes[2]]))).hex() == VECTORS["work_root"]["root"]
