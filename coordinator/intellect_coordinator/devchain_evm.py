"""The development chain itself: blocks made of single transactions, executed by py-evm as they arrive.

Unlike a public chain it has no consensus, no mempool and no reorganisation; a transaction is in a block,
on disk, when it is acknowledged. Block times are the machine's clock (plus what `increase_time` added):
blocks within one second share a time, so that the chain's clock never runs ahead of the wall clock.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any

from eth.abc import BlockHeaderAPI
from eth.chains.base import MiningChain
from eth.constants import CREATE_CONTRACT_ADDRESS, ZERO_ADDRESS
from eth.exceptions import Revert, VMError
from eth.vm.forks import PragueVM
from eth.vm.spoof import SpoofTransaction
from eth_utils.exceptions import ValidationError

from intellect_protocol.ledger.devkeys import DEVELOPMENT_ACCOUNTS, development_signer

from .devchain_json import block_json, pairs_json
from .devchain_store import ChainStore

BLOCK_GAS_LIMIT = 16_000_000
DEVELOPMENT_BALANCE = 10_000 * 10**18
_MAX_INCREASE_S = 10 * 365 * 24 * 3600


class RefusedTransaction(Exception):
    """A transaction that cannot be in a block: nonce, funds, chain id, form."""


class Reverted(Exception):
    """A call that failed; `data` is what it returned."""

    def __init__(self, text: str, data: bytes) -> None:
        super().__init__(text)
        self.data = data


class _DevelopmentVM(PragueVM):  # type: ignore[misc]
    """The rules of the Prague fork, with several blocks allowed in one second."""

    @classmethod
    def validate_header(cls, header: BlockHeaderAPI, parent_header: BlockHeaderAPI) -> None:
        if parent_header is None or header.block_number != parent_header.block_number + 1:
            raise ValidationError("not the child of its parent")
        if header.timestamp < parent_header.timestamp:
            raise ValidationError("the clock runs backwards")
        cls.validate_gas(header, parent_header)


class DevelopmentChain:
    """Used by one thread."""

    def __init__(self, store: ChainStore, clock: Callable[[], float], chain_id: int | None = None) -> None:
        """Open the chain in `store`, or begin one.

        Args:
            clock: seconds since 1970.
            chain_id: for a new chain; by default random, so that nothing signed for one development chain is
                good on another.
        """
        self._store = store
        self._clock = clock
        new = store.is_empty()
        if new:
            self.chain_id = chain_id or 1_000_000_000 + secrets.randbelow(1_000_000_000)
        else:
            self.chain_id = int(store.meta("chain_id", "0"))
        self._offset = int(store.meta("offset_s", "0"))
        kind = type(
            "_Chain", (MiningChain,), {"vm_configuration": ((0, _DevelopmentVM),), "chain_id": self.chain_id}
        )
        self._chain: Any = self._begin(kind) if new else kind(store)

    def _begin(self, kind: Any) -> Any:
        account = {"balance": DEVELOPMENT_BALANCE, "nonce": 0, "code": b"", "storage": {}}
        accounts = [development_signer(index).address_bytes for index in range(DEVELOPMENT_ACCOUNTS)]
        genesis = {
            "coinbase": ZERO_ADDRESS,
            "difficulty": 0,
            "extra_data": b"development chain",
            "gas_limit": BLOCK_GAS_LIMIT,
            "mix_hash": os.urandom(32),
            "nonce": bytes(8),
            "timestamp": int(self._clock()),
        }
        chain = kind.from_genesis(self._store, genesis, dict.fromkeys(accounts, account))
        self._store.set_meta("format", "1")
        self._store.set_meta("chain_id", str(self.chain_id))
        self._store.add_block(block_json(chain.get_canonical_block_by_number(0), []), [])
        self._store.commit()
        return chain

    @property
    def head(self) -> Any:
        """Header of the newest block."""
        return self._chain.get_canonical_head()

    def now(self) -> int:
        """Time the next block would have."""
        return max(int(self._clock()) + self._offset, int(self.head.timestamp))

    def increase_time(self, seconds: int) -> int:
        """Move the chain's clock forward for good, in a block of its own; the whole offset in seconds."""
        if not 0 <= seconds <= _MAX_INCREASE_S:
            raise ValueError("between 0 seconds and ten years")
        self._offset += seconds
        self._store.set_meta("offset_s", str(self._offset))
        self.mine([])
        return self._offset

    def send_raw(self, raw: bytes) -> str:
        """Execute a signed transaction in a block of its own. It may revert: its receipt says so.

        Returns:
            Its hash, once the block is on disk.

        Raises:
            RefusedTransaction: it cannot be in a block.
        """
        builder = self._chain.get_vm(self.head).get_transaction_builder()
        try:
            transaction = builder.decode(raw)
            sender = transaction.sender
        except Exception as error:  # every codec below raises its own kind
            raise RefusedTransaction(f"not a signed transaction: {type(error).__name__}") from error
        hash_ = "0x" + bytes(transaction.hash).hex()
        if self._store.transaction(hash_) is not None:
            raise RefusedTransaction("already known")
        if transaction.chain_id != self.chain_id:
            raise RefusedTransaction(
                f"signed for chain {transaction.chain_id}, this is chain {self.chain_id}"
            )
        nonce = self.nonce(sender)
        if transaction.nonce != nonce:
            side = "low" if transaction.nonce < nonce else "high"
            raise RefusedTransaction(f"nonce too {side}: the next one is {nonce}")
        try:
            self.mine([transaction])
        except ValidationError as error:
            raise RefusedTransaction(str(error)) from error
        return hash_

    def mine(self, transactions: list[Any]) -> None:
        """Make a block of `transactions` and put it on disk.

        Raises:
            ValidationError: one of them cannot be in it; nothing changed.
        """
        chain = self._chain
        head = self.head
        header = chain.create_header_from_parent(head).copy(
            timestamp=self.now(), gas_limit=head.gas_limit, mix_hash=os.urandom(32), coinbase=ZERO_ADDRESS
        )
        try:
            vm = chain.get_vm(header)
            executed, receipts, computations = vm.apply_all_transactions(transactions, header)
            filled = vm.set_block_transactions_and_withdrawals(
                vm.get_block(), executed, transactions, receipts
            )
            block = vm.mine_block(filled).block
            chain.persist_block(block, perform_validation=False)
            pairs = pairs_json(block, receipts, computations)
            self._store.add_block(block_json(block, [body["hash"] for body, _ in pairs]), pairs)
        except BaseException:
            self._store.rollback()
            raise
        self._store.commit()

    def nonce(self, address: bytes) -> int:
        """Next nonce of an account."""
        return int(self._state(None).get_nonce(address))

    def balance(self, address: bytes, number: int | None = None) -> int:
        """Wei after block `number`, by default now."""
        return int(self._state(number).get_balance(address))

    def code(self, address: bytes, number: int | None = None) -> bytes:
        return bytes(self._state(number).get_code(address))

    def call(self, request: dict[str, Any], number: int | None = None) -> bytes:
        """What a call returns: at the present time on the newest state, or right after block `number`.

        Raises:
            Reverted: it failed.
        """
        state = self._state(number)
        computation = self._apply(state, request, self._gas_of(request))
        return bytes(computation.output)

    def estimate_gas(self, request: dict[str, Any]) -> int:
        """A gas limit with which the transaction passes now.

        Raises:
            Reverted: there is none.
        """
        ceiling = self._gas_of(request)
        state = self._state(None)
        snapshot = state.snapshot()
        used = int(self._apply(state, request, ceiling).get_gas_used())
        # Refunds are granted only after the fact, and a callee gets 63/64 of what is left.
        for margin in (1.0, 1.05, 1.3, 2.0):
            state.revert(snapshot)
            snapshot = state.snapshot()
            limit = min(int(used * margin) + 30_000, ceiling)
            try:
                self._apply(state, request, limit)
            except Reverted:
                continue
            return limit
        return ceiling

    def _gas_of(self, request: dict[str, Any]) -> int:
        return min(int(request.get("gas") or BLOCK_GAS_LIMIT), BLOCK_GAS_LIMIT)

    def _state(self, number: int | None) -> Any:
        """A state to read and to try things on. Nothing done to it is kept."""
        head = self.head
        if number is None or number >= head.block_number:
            header = self._chain.create_header_from_parent(head).copy(
                timestamp=self.now(), state_root=head.state_root
            )
        else:
            header = self._chain.get_canonical_block_header_by_number(number)
        return self._chain.get_vm(header.copy(base_fee_per_gas=0)).state

    def _apply(self, state: Any, request: dict[str, Any], gas: int) -> Any:
        sender = request["from"]
        transaction = (
            self._chain.get_vm(self.head)
            .get_transaction_builder()
            .new_unsigned_dynamic_fee_transaction(
                chain_id=self.chain_id,
                nonce=state.get_nonce(sender),
                max_priority_fee_per_gas=0,
                max_fee_per_gas=0,
                gas=gas,
                to=request["to"] or CREATE_CONTRACT_ADDRESS,
                value=request["value"],
                data=request["data"],
                access_list=(),
            )
        )
        if gas < transaction.intrinsic_gas:
            raise Reverted("intrinsic gas too low", b"")
        try:
            computation = state.apply_transaction(SpoofTransaction(transaction, from_=sender))
        except ValidationError as error:
            raise Reverted(str(error), b"") from error
        except VMError as error:
            raise Reverted(type(error).__name__, b"") from error
        if computation.is_error:
            data = bytes(computation.output) if isinstance(computation.error, Revert) else b""
            reason = "execution reverted" if isinstance(computation.error, Revert) else str(computation.error)
            raise Reverted(reason, data)
        return computation
