"""What the contracts log, one frozen struct per event: the raw material of reputation.

Field names are those of the contracts in snake case. Amounts and times as in `records.py`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec

from ..errors import LedgerError
from .artefacts import CONTRACTS, artefacts, signature_of
from .records import Offence


class LedgerEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Where in the chain an event is. Events are ordered by (block_number, log_index)."""

    block_number: int
    log_index: int
    transaction_hash: bytes


class SetAppointed(LedgerEvent, frozen=True, kw_only=True):
    set_id: int
    members: tuple[str, ...]
    threshold: int
    active_from: int


class Staked(LedgerEvent, frozen=True, kw_only=True):
    owner: str
    amount: int


class UnbondRequested(LedgerEvent, frozen=True, kw_only=True):
    owner: str
    amount: int
    release_at: int


class Rebonded(LedgerEvent, frozen=True, kw_only=True):
    owner: str
    amount: int


class Withdrawn(LedgerEvent, frozen=True, kw_only=True):
    owner: str
    amount: int


class StakeFrozen(LedgerEvent, frozen=True, kw_only=True):
    owner: str
    amount: int


class StakeReleased(LedgerEvent, frozen=True, kw_only=True):
    owner: str
    amount: int


class StakeSeized(LedgerEvent, frozen=True, kw_only=True):
    owner: str
    amount: int
    reporter: str
    cut: int


class NodeBound(LedgerEvent, frozen=True, kw_only=True):
    owner: str
    node: str
    peer_id: bytes


class NodeUnbound(LedgerEvent, frozen=True, kw_only=True):
    owner: str
    node: str


class RunOpened(LedgerEvent, frozen=True, kw_only=True):
    run_id: bytes
    publisher: str


class CheckpointRecorded(LedgerEvent, frozen=True, kw_only=True):
    run_id: bytes
    version: int
    checkpoint_hash: bytes


class WorkCommitted(LedgerEvent, frozen=True, kw_only=True):
    run_id: bytes
    version: int
    revision: int
    root: bytes
    data_hash: bytes
    accepted: int
    rejected: int
    units: int


class WorkVoided(LedgerEvent, frozen=True, kw_only=True):
    run_id: bytes
    version: int
    revision: int


class CaseOpened(LedgerEvent, frozen=True, kw_only=True):
    case_id: int
    accused: str
    reporter: str
    node: str
    offence: Offence
    amount: int
    evidence_hash: bytes


class CaseAppealed(LedgerEvent, frozen=True, kw_only=True):
    case_id: int
    defence_hash: bytes


class CaseUpheld(LedgerEvent, frozen=True, kw_only=True):
    case_id: int
    accused: str
    seized: int


class CaseDismissed(LedgerEvent, frozen=True, kw_only=True):
    case_id: int
    accused: str
    bond: int


class CaseExpired(LedgerEvent, frozen=True, kw_only=True):
    case_id: int
    accused: str
    bond: int


class OwnerBarred(LedgerEvent, frozen=True, kw_only=True):
    owner: str
    case_id: int


@cache
def _kinds() -> dict[tuple[str, bytes], tuple[type[LedgerEvent], dict[str, Any]]]:
    """Struct and ABI entry by contract name and first topic."""
    from eth_hash.auto import keccak

    structs = {struct.__name__: struct for struct in LedgerEvent.__subclasses__()}
    return {
        (name, bytes(keccak(signature_of(entry).encode()))): (structs[entry["name"]], entry)
        for name in CONTRACTS
        for entry in artefacts()[name].abi
        if entry["type"] == "event" and entry["name"] in structs
    }


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def topics_of(kinds: tuple[type[LedgerEvent], ...]) -> list[bytes]:
    """First topics by which a chain finds events of these kinds."""
    return [topic for (_, topic), (struct, _) in _kinds().items() if struct in kinds]


def decode_log(contract: str, log: Any) -> LedgerEvent | None:
    """The event behind a log (as web3 formats it) of a contract of ours, or None if it is not one we know.

    Raises:
        LedgerError: it does not have the form its first topic promises.
    """
    from eth_abi.abi import decode
    from eth_abi.exceptions import DecodingError

    from ..keys import address_bytes, checksum_address

    try:
        topics = [bytes(topic) for topic in log["topics"]]
        found = _kinds().get((contract, topics[0])) if topics else None
        if found is None:
            return None
        struct, entry = found
        indexed = [parameter for parameter in entry["inputs"] if parameter["indexed"]]
        plain = [parameter for parameter in entry["inputs"] if not parameter["indexed"]]
        values = dict(
            zip(
                (p["name"] for p in plain),
                decode([p["type"] for p in plain], bytes(log["data"])),
                strict=True,
            )
        )
        for parameter, topic in zip(indexed, topics[1:], strict=True):
            (values[parameter["name"]],) = decode([parameter["type"]], topic)
        fields = {}
        for parameter in entry["inputs"]:
            value = values[parameter["name"]]
            if parameter["type"] == "address":
                value = checksum_address(address_bytes(value))
            elif parameter["type"] == "address[]":
                value = tuple(checksum_address(address_bytes(item)) for item in value)
            fields[_snake(parameter["name"])] = value
        return msgspec.convert(
            {
                "block_number": int(log["blockNumber"]),
                "log_index": int(log["logIndex"]),
                "transaction_hash": bytes(log["transactionHash"]),
                **fields,
            },
            struct,
        )
    except (DecodingError, KeyError, ValueError, TypeError, OverflowError) as error:
        raise LedgerError(f"the chain answered a malformed event of {contract}: {error}") from error
