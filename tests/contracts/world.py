"""A deployment on an in-process development chain whose clock the test moves."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from web3.providers import BaseProvider

from intellect_coordinator.devchain import ChainRpc
from intellect_coordinator.devchain_evm import DevelopmentChain
from intellect_coordinator.devchain_store import ChainStore
from intellect_protocol.errors import LedgerError
from intellect_protocol.keys import LocalSigner, PeerKey, address_bytes
from intellect_protocol.ledger.chain import Chain
from intellect_protocol.ledger.client import Ledger
from intellect_protocol.ledger.deployment import Deployment, LedgerParameters, deploy
from intellect_protocol.ledger.devkeys import development_signer
from intellect_protocol.ledger.records import Case, Offence, Receipt, WorkCommit, WorkEntry
from intellect_protocol.ledger.sending import TransactionQueue
from intellect_protocol.ledger.typed_data import decision_typed_data, work_typed_data

START = 1_700_000_000
DEPLOYER, COORDINATOR, OWNER, PUBLISHER, REPORTER, STRANGER = map(development_signer, (0, 1, 5, 6, 7, 8))
VALIDATORS = sorted((development_signer(i) for i in (2, 3, 4)), key=lambda key: address_bytes(key.address))
SINK = development_signer(9).address
RUN = b"R" * 32
EVIDENCE = b"E" * 32
STAKE = 1_000
PARAMETERS = LedgerParameters(
    validators=tuple(key.address for key in VALIDATORS),
    coordinator=COORDINATOR.address,
    sink=SINK,
    window_s=100,
    voting_s=100,
    unbonding_s=300,
    set_change_s=500,
    void_window_s=50,
    cap_period_s=100_000,
    min_stake=500,
    bond=50,
    fraud_cap=400,
    equivocation_cap=100,
    account_cap=700,
    reporter_cut_bps=1_000,
)


class InProcessProvider(BaseProvider):
    """web3 provider that calls the development chain's JSON-RPC without a network."""

    def __init__(self, rpc: ChainRpc) -> None:
        super().__init__()
        self._rpc = rpc
        self._lock = threading.Lock()

    def make_request(self, method: str, params: Any) -> Any:
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        with self._lock:
            return msgspec.json.decode(self._rpc.answer(msgspec.json.encode(request)))


class World:
    """The chain in a folder, its clock, and a client of the deployment on it."""

    def __init__(self, folder: Path, now: int = START) -> None:
        self.folder = folder
        self.now = now
        self._store = ChainStore(folder / "devchain.sqlite")
        self.chain = DevelopmentChain(self._store, lambda: self.now, chain_id=77)
        self.provider = InProcessProvider(ChainRpc(self.chain, self._store))
        self.queue = TransactionQueue(Chain(self.provider), folder / "state", poll_s=0.001)
        self._ledger: Ledger | None = None

    def close(self) -> None:
        self.queue.close()
        if self._ledger is not None:
            self._ledger.close()
        self._store.close()

    @property
    def ledger(self) -> Ledger:
        if self._ledger is None:
            deployment = Deployment.load(self.folder / "deployment.json")
            self._ledger = Ledger(self.provider, deployment, self.folder / "state")
        return self._ledger

    def address(self, name: str) -> str:
        return self.ledger.deployment.address(name)

    async def call(self, signer: LocalSigner, name: str, function: str, *arguments: Any) -> Receipt:
        """Any contract function, also those the client does not offer."""
        return await self.ledger.queue.call(signer, name, self.address(name), function, *arguments)

    async def view(self, name: str, function: str, *arguments: Any) -> Any:
        return self.ledger._chain.view(name, self.address(name), function, *arguments)

    async def populate(self) -> None:
        """Deploy; give tokens to all who need some; stake for the owner; open the run."""
        deployment = await deploy(self.queue, DEPLOYER, PARAMETERS)
        deployment.save(self.folder / "deployment.json")
        for key in (OWNER, REPORTER, STRANGER, *VALIDATORS):
            await self.ledger.mint_token(DEPLOYER, key.address, 10_000)
        await self.ledger.stake(OWNER, STAKE)
        await self.ledger.open_run(COORDINATOR, RUN, PUBLISHER.address)

    async def open_case(
        self,
        *,
        amount: int = 400,
        reporter: LocalSigner = REPORTER,
        accused: str = OWNER.address,
        kind: Offence = Offence.FRAUD,
        evidence: bytes = EVIDENCE,
    ) -> Case:
        node = development_signer(10).address
        case_id = await self.ledger.open_case(reporter, accused, node, amount, kind, evidence)
        return await self.ledger.case(case_id)

    def verdict(
        self, case: Case, uphold: bool, signers: Sequence[LocalSigner] = VALIDATORS[:2]
    ) -> list[bytes]:
        """Signatures in the order of `signers`."""
        typed = decision_typed_data(77, self.address("SlashCourt"), case, uphold)
        return [signer.sign_typed(typed) for signer in signers]

    async def decide(
        self, case: Case, uphold: bool, signers: Sequence[LocalSigner] = VALIDATORS[:2]
    ) -> Receipt:
        return await self.ledger.decide(STRANGER, case.case_id, uphold, self.verdict(case, uphold, signers))

    def work_signatures(
        self, commit: WorkCommit, signers: Sequence[LocalSigner] = VALIDATORS[:2]
    ) -> list[bytes]:
        typed = work_typed_data(77, self.address("WorkLedger"), commit)
        return [signer.sign_typed(typed) for signer in signers]


def entry(version: int, *, root: bytes = b"\1" * 32, revision: int = 0) -> WorkEntry:
    return WorkEntry(version, revision, root, b"\2" * 32, 3, 1, 24)


def peer_id(number: int = 1) -> bytes:
    return PeerKey(bytes([number]) * 32).peer_id


async def refused(name: str, attempt: Awaitable[Any]) -> None:
    """The attempt is refused by the contract error `name`."""
    with pytest.raises(LedgerError) as caught:
        await attempt
    assert caught.value.name == name


async def refused_signatures(attempt: Awaitable[Any]) -> None:
    """The attempt is refused because its signatures are over something else: they recover to strangers."""
    with pytest.raises(LedgerError) as caught:
        await attempt
    assert caught.value.name in ("ValidatorSetNotAMember", "ValidatorSetSignersNotAscending")
