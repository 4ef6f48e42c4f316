"""Blocks, transactions, receipts and requests of the development chain in the form of JSON-RPC.

The fields are those of the Ethereum execution API specification.
"""

from __future__ import annotations

from typing import Any

from eth.abc import ReceiptAPI
from eth.constants import CREATE_CONTRACT_ADDRESS, ZERO_ADDRESS

from intellect_protocol.keys import address_bytes, checksum_address


def _hex(value: bytes | int) -> str:
    return hex(value) if isinstance(value, int) else "0x" + value.hex()


def pairs_json(
    block: Any, receipts: tuple[ReceiptAPI, ...], computations: tuple[Any, ...]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(transaction, receipt) of each transaction of a block, as JSON-RPC has them."""
    pairs = []
    log_index = 0
    cumulative = 0
    for position, (transaction, receipt, computation) in enumerate(
        zip(block.transactions, receipts, computations, strict=True)
    ):
        where = {
            "blockHash": _hex(block.hash),
            "blockNumber": _hex(block.number),
            "transactionIndex": _hex(position),
        }
        created = computation.msg.is_create and not computation.is_error
        # Legacy transactions have one price; typed ones answer the same fields from their fee caps.
        price = min(
            transaction.max_fee_per_gas,
            block.header.base_fee_per_gas + transaction.max_priority_fee_per_gas,
        )
        receiver = None if transaction.to == CREATE_CONTRACT_ADDRESS else checksum_address(transaction.to)
        kind = transaction.type_id or 0
        body: dict[str, Any] = {
            "hash": _hex(transaction.hash),
            "type": _hex(kind),
            "chainId": _hex(transaction.chain_id),
            "nonce": _hex(transaction.nonce),
            "from": checksum_address(transaction.sender),
            "to": receiver,
            "value": _hex(transaction.value),
            "gas": _hex(transaction.gas),
            "gasPrice": _hex(price),
            "input": _hex(transaction.data),
            "r": _hex(transaction.r),
            "s": _hex(transaction.s),
            "v": _hex(transaction.y_parity if kind else transaction.v),
            **where,
        }
        if kind == 2:
            body["maxFeePerGas"] = _hex(transaction.max_fee_per_gas)
            body["maxPriorityFeePerGas"] = _hex(transaction.max_priority_fee_per_gas)
            body["yParity"] = _hex(transaction.y_parity)
            body["accessList"] = []
        logs = []
        for log in receipt.logs:
            logs.append(
                {
                    "address": checksum_address(log.address),
                    "topics": [_hex(topic.to_bytes(32, "big")) for topic in log.topics],
                    "data": _hex(log.data),
                    "logIndex": _hex(log_index),
                    "transactionHash": body["hash"],
                    "removed": False,
                    **where,
                }
            )
            log_index += 1
        pairs.append(
            (
                body,
                {
                    "transactionHash": body["hash"],
                    "type": body["type"],
                    "from": body["from"],
                    "to": receiver,
                    "contractAddress": checksum_address(computation.msg.storage_address) if created else None,
                    "status": _hex(0 if computation.is_error else 1),
                    "gasUsed": _hex(receipt.gas_used - cumulative),
                    "cumulativeGasUsed": _hex(receipt.gas_used),
                    "effectiveGasPrice": _hex(price),
                    "logs": logs,
                    "logsBloom": _hex(receipt.bloom.to_bytes(256, "big")),
                    **where,
                },
            )
        )
        cumulative = receipt.gas_used
    return pairs


def block_json(block: Any, transaction_hashes: list[str]) -> dict[str, Any]:
    header = block.header
    return {
        "number": _hex(header.block_number),
        "hash": _hex(header.hash),
        "parentHash": _hex(header.parent_hash),
        "nonce": _hex(header.nonce),
        "mixHash": _hex(header.mix_hash),
        "sha3Uncles": _hex(header.uncles_hash),
        "logsBloom": _hex(header.bloom.to_bytes(256, "big")),
        "transactionsRoot": _hex(header.transaction_root),
        "stateRoot": _hex(header.state_root),
        "receiptsRoot": _hex(header.receipt_root),
        "miner": checksum_address(header.coinbase),
        "difficulty": "0x0",
        "totalDifficulty": "0x0",
        "extraData": _hex(header.extra_data),
        "size": "0x0",
        "gasLimit": _hex(header.gas_limit),
        "gasUsed": _hex(header.gas_used),
        "timestamp": _hex(header.timestamp),
        "baseFeePerGas": _hex(header.base_fee_per_gas),
        "uncles": [],
        "withdrawals": [],
        "transactions": transaction_hashes,
    }


def request_of(fields: dict[str, Any]) -> dict[str, Any]:
    """A call or estimate request of JSON-RPC, with bytes and integers; unknown fields do not matter.

    Raises:
        ValueError: a field is malformed.
    """
    sender, receiver = fields.get("from"), fields.get("to")
    data = fields.get("input", fields.get("data")) or "0x"
    value = int(fields.get("value") or "0x0", 16)
    gas = int(fields["gas"], 16) if fields.get("gas") else None
    if not 0 <= value < 1 << 256 or (gas is not None and gas < 0):
        raise ValueError("value or gas out of range")
    return {
        "from": address_bytes(sender) if sender else ZERO_ADDRESS,
        "to": address_bytes(receiver) if receiver else None,
        "data": bytes.fromhex(data.removeprefix("0x")),
        "value": value,
        "gas": gas,
    }
