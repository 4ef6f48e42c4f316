"""The client as others use it: events, deployments, and the same flow on another chain."""

from __future__ import annotations

import warnings
from pathlib import Path

import msgspec
import pytest
from world import (
    COORDINATOR,
    DEPLOYER,
    OWNER,
    PARAMETERS,
    PUBLISHER,
    REPORTER,
    RUN,
    STAKE,
    STRANGER,
    VALIDATORS,
    World,
    entry,
    peer_id,
    refused,
)

from intellect_protocol.errors import ConfigError
from intellect_protocol.keys import LocalSigner
from intellect_protocol.ledger.chain import Chain
from intellect_protocol.ledger.client import Ledger
from intellect_protocol.ledger.deployment import Deployment, deploy
from intellect_protocol.ledger.events import (
    CaseOpened,
    CaseUpheld,
    CheckpointRecorded,
    LedgerEvent,
    NodeBound,
    OwnerBarred,
    RunOpened,
    SetAppointed,
    Staked,
    StakeSeized,
    WorkCommitted,
)
from intellect_protocol.ledger.records import CaseStatus, Offence, WorkCommit
from intellect_protocol.ledger.sending import TransactionQueue
from intellect_protocol.ledger.typed_data import decision_typed_data, work_typed_data


async def test_events_tell_the_whole_story_in_order(world: World) -> None:
    node = LocalSigner.create()
    await world.ledger.bind_node(OWNER, node, peer_id())
    await world.ledger.record_checkpoint(PUBLISHER, RUN, 0, b"C" * 32)
    commit = WorkCommit(RUN, 1, (entry(0),))
    await world.ledger.commit_work(STRANGER, commit, world.work_signatures(commit))
    case = await world.open_case()
    world.now = case.window_ends_at + 1
    await world.decide(case, True)
    head = (await world.ledger.block()).number
    events = await world.ledger.events(0, head)
    assert events == sorted(events, key=lambda event: (event.block_number, event.log_index))
    kinds = [type(event) for event in events]
    story: list[type[LedgerEvent]] = [
        SetAppointed,
        Staked,
        RunOpened,
        NodeBound,
        CheckpointRecorded,
        WorkCommitted,
        CaseOpened,
        OwnerBarred,
        StakeSeized,
        CaseUpheld,
    ]
    positions = [kinds.index(kind) for kind in story]
    assert positions == sorted(positions)
    bound = next(event for event in events if isinstance(event, NodeBound))
    assert (bound.owner, bound.node, bound.peer_id) == (OWNER.address, node.address, peer_id())
    opened = next(event for event in events if isinstance(event, CaseOpened))
    assert (opened.case_id, opened.accused, opened.offence) == (case.case_id, OWNER.address, Offence.FRAUD)
    seized = next(event for event in events if isinstance(event, StakeSeized))
    assert (seized.amount, seized.cut, seized.reporter) == (400, 40, REPORTER.address)
    only = await world.ledger.events(0, head, Staked, CaseUpheld)
    assert [type(event) for event in only] == [Staked, CaseUpheld]
    assert await world.ledger.events(head + 1, head + 5) == []


async def test_the_same_evidence_of_the_same_reporter_opens_one_case(world: World) -> None:
    first = await world.open_case()
    assert await world.open_case() == first
    assert len(await world.ledger.cases()) == 1


async def test_the_chains_clock_is_that_of_a_transaction_sent_now(world: World) -> None:
    world.now += 1234
    assert await world.ledger.block_time() == world.now
    assert (await world.ledger.block()).time < world.now


async def test_the_terms_of_cases_are_those_deployed(world: World) -> None:
    terms = await world.ledger.court_terms()
    for name in terms.__struct_fields__:
        assert getattr(terms, name) == getattr(PARAMETERS, name), name
    assert await world.ledger.bond() == PARAMETERS.bond
    assert await world.ledger.unbonding_s() == PARAMETERS.unbonding_s


async def test_a_deployment_of_another_chain_is_refused(world: World) -> None:
    elsewhere = msgspec.structs.replace(world.ledger.deployment, chain_id=78)
    ledger = Ledger(world.provider, elsewhere, world.folder / "state-78")
    with pytest.raises(ConfigError, match="chain 77"):
        await ledger.check()
    with pytest.raises(ConfigError, match="chain 77"):
        await ledger.stake(OWNER, 1)
    ledger.close()


async def test_a_deployment_without_contracts_behind_it_is_refused(world: World) -> None:
    contracts = {**world.ledger.deployment.contracts, "WorkLedger": STRANGER.address}
    ledger = Ledger(world.provider, msgspec.structs.replace(world.ledger.deployment, contracts=contracts))
    with pytest.raises(ConfigError, match="WorkLedger"):
        await ledger.check()
    await world.ledger.check()


async def test_a_real_token_is_used_where_there_is_one(world: World) -> None:
    parameters = msgspec.structs.replace(PARAMETERS, token=world.address("Token"))
    deployment = await deploy(world.queue, DEPLOYER, parameters)
    assert deployment.address("Token") == world.address("Token")
    ledger = Ledger(world.provider, deployment, world.folder / "second")
    await ledger.stake(STRANGER, 7)
    assert (await ledger.account(STRANGER.address)).active == 7
    ledger.close()


async def test_the_whole_flow_runs_on_eth_tester_with_the_same_errors(tmp_path: Path) -> None:
    """From deployment to seizure on the plain eth-tester, whose exceptions are others than a node's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from eth_tester import EthereumTester, PyEVMBackend
        from web3.providers.eth_tester import EthereumTesterProvider
    keys = (DEPLOYER, COORDINATOR, PUBLISHER, OWNER, REPORTER, STRANGER)
    account = {"balance": 10**24, "nonce": 0, "code": b"", "storage": {}}
    # eth-tester makes its calls from the account of key 1.
    state = {key.address_bytes: account for key in (LocalSigner((1).to_bytes(32, "big")), *keys)}
    tester = EthereumTester(PyEVMBackend(genesis_state=state))
    provider = EthereumTesterProvider(tester)
    queue = TransactionQueue(Chain(provider), tmp_path, poll_s=0.001)
    deployment = await deploy(queue, DEPLOYER, PARAMETERS)
    queue.close()
    ledger = Ledger(provider, deployment, tmp_path)
    await ledger.check()
    for key in (OWNER, REPORTER):
        await ledger.mint_token(DEPLOYER, key.address, 1000)
    await ledger.stake(OWNER, STAKE)
    await ledger.open_run(COORDINATOR, RUN, PUBLISHER.address)
    await refused("WorkLedgerNotPublisher", ledger.record_checkpoint(STRANGER, RUN, 0, b"C" * 32))
    await ledger.record_checkpoint(PUBLISHER, RUN, 0, b"C" * 32)
    recorded = await ledger.checkpoint(RUN, 0)
    assert recorded is not None
    assert recorded.block_hash == (await ledger.block(recorded.block_number)).hash
    chain_id = deployment.chain_id
    commit = WorkCommit(RUN, 1, (entry(0),))
    typed = work_typed_data(chain_id, deployment.address("WorkLedger"), commit)
    await ledger.commit_work(STRANGER, commit, [key.sign_typed(typed) for key in VALIDATORS[:2]])
    node = LocalSigner.create()
    await ledger.bind_node(OWNER, node, peer_id())
    case_id = await ledger.open_case(REPORTER, OWNER.address, node.address, 400, Offence.FRAUD, b"E" * 32)
    case = await ledger.case(case_id)
    typed = decision_typed_data(chain_id, deployment.address("SlashCourt"), case, True)
    signatures = [key.sign_typed(typed) for key in VALIDATORS[1:]]
    await refused("SlashCourtWindowOpen", ledger.decide(STRANGER, case_id, True, signatures))
    tester.time_travel(case.window_ends_at + 1)
    await ledger.decide(STRANGER, case_id, True, signatures)
    assert (await ledger.case(case_id)).status is CaseStatus.UPHELD
    assert (await ledger.account(OWNER.address)).active == STAKE - 400
    await refused("StakeLedgerNothingToWithdraw", ledger.withdraw(OWNER))
    ledger.close()


def test_a_deployment_file_survives_writing_and_reading(world: World, tmp_path: Path) -> None:
    path = tmp_path / "deployment.json"
    world.ledger.deployment.save(path)
    assert Deployment.load(path) == world.ledger.deployment


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"chain_id": 1, "contracts": {}, "block": 1}',
        b'{"chain_id": 1, "contracts": {}, "block": 1, "more": 2}',
        b"x" * 100_000,
    ],
)
def test_a_malformed_deployment_file_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "deployment.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"deployment\.json"):
        Deployment.load(path)
    with pytest.raises(ConfigError):
        Deployment.load(tmp_path / "missing.json")
