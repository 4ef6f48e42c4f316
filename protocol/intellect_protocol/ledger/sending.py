"""Transactions that are mined exactly once.

The problem: between signing a transaction and seeing its receipt, the connection may drop, the chain may
be slow and this process may be killed. Sending again what was sent already doubles it; signing anew under
another nonce doubles it too; giving up loses it and blocks every later nonce.

The way taken: one queue per key. Under its lock the transaction is estimated, given the next nonce and
signed, and the signed bytes are on disk before the first send. From then on only those bytes are ever
sent, as often as it takes; a chain mines them at most once. After a restart whatever is still pending is
sent again first. A caller that may run twice for the same purpose names it (`intent`): a second call
with the same name joins the first instead of sending another.

Not attempted here: replacing a transaction whose fee was too low by a dearer one under the same nonce.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import trio

from ..errors import DeadlineError, LedgerError, UnreachableError, UsageError
from ..keys import Signer, address_bytes, checksum_address
from .artefacts import artefacts
from .chain import Chain, translated
from .fees import FeePolicy, quoted
from .journal import SignedTransaction, TransactionJournal, TransactionState
from .records import Receipt

T = TypeVar("T")

# Polls in a row in which the nonce is used up and no receipt shows, before a transaction counts as lost.
_LOST_AFTER_POLLS = 6


class TransactionQueue:
    """Sends transactions of any number of keys to one chain, in order of nonce per key."""

    def __init__(
        self,
        chain: Chain,
        state_dir: Path | None,
        *,
        fees: FeePolicy | None = None,
        deadline_s: float = 120.0,
        poll_s: float = 0.05,
        max_poll_s: float = 2.0,
    ) -> None:
        """
        Args:
            state_dir: where signed transactions are kept; None for a queue that sends nothing.
            deadline_s: seconds a caller waits for a receipt; the transaction stays queued after that.
            poll_s, max_poll_s: first and largest pause between two looks for a receipt.
        """
        self._chain = chain
        self._state_dir = state_dir
        self._fees = fees or FeePolicy()
        self._deadline_s = deadline_s
        self._poll_s = poll_s
        self._max_poll_s = max_poll_s
        self._journal: TransactionJournal | None = None
        self._opening = trio.Lock()
        self._locks: dict[str, trio.Lock] = {}
        self._waiting: set[bytes] = set()
        self._chain_id: int | None = None

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    async def chain_id(self) -> int:
        """The chain's id, asked once."""
        if self._chain_id is None:
            self._chain_id = await self._ask(self._chain.chain_id)
        return self._chain_id

    async def call(
        self,
        signer: Signer,
        name: str,
        address: str,
        function: str,
        *arguments: Any,
        intent: str | None = None,
    ) -> Receipt:
        """Call a contract function. Arguments and errors as in `send`."""
        with translated():
            data = self._chain.contract(name, address).encode_abi(function, args=list(arguments))
        return await self.send(signer, address, _bytes(data), intent=intent)

    async def create(self, signer: Signer, name: str, *arguments: Any) -> Receipt:
        """Create a contract. Errors as in `send`."""
        artefact = artefacts()[name]
        with translated():
            factory = self._chain.web3.eth.contract(abi=artefact.abi, bytecode=artefact.bytecode)
            data = _bytes(factory.constructor(*arguments).data_in_transaction)
        return await self.send(signer, None, data)

    async def send(
        self, signer: Signer, to: str | None, data: bytes = b"", *, value: int = 0, intent: str | None = None
    ) -> Receipt:
        """Send one transaction and wait until it is mined.

        Args:
            to: receiver; None creates a contract.
            value: wei.
            intent: name of the purpose; while a transaction of that name is pending or mined, no second one
                is sent and its receipt is returned instead.

        Raises:
            LedgerError: it reverted (nothing changed but the nonce), or would revert (nothing was sent).
            DeadlineError: no receipt in time; it stays queued and is never forgotten.
            UsageError: this queue has no state directory.
        """
        kept: list[SignedTransaction] = []
        try:
            with trio.fail_after(self._deadline_s):
                async with self._key(signer.address):
                    earlier = await self._earlier(signer.address, intent)
                    if earlier is None:
                        entry = await self._retrying(
                            lambda: self._sign(signer, to, data, value, intent, kept)
                        )
                        await self._submit(entry)
                    else:
                        entry = earlier
                        kept.append(entry)
                return await self._receipt(entry)
        except trio.TooSlowError:
            what = "the chain does not answer; nothing was sent"
            if kept:
                what = f"transaction 0x{kept[0].hash.hex()} is not mined yet and stays queued"
            raise DeadlineError(f"{what} (after {self._deadline_s:g} s)") from None

    async def resume(self) -> list[Receipt]:
        """Send again all that is pending from before, and wait for it. What reverted is left out.

        Raises:
            DeadlineError: as in `send`.
        """
        journal = await self._opened()
        receipts = []
        try:
            with trio.fail_after(self._deadline_s):
                for entry in await self._write(journal.pending):
                    await self._submit(entry)
                    try:
                        receipts.append(await self._receipt(entry))
                    except LedgerError:
                        continue
        except trio.TooSlowError:
            raise DeadlineError(
                f"earlier transactions are not mined yet (after {self._deadline_s:g} s)"
            ) from None
        return receipts

    async def next_nonce(self, sender: str) -> int:
        """The nonce the next transaction of a key will have.

        Raises:
            UnreachableError: the chain does not answer.
        """
        journal = await self._opened()
        mined = await self._ask(lambda: self._transaction_count(sender, "latest"))
        known = await self._ask(lambda: self._transaction_count(sender, "pending"))
        following = max(mined, known)
        for entry in await self._write(lambda: journal.pending(sender)):
            if entry.nonce >= mined:
                following = max(following, entry.nonce + 1)
                if entry.hash not in self._waiting:
                    await self._submit(entry)
        return following

    async def _earlier(self, sender: str, intent: str | None) -> SignedTransaction | None:
        if intent is None:
            return None
        journal = await self._opened()
        entry = await self._write(lambda: journal.latest(sender, intent))
        if entry is None or entry.state in (TransactionState.REVERTED, TransactionState.LOST):
            return None
        if entry.state is TransactionState.PENDING and entry.hash not in self._waiting:
            await self._submit(entry)
        return entry

    async def _sign(
        self,
        signer: Signer,
        to: str | None,
        data: bytes,
        value: int,
        intent: str | None,
        kept: list[SignedTransaction],
    ) -> SignedTransaction:
        """The next transaction of a key, on disk; appended to `kept` even if the caller is cancelled then."""
        journal = await self._opened()
        sender = signer.address
        nonce = await self.next_nonce(sender)
        request: dict[str, Any] = {"from": sender, "data": data, "value": value}
        if to is not None:
            request["to"] = to
        quote = await self._ask(lambda: quoted(self._chain, request, self._fees))
        transaction = {
            "type": 2,
            "chainId": await self.chain_id(),
            "nonce": nonce,
            "to": to or "",
            "data": data,
            "value": value,
            "gas": quote.gas,
            "maxFeePerGas": quote.max_fee_per_gas,
            "maxPriorityFeePerGas": quote.max_priority_fee_per_gas,
        }

        def sign_and_keep() -> SignedTransaction:
            from eth_hash.auto import keccak

            raw = signer.sign_transaction(transaction)
            entry = SignedTransaction(bytes(keccak(raw)), sender, nonce, raw, intent)
            journal.add(entry)
            kept.append(entry)
            return entry

        return await self._write(sign_and_keep)

    def _transaction_count(self, sender: str, tag: str) -> int:
        with translated():
            return int(self._chain.web3.eth.get_transaction_count(sender, tag))

    async def _submit(self, entry: SignedTransaction) -> None:
        """Send signed bytes once. Whatever the answer, only a receipt says how it ended."""

        def send() -> None:
            with translated():
                self._chain.web3.eth.send_raw_transaction(entry.raw)

        try:
            await self._ask(send)
        except (LedgerError, UnreachableError):
            return

    async def _receipt(self, entry: SignedTransaction) -> Receipt:
        """Wait for the receipt, sending the same bytes again now and then."""
        journal = await self._opened()
        if entry.state is TransactionState.MINED:
            assert entry.block_number is not None
            return Receipt(entry.hash, entry.block_number, entry.gas_used or 0, entry.contract)
        pause = self._poll_s
        overtaken = 0
        self._waiting.add(entry.hash)
        try:
            while True:
                try:
                    found, used_nonces = await self._ask(lambda: self._look(entry))
                except (UnreachableError, LedgerError):
                    found, used_nonces = None, 0
                if found is not None:
                    return await self._concluded(entry, found)
                overtaken = overtaken + 1 if used_nonces > entry.nonce else 0
                if overtaken >= _LOST_AFTER_POLLS:
                    await self._write(lambda: journal.resolve(entry.hash, TransactionState.LOST))
                    raise LedgerError(
                        f"nonce {entry.nonce} of {entry.sender} was used by another program with this key",
                        "NonceTaken",
                    )
                await trio.sleep(pause)
                if pause >= self._max_poll_s:
                    await self._submit(entry)
                pause = min(2 * pause, self._max_poll_s)
        finally:
            self._waiting.discard(entry.hash)

    def _look(self, entry: SignedTransaction) -> tuple[dict[str, Any] | None, int]:
        """The receipt if there is one, else how many nonces of the sender are used up. Blocks."""
        from web3.exceptions import TransactionNotFound

        with translated():
            used_nonces = self._transaction_count(entry.sender, "latest")
            try:
                found = self._chain.web3.eth.get_transaction_receipt(entry.hash)
            except TransactionNotFound:
                return None, used_nonces
            return {
                "status": int(found["status"]),
                "block_number": int(found["blockNumber"]),
                "gas_used": int(found["gasUsed"]),
                "contract": found.get("contractAddress"),
            }, used_nonces

    async def _concluded(self, entry: SignedTransaction, found: dict[str, Any]) -> Receipt:
        journal = await self._opened()
        block_number, gas_used = found["block_number"], found["gas_used"]
        contract = checksum_address(address_bytes(found["contract"])) if found["contract"] else None
        state = TransactionState.MINED if found["status"] == 1 else TransactionState.REVERTED
        await self._write(lambda: journal.resolve(entry.hash, state, block_number, gas_used, contract))
        if state is TransactionState.REVERTED:
            raise await self._ask(lambda: self._why_reverted(entry, block_number))
        return Receipt(entry.hash, block_number, gas_used, contract)

    def _why_reverted(self, entry: SignedTransaction, block_number: int) -> LedgerError:
        """Replay the call on the state before its block: receipts do not carry the reason. Blocks."""
        from eth_account.typed_transactions import TypedTransaction
        from hexbytes import HexBytes

        fields = TypedTransaction.from_bytes(HexBytes(entry.raw)).as_dict()
        request = {"from": entry.sender, "data": fields["data"], "value": fields["value"]}
        if fields["to"]:
            request["to"] = checksum_address(bytes(fields["to"]))
        try:
            with translated():
                self._chain.web3.eth.call(request, block_number - 1)
        except LedgerError as error:
            return error
        except UnreachableError:
            pass
        return LedgerError(f"transaction 0x{entry.hash.hex()} reverted")

    async def _retrying(self, step: Callable[[], Any]) -> Any:
        """Repeat a step while the chain does not answer; the caller's deadline ends it."""
        pause = max(self._poll_s, 0.1)
        while True:
            try:
                return await step()
            except UnreachableError:
                await trio.sleep(pause)
                pause = min(2 * pause, self._max_poll_s)

    async def _opened(self) -> TransactionJournal:
        if self._state_dir is None:
            raise UsageError("this ledger was opened for reading only: no state directory")
        async with self._opening:
            if self._journal is None:
                path = self._state_dir / "transactions.sqlite"
                genesis = await self._ask(self._chain.genesis_hash)
                self._journal = await self._write(lambda: TransactionJournal(path, genesis))
        return self._journal

    @asynccontextmanager
    async def _key(self, sender: str) -> AsyncIterator[None]:
        """Exclusive use of a key: in this process by a lock, among processes by a file lock."""
        await self._retrying(self._opened)
        assert self._state_dir is not None
        lock = self._locks.setdefault(sender, trio.Lock())
        async with lock:
            descriptor = os.open(self._state_dir / f"{sender}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                while True:
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        await trio.sleep(self._poll_s)
                yield
            finally:
                os.close(descriptor)

    async def _ask(self, question: Callable[[], T]) -> T:
        """Run a blocking request in a thread; a cancelled caller leaves it to its own time-out."""
        # trio-typing's stubs are older than this parameter.
        return await trio.to_thread.run_sync(question, abandon_on_cancel=True)  # type: ignore[call-arg]

    async def _write(self, step: Callable[[], T]) -> T:
        """Run a blocking step on local files in a thread, to its end."""
        return await trio.to_thread.run_sync(step)


def _bytes(data: Any) -> bytes:
    return bytes.fromhex(data.removeprefix("0x")) if isinstance(data, str) else bytes(data)
