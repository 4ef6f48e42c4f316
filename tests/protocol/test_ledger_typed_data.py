"""Typed data and reverts: pure parts of the ledger client."""

from __future__ import annotations

from eth_abi.abi import encode
from eth_hash.auto import keccak

from intellect_protocol.keys import LocalSigner, address_bytes
from intellect_protocol.ledger.artefacts import CONTRACTS, artefacts, custom_errors
from intellect_protocol.ledger.records import WorkCommit, WorkEntry
from intellect_protocol.ledger.reverts import describe_revert, revert_data
from intellect_protocol.ledger.typed_data import (
    order_signatures,
    recover_typed,
    typed_digest,
    work_typed_data,
)

LEDGER = "0x5FC8d32690cc91D4c39d9d3abcBD16989F875707"
COMMIT = WorkCommit(b"R" * 32, 3, (WorkEntry(7, 0, b"\1" * 32, b"\2" * 32, 3, 1, 24),))


def test_the_digest_of_a_work_commitment_follows_eip_712() -> None:
    entry_type = (
        "WorkEntry(uint64 version,uint32 revision,bytes32 root,bytes32 dataHash,"
        "uint32 accepted,uint32 rejected,uint64 units)"
    )
    domain = keccak(
        encode(
            ["bytes32", "bytes32", "bytes32", "uint256", "address"],
            [
                keccak(b"EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)"),
                keccak(b"Intellect WorkLedger"),
                keccak(b"1"),
                77,
                LEDGER,
            ],
        )
    )
    entry = keccak(
        encode(
            ["bytes32", "uint64", "uint32", "bytes32", "bytes32", "uint32", "uint32", "uint64"],
            [keccak(entry_type.encode()), 7, 0, b"\1" * 32, b"\2" * 32, 3, 1, 24],
        )
    )
    commit_type = f"WorkCommit(bytes32 runId,uint256 setId,WorkEntry[] entries){entry_type}"
    commit = keccak(
        encode(
            ["bytes32", "bytes32", "uint256", "bytes32"],
            [keccak(commit_type.encode()), b"R" * 32, 3, keccak(entry)],
        )
    )
    assert typed_digest(work_typed_data(77, LEDGER, COMMIT)) == keccak(b"\x19\x01" + domain + commit)


def test_signatures_are_ordered_by_signer_once_each_and_garbage_is_dropped() -> None:
    keys = [LocalSigner.create() for _ in range(5)]
    typed = work_typed_data(77, LEDGER, COMMIT)
    signatures = [key.sign_typed(typed) for key in keys]
    ordered = order_signatures(typed, [*signatures, signatures[0], b"x" * 65, b""])
    signers = [recover_typed(typed, signature) for signature in ordered]
    assert signers == sorted((key.address for key in keys), key=address_bytes)


def test_every_custom_error_is_known_by_its_name() -> None:
    errors = custom_errors()
    for name in CONTRACTS:
        for item in artefacts()[name].abi:
            if item["type"] == "error" and item["name"].startswith(name):
                kinds = [parameter["type"] for parameter in item["inputs"]]
                zero = {"address": "0x" + 40 * "0", "bytes32": bytes(32)}
                values = [zero.get(kind, 0) for kind in kinds]
                selector = next(s for s, entry in errors.items() if entry["name"] == item["name"])
                assert describe_revert(selector + encode(kinds, values)).name == item["name"]


def test_reasons_panics_and_unknown_data_are_told_in_one_line() -> None:
    reason = bytes.fromhex("08c379a0") + encode(["string"], ["first\nsecond"])
    assert "first second" in str(describe_revert(reason))
    panic = bytes.fromhex("4e487b71") + encode(["uint256"], [0x11])
    assert describe_revert(panic).name == "Panic"
    for data in (b"", b"\xff", b"\xff" * 4, bytes.fromhex("08c379a0") + b"\xff" * 64, b"\xde\xad" * 500):
        error = describe_revert(data)
        assert error.name == ""
        assert "\n" not in str(error)


def test_revert_data_is_found_wherever_nodes_put_it() -> None:
    data = "0xdeadbeef"
    for answer in (
        {"code": 3, "message": "execution reverted", "data": data},
        {"code": -32000, "message": "VM error", "data": {"data": data}},
        {"code": -32015, "message": "VM error", "data": f"Reverted {data}"},
    ):
        assert revert_data(answer) == bytes.fromhex("deadbeef")
    assert revert_data({"code": -32000, "message": "execution reverted"}) == b""
    assert revert_data({"code": -32000, "message": "nonce too low"}) is None
    assert revert_data("nonsense") is None
