"""`Ledger`: the contracts of one deployment, read and written from trio.

Reads are views at the newest block. Writes return when the transaction is mined and raise `LedgerError`
with the contract's error name if it is refused; `sending.py` says what happens in between. Writes that
can only sensibly happen once are named by their content, so that repeating one after a crash joins the
first instead of sending a second; the others take an `intent` for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import trio

from ..errors import ConfigError, DeadlineError, LedgerError
from ..keys import Signer, address_bytes, checksum_address
from .artefacts import TOKEN
from .chain import Chain, translated
from .deployment import Deployment
from .events import CaseOpened, LedgerEvent, decode_log, topics_of
from .records import (
    Block,
    Case,
    CaseStatus,
    CourtTerms,
    NodeBinding,
    Offence,
    Receipt,
    RecordedCheckpoint,
    RunRecord,
    StakeAccount,
    ValidatorSetState,
    WorkCommit,
    WorkRecord,
)
from .rpc import FailoverProvider
from .sending import FeePolicy, TransactionQueue
from .typed_data import binding_typed_data

T = TypeVar("T")

_CASES_PER_READ = 64
_BLOCKS_PER_READ = 2_000
_BINDING_GOOD_FOR_S = 600
_ZERO_ADDRESS = "0x" + 40 * "0"


class Ledger:
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
        deployment.check("deployment")
        self.deployment = deployment
        provider = FailoverProvider(rpc, timeout_s=timeout_s) if isinstance(rpc, (list, tuple)) else rpc
        self._provider = provider
        self._longest_read_s = getattr(provider, "longest_call_s", timeout_s) * 4
        self._chain = Chain(provider)
        self.queue = TransactionQueue(self._chain, state_dir, fees=fees, deadline_s=deadline_s)

    def close(self) -> None:
        """Close connections and files."""
        self.queue.close()
        if isinstance(self._provider, FailoverProvider):
            self._provider.close()

    async def check(self) -> None:
        """Check that the RPC serves the chain of the deployment and that the contracts are there.

        Raises:
            ConfigError: another chain, or no contract at an address.
            UnreachableError: no answer.
        """
        found = await self.chain_id()
        if found != self.deployment.chain_id:
            raise ConfigError(
                f"the RPC serves chain {found}, the deployment is on {self.deployment.chain_id}"
            )
        for name, address in self.deployment.contracts.items():
            if not await self._ask(partial(self._chain.has_code, address)):
                raise ConfigError(f"no contract at {address} ({name}): is this the chain it was deployed on?")

    # Reading

    async def chain_id(self) -> int:
        return await self._ask(self._chain.chain_id)

    async def block(self, number: int | str = "latest") -> Block:
        """Number, hash and time of a block."""
        return await self._ask(lambda: self._chain.block(number))

    async def block_time(self) -> int:
        """The chain's clock: seconds since 1970 as a transaction sent now would see them."""
        return await self._ask(self._chain.next_block_time)

    async def balance(self, address: str) -> int:
        """Wei."""
        return await self._ask(lambda: self._chain.balance(address))

    async def token_balance(self, address: str) -> int:
        """Stake tokens held outside the stake ledger, in units of 10^-18."""
        return int(await self._view(TOKEN, "balanceOf", address))

    async def account(self, owner: str) -> StakeAccount:
        active, unbonding, release_at, frozen = await self._view("StakeLedger", "accountOf", owner)
        return StakeAccount(active, unbonding, release_at, frozen)

    async def min_stake(self) -> int:
        """Active stake that each node of an owner needs."""
        return int(await self._view("StakeLedger", "minStake"))

    async def unbonding_s(self) -> int:
        """Seconds between a request to unbond and the withdrawal."""
        return int(await self._view("StakeLedger", "unbondingDelay"))

    async def node(self, node: str) -> NodeBinding | None:
        """The binding of a node key, or None."""
        owner, bound_at, bound_block, peer_id = await self._view("NodeRegistry", "bindingOf", node)
        return None if owner == _ZERO_ADDRESS else NodeBinding(owner, bytes(peer_id), bound_block, bound_at)

    async def nodes_of(self, owner: str) -> tuple[str, ...]:
        """Node keys bound to an owner now."""
        return tuple(await self._view("NodeRegistry", "nodesOf", owner))

    async def is_barred(self, owner: str) -> bool:
        """Whether a fraud of the owner was upheld."""
        return bool(await self._view("SlashCourt", "isBarred", owner))

    async def run(self, run_id: bytes) -> RunRecord | None:
        """Publisher and newest version of a run, or None if it was never opened."""
        publisher, has_versions, latest = await self._view("WorkLedger", "runOf", run_id)
        return None if publisher == _ZERO_ADDRESS else RunRecord(publisher, latest if has_versions else None)

    async def latest_version(self, run_id: bytes) -> int | None:
        """Newest version recorded for a run, or None."""
        run = await self.run(run_id)
        return None if run is None else run.latest_version

    async def checkpoint(self, run_id: bytes, version: int) -> RecordedCheckpoint | None:
        """What the publisher recorded for a version, or None."""
        hash_, number, recorded_at = await self._view("WorkLedger", "checkpointOf", run_id, version)
        if hash_ == bytes(32):
            return None
        block = await self.block(number)
        if block.time != recorded_at:
            raise LedgerError(f"block {number} is not the one version {version} was recorded in")
        return RecordedCheckpoint(bytes(hash_), number, block.hash, recorded_at)

    async def work(self, run_id: bytes, version: int) -> WorkRecord:
        """The committed work of a version, or an empty record with the revision to sign next."""
        root, data_hash, accepted, rejected, units, revision, committed_at = await self._view(
            "WorkLedger", "workOf", run_id, version
        )
        return WorkRecord(bytes(root), bytes(data_hash), accepted, rejected, units, revision, committed_at)

    async def validator_set(self, set_id: int | None = None) -> ValidatorSetState:
        """A validator set; by default the one in force."""
        if set_id is None:
            set_id = int(await self._view("ValidatorSet", "activeSetId"))
        members = await self._view("ValidatorSet", "membersOf", set_id)
        threshold = await self._view("ValidatorSet", "thresholdOf", set_id)
        return ValidatorSetState(set_id, tuple(members), int(threshold))

    async def bond(self) -> int:
        """Tokens that opening a case takes from the reporter."""
        return int(await self._view("SlashCourt", "bond"))

    async def court_terms(self) -> CourtTerms:
        """Times, bond and caps of cases."""
        names = ("window", "voting", "bond", "fraudCap", "equivocationCap", "accountCap", "capPeriod")
        return CourtTerms(*[int(await self._view("SlashCourt", name)) for name in names])

    async def case(self, case_id: int) -> Case:
        """
        Raises:
            LedgerError: `SlashCourtUnknownCase`.
        """
        return _case(case_id, await self._view("SlashCourt", "caseOf", case_id))

    async def cases(
        self, *, first: int = 1, accused: str | None = None, ongoing: bool | None = None
    ) -> list[Case]:
        """Cases from id `first` on, ascending; of one accused, or only those (not) ongoing, if asked."""
        found: list[Case] = []
        while True:
            rows = await self._view("SlashCourt", "casesFrom", first, _CASES_PER_READ)
            found += [_case(first + position, row) for position, row in enumerate(rows)]
            first += len(rows)
            if len(rows) < _CASES_PER_READ:
                break
        return [
            case
            for case in found
            if (accused is None or case.accused == accused)
            and (ongoing is None or case.status.ongoing == ongoing)
        ]

    async def events(self, from_block: int, to_block: int, *kinds: type[LedgerEvent]) -> list[LedgerEvent]:
        """Events of the deployment in the blocks `from_block` to `to_block`, both included, in order.

        Args:
            kinds: only these, if any are given.
        """
        names = {address: name for name, address in self.deployment.contracts.items() if name != TOKEN}
        query: dict[str, Any] = {"address": list(names)}
        if kinds:
            query["topics"] = [[f"0x{topic.hex()}" for topic in topics_of(kinds)]]
        found: list[LedgerEvent] = []
        # Some nodes refuse a range that ends beyond their newest block.
        to_block = min(to_block, (await self.block()).number)
        for start in range(max(from_block, self.deployment.block), to_block + 1, _BLOCKS_PER_READ):
            end = min(start + _BLOCKS_PER_READ - 1, to_block)
            bounds = {"fromBlock": start, "toBlock": end}

            def read(bounds: dict[str, int] = bounds) -> list[Any]:
                with translated():
                    return list(self._chain.web3.eth.get_logs({**query, **bounds}))

            for log in await self._ask(read):
                name = names.get(checksum_address(address_bytes(str(log["address"]))))
                event = None if name is None else decode_log(name, log)
                if event is not None:
                    found.append(event)
        return sorted(found, key=lambda event: (event.block_number, event.log_index))

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

    async def _view(self, name: str, function: str, *arguments: Any) -> Any:
        address = self.deployment.address(name)
        return await self._ask(lambda: self._chain.view(name, address, function, *arguments))

    async def _ask(self, question: Callable[[], T]) -> T:
        try:
            with trio.fail_after(self._longest_read_s):
                # trio-typing's stubs are older than this parameter.
                return await trio.to_thread.run_sync(question, abandon_on_cancel=True)  # type: ignore[call-arg]
        except trio.TooSlowError:
            raise DeadlineError(f"the chain does not answer within {self._longest_read_s:g} s") from None


def _second(intent: str | None, suffix: str) -> str | None:
    return None if intent is None else f"{intent}:{suffix}"


def _case(case_id: int, row: Sequence[Any]) -> Case:
    (
        accused,
        opened_at,
        offence,
        status,
        node,
        window_ends_at,
        reporter,
        decide_by,
        amount,
        bond,
        seized,
        set_id,
        evidence_hash,
        defence_hash,
    ) = row
    return Case(
        case_id=case_id,
        accused=accused,
        node=node,
        reporter=reporter,
        offence=Offence(offence),
        status=CaseStatus(status),
        amount=amount,
        bond=bond,
        seized=seized,
        opened_at=opened_at,
        window_ends_at=window_ends_at,
        decide_by=decide_by,
        set_id=set_id,
        evidence_hash=bytes(evidence_hash),
        defence_hash=bytes(defence_hash),
    )
