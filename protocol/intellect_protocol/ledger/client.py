"""`Ledger`: the contracts of one deployment, read and written from trio.

Reads (`reading.py`) are views at the newest block. Writes return when the transaction is mined and raise
`LedgerError` with the contract's error name if it is refused; `sending.py` says what happens in between.
Writes that can only sensibly happen once are named by their content, so that repeating one after a crash
joins the first instead of sending a second; the others take an `intent` for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import LedgerError
from ..keys import Signer
from .artefacts import TOKEN
from .deployment import Deployment
from .events import CaseOpened
from .fees import FeePolicy
from .reading import LedgerReader
from .records import Offence, Receipt, WorkCommit
from .sending import TransactionQueue
from .typed_data import binding_typed_data

_BINDING_GOOD_FOR_S = 600


class Ledger(LedgerReader):
    """One deployment on one chain."""

    def __init__(
        self,
        rpc: Sequence[str] | Any,
        deployment: Deployment,
        state_dir: Path | None = None,
        *,
        timeout_s: float = 5.0,
        deadline_s: float = 120.0,
        fees: FeePolicy | None = None,
    ) -> None:
        """
        Args:
            rpc: URLs to try in turn, or a web3 provider.
            state_dir: where signed transactions are kept until mined; None reads only.
            timeout_s: per request and URL.
            deadline_s: how long a write waits to be mined.

        Raises:
            ConfigError: a URL or the deployment is malformed.
        """
        super().__init__(rpc, deployment, timeout_s=timeout_s)
        self.queue = TransactionQueue(self._chain, state_dir, fees=fees, deadline_s=deadline_s)

    def close(self) -> None:
        """Close connections and files."""
        self.queue.close()
        super().close()

    # Staking

    async def stake(self, signer: Signer, amount: int, *, intent: str | None = None) -> Receipt:
        """Stake tokens of the signer, approving them first where the allowance is too small."""
        ledger = self.deployment.address("StakeLedger")
        allowed = int(await self._view(TOKEN, "allowance", signer.address, ledger))
        if allowed < amount:
            await self._call(signer, TOKEN, "approve", ledger, amount, intent=_second(intent, "approve"))
        return await self._call(signer, "StakeLedger", "stake", amount, intent=intent)

    async def request_unbond(self, signer: Signer, amount: int, *, intent: str | None = None) -> Receipt:
        """Start unbonding; restarts the clock of what is unbonding already."""
        return await self._call(signer, "StakeLedger", "requestUnbond", amount, intent=intent)

    async def rebond(self, signer: Signer, amount: int, *, intent: str | None = None) -> Receipt:
        """Make unbonding stake active again."""
        return await self._call(signer, "StakeLedger", "rebond", amount, intent=intent)

    async def withdraw(self, signer: Signer, *, intent: str | None = None) -> Receipt:
        """Take out what is unbonded and not frozen."""
        return await self._call(signer, "StakeLedger", "withdraw", intent=intent)

    async def bind_node(self, owner: Signer, node: Signer, peer_id: bytes) -> Receipt:
        """Bind a node key to an owner under a peer id; both sign."""
        registry = self.deployment.address("NodeRegistry")
        nonce = int(await self._view("NodeRegistry", "nonces", node.address))
        deadline = await self.block_time() + _BINDING_GOOD_FOR_S
        typed = binding_typed_data(
            self.deployment.chain_id, registry, owner.address, node.address, peer_id, nonce, deadline
        )
        signature = node.sign_typed(typed)
        return await self._call(owner, "NodeRegistry", "bind", node.address, peer_id, deadline, signature)

    async def unbind_node(self, signer: Signer, node: str) -> Receipt:
        """End a binding, as its owner or as the node key."""
        return await self._call(signer, "NodeRegistry", "unbind", node)

    # Work

    async def open_run(self, coordinator: Signer, run_id: bytes, publisher: str) -> Receipt:
        """Open a run and fix its publisher for ever; only the coordinator of the deployment can."""
        intent = f"open-run:{run_id.hex()}"
        return await self._call(coordinator, "WorkLedger", "openRun", run_id, publisher, intent=intent)

    async def record_checkpoint(
        self, publisher: Signer, run_id: bytes, version: int, checkpoint_hash: bytes
    ) -> Receipt:
        """Record C of a version; repeating it with the same C returns the first receipt."""
        intent = f"record:{run_id.hex()}:{version}:{checkpoint_hash.hex()}"
        return await self._call(
            publisher, "WorkLedger", "record", run_id, version, checkpoint_hash, intent=intent
        )

    async def commit_work(self, signer: Signer, commit: WorkCommit, signatures: Sequence[bytes]) -> Receipt:
        """Commit to work with a quorum's signatures (see `order_signatures`). Anybody may send it."""
        entries = [
            (
                entry.version,
                entry.revision,
                entry.root,
                entry.data_hash,
                entry.accepted,
                entry.rejected,
                entry.units,
            )
            for entry in commit.entries
        ]
        return await self._call(signer, "WorkLedger", "commit", commit.run_id, entries, list(signatures))

    async def void_work(
        self, signer: Signer, run_id: bytes, version: int, revision: int, signatures: Sequence[bytes]
    ) -> Receipt:
        """Void a commitment within its window with a quorum's signatures."""
        return await self._call(signer, "WorkLedger", "voidWork", run_id, version, revision, list(signatures))

    # Cases

    async def open_case(
        self,
        reporter: Signer,
        accused_owner: str,
        node: str,
        amount: int,
        kind: Offence,
        evidence_hash: bytes,
    ) -> int:
        """Open a case, approving the bond first; the same evidence by the same reporter opens one case only.

        Returns:
            The case id.
        """
        court = self.deployment.address("SlashCourt")
        intent = f"open-case:{accused_owner}:{evidence_hash.hex()}"
        bond = await self.bond()
        allowed = int(await self._view(TOKEN, "allowance", reporter.address, court))
        if allowed < bond:
            # Once for all the cases to come: the court takes one bond per case that the reporter opens.
            await self._call(reporter, TOKEN, "approve", court, 2**256 - 1)
        receipt = await self._call(
            reporter,
            "SlashCourt",
            "open",
            accused_owner,
            node,
            amount,
            int(kind),
            evidence_hash,
            intent=intent,
        )
        for event in await self.events(receipt.block_number, receipt.block_number, CaseOpened):
            if isinstance(event, CaseOpened) and event.transaction_hash == receipt.transaction_hash:
                return event.case_id
        raise LedgerError("the case was opened but its event is not there")

    async def appeal(self, accused: Signer, case_id: int, defence_hash: bytes) -> Receipt:
        """Answer an accusation, once, within the window."""
        return await self._call(
            accused, "SlashCourt", "appeal", case_id, defence_hash, intent=f"appeal:{case_id}"
        )

    async def decide(
        self, signer: Signer, case_id: int, uphold: bool, signatures: Sequence[bytes]
    ) -> Receipt:
        """End a case with a quorum's verdict. Anybody may send it."""
        return await self._call(signer, "SlashCourt", "decide", case_id, uphold, list(signatures))

    async def expire(self, signer: Signer, case_id: int) -> Receipt:
        """Dismiss a case that nobody decided in time. Anybody may send it."""
        return await self._call(signer, "SlashCourt", "expire", case_id)

    async def appoint_validators(
        self, signer: Signer, members: Sequence[str], signatures: Sequence[bytes]
    ) -> Receipt:
        """Appoint the next validator set (members ascending) with a quorum's signatures."""
        return await self._call(signer, "ValidatorSet", "appoint", list(members), list(signatures))

    # Moving money

    async def transfer_token(
        self, signer: Signer, to: str, amount: int, *, intent: str | None = None
    ) -> Receipt:
        return await self._call(signer, TOKEN, "transfer", to, amount, intent=intent)

    async def transfer_eth(self, signer: Signer, to: str, wei: int, *, intent: str | None = None) -> Receipt:
        return await self.queue.send(signer, to, value=wei, intent=intent)

    async def mint_token(
        self, deployer: Signer, to: str, amount: int, *, intent: str | None = None
    ) -> Receipt:
        """Make development tokens; only the deployer of a development token can."""
        return await self._call(deployer, TOKEN, "mint", to, amount, intent=intent)

    async def _call(
        self, signer: Signer, name: str, function: str, *arguments: Any, intent: str | None = None
    ) -> Receipt:
        if await self.queue.chain_id() != self.deployment.chain_id:
            await self.check()
        address = self.deployment.address(name)
        return await self.queue.call(signer, name, address, function, *arguments, intent=intent)


def _second(intent: str | None, suffix: str) -> str | None:
    return None if intent is None else f"{intent}:{suffix}"
