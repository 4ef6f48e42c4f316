"""Reading a deployment from trio: views at the newest block, and events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import trio

from ..errors import ConfigError, DeadlineError, LedgerError
from ..keys import address_bytes, checksum_address
from .artefacts import TOKEN
from .chain import Chain, translated
from .deployment import Deployment
from .events import LedgerEvent, decode_log, topics_of
from .records import (
    Block,
    Case,
    CaseStatus,
    CourtTerms,
    NodeBinding,
    Offence,
    RecordedCheckpoint,
    RunRecord,
    StakeAccount,
    ValidatorSetState,
    WorkRecord,
)
from .rpc import FailoverProvider

T = TypeVar("T")

_CASES_PER_READ = 64
_BLOCKS_PER_READ = 2_000
_ZERO_ADDRESS = "0x" + 40 * "0"


class LedgerReader:
    """Views and events of one deployment on one chain."""

    def __init__(self, rpc: Sequence[str] | Any, deployment: Deployment, *, timeout_s: float = 5.0) -> None:
        """
        Args:
            rpc: URLs to try in turn, or a web3 provider.
            timeout_s: per request and URL.

        Raises:
            ConfigError: a URL or the deployment is malformed.
        """
        deployment.check("deployment")
        self.deployment = deployment
        provider = FailoverProvider(rpc, timeout_s=timeout_s) if isinstance(rpc, (list, tuple)) else rpc
        self._provider = provider
        self._longest_read_s = getattr(provider, "longest_call_s", timeout_s) * 4
        self._chain = Chain(provider)

    def close(self) -> None:
        """Close the connections."""
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
