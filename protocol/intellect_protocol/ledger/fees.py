"""What a transaction may cost (EIP-1559), settled before it is signed."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import LedgerError, UnreachableError
from .chain import Chain, translated

GWEI = 10**9


class FeePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """EIP-1559 fees: twice the base fee plus a tip, and never above the cap (wei per gas)."""

    max_fee_per_gas: int = 500 * GWEI
    max_priority_fee_per_gas: int = 2 * GWEI


class FeeQuote(msgspec.Struct, frozen=True):
    """Gas limit, and wei per gas."""

    gas: int
    max_fee_per_gas: int
    max_priority_fee_per_gas: int


def quoted(chain: Chain, request: dict[str, Any], policy: FeePolicy) -> FeeQuote:
    """What the transaction `request` (`from`, `to`, `data`, `value`) needs now. Blocks.

    Raises:
        LedgerError: it would revert, or the sender cannot pay for it (`InsufficientFunds`).
        UnreachableError: fees are above the cap for now.
    """
    eth = chain.web3.eth
    with translated():
        # A quarter more than estimated: state may change before the transaction is mined.
        gas = int(eth.estimate_gas(request)) * 5 // 4
        tip = min(int(eth.max_priority_fee), policy.max_priority_fee_per_gas)
        max_fee = 2 * int(eth.get_block("latest").get("baseFeePerGas", 0)) + tip
        balance = int(eth.get_balance(request["from"]))
    if max_fee > policy.max_fee_per_gas:
        raise UnreachableError(
            f"the chain asks {max_fee / GWEI:.1f} gwei per gas, over the cap of"
            f" {policy.max_fee_per_gas / GWEI:.1f}"
        )
    needed = request["value"] + gas * max_fee
    if balance < needed:
        raise LedgerError(
            f"{request['from']} has {balance} wei and needs {needed} for this transaction",
            "InsufficientFunds",
        )
    return FeeQuote(gas, max_fee, tip)
