"""EIP-712 structures that the contracts check, ready for `Signer.sign_typed`. Pure.

Every field that decides anything is in the struct, and the domain carries the chain and the contract, so
no signature is good for another case, set, version, contract or chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..keys import address_bytes, recover_address
from .records import Case, WorkCommit

_DOMAIN_TYPE = [
    {"name": "name", "type": "string"},
    {"name": "version", "type": "string"},
    {"name": "chainId", "type": "uint256"},
    {"name": "verifyingContract", "type": "address"},
]


def _fields(text: str) -> list[dict[str, str]]:
    """`"uint256 caseId,bool uphold"` as the type description of EIP-712."""
    pairs = (field.split(" ") for field in text.split(","))
    return [{"name": name, "type": kind} for kind, name in pairs]


def _typed(
    contract: str, chain_id: int, address: str, types: dict[str, str], primary: str, message: dict[str, Any]
) -> dict[str, Any]:
    return {
        "types": {"EIP712Domain": _DOMAIN_TYPE, **{name: _fields(text) for name, text in types.items()}},
        "primaryType": primary,
        "domain": {
            "name": f"Intellect {contract}",
            "version": "1",
            "chainId": chain_id,
            "verifyingContract": address,
        },
        "message": message,
    }


def decision_typed_data(chain_id: int, court: str, case: Case, uphold: bool) -> dict[str, Any]:
    """A validator's verdict on `case` as it stands: an appeal changes the digest."""
    return _typed(
        "SlashCourt",
        chain_id,
        court,
        {
            "Decision": "uint256 caseId,uint256 setId,address accused,address node,uint8 offence,"
            "uint256 amount,bytes32 evidenceHash,bytes32 defenceHash,bool uphold"
        },
        "Decision",
        {
            "caseId": case.case_id,
            "setId": case.set_id,
            "accused": case.accused,
            "node": case.node,
            "offence": int(case.offence),
            "amount": case.amount,
            "evidenceHash": case.evidence_hash,
            "defenceHash": case.defence_hash,
            "uphold": uphold,
        },
    )


def work_typed_data(chain_id: int, work_ledger: str, commit: WorkCommit) -> dict[str, Any]:
    """A validator's signature under the work of one or several versions."""
    return _typed(
        "WorkLedger",
        chain_id,
        work_ledger,
        {
            "WorkCommit": "bytes32 runId,uint256 setId,WorkEntry[] entries",
            "WorkEntry": "uint64 version,uint32 revision,bytes32 root,bytes32 dataHash,uint32 accepted,"
            "uint32 rejected,uint64 units",
        },
        "WorkCommit",
        {
            "runId": commit.run_id,
            "setId": commit.set_id,
            "entries": [
                {
                    "version": entry.version,
                    "revision": entry.revision,
                    "root": entry.root,
                    "dataHash": entry.data_hash,
                    "accepted": entry.accepted,
                    "rejected": entry.rejected,
                    "units": entry.units,
                }
                for entry in commit.entries
            ],
        },
    )


def void_typed_data(
    chain_id: int, work_ledger: str, run_id: bytes, set_id: int, version: int, revision: int
) -> dict[str, Any]:
    """A validator's signature to void a committed version."""
    return _typed(
        "WorkLedger",
        chain_id,
        work_ledger,
        {"WorkVoid": "bytes32 runId,uint256 setId,uint64 version,uint32 revision"},
        "WorkVoid",
        {"runId": run_id, "setId": set_id, "version": version, "revision": revision},
    )


def binding_typed_data(
    chain_id: int, registry: str, owner: str, node: str, peer_id: bytes, nonce: int, deadline: int
) -> dict[str, Any]:
    """A node key's consent to work for `owner` under `peer_id`, until `deadline` (chain seconds)."""
    return _typed(
        "NodeRegistry",
        chain_id,
        registry,
        {"Binding": "address owner,address node,bytes peerId,uint256 nonce,uint256 deadline"},
        "Binding",
        {"owner": owner, "node": node, "peerId": peer_id, "nonce": nonce, "deadline": deadline},
    )


def set_change_typed_data(
    chain_id: int, validator_set: str, set_id: int, members: Sequence[str]
) -> dict[str, Any]:
    """A validator's signature to appoint `members` (ascending) as set `set_id`."""
    return _typed(
        "ValidatorSet",
        chain_id,
        validator_set,
        {"SetChange": "uint256 setId,address[] members"},
        "SetChange",
        {"setId": set_id, "members": list(members)},
    )


def typed_digest(typed_data: dict[str, Any]) -> bytes:
    """The 32 bytes that a signature of `typed_data` is over."""
    from eth_account.messages import encode_typed_data
    from eth_hash.auto import keccak

    message = encode_typed_data(full_message=typed_data)
    return bytes(keccak(b"\x19" + message.version + message.header + message.body))


def recover_typed(typed_data: dict[str, Any], signature: bytes) -> str | None:
    """Address that signed, or None if the signature is malformed or has a high s."""
    return recover_address(typed_digest(typed_data), signature)


def order_signatures(typed_data: dict[str, Any], signatures: Sequence[bytes]) -> tuple[bytes, ...]:
    """Valid signatures in the order the contracts demand: ascending by signer, one of each."""
    digest = typed_digest(typed_data)
    by_signer = {}
    for signature in signatures:
        signer = recover_address(digest, signature)
        if signer is not None:
            by_signer[address_bytes(signer)] = signature
    return tuple(signature for _, signature in sorted(by_signer.items()))
