"""Versions and the work for them: written once, by whom it concerns."""

from __future__ import annotations

import pytest
from world import (
    COORDINATOR,
    DEPLOYER,
    OWNER,
    PARAMETERS,
    PUBLISHER,
    RUN,
    STRANGER,
    VALIDATORS,
    World,
    entry,
    refused,
    refused_signatures,
)

from intellect_protocol.keys import LocalSigner
from intellect_protocol.ledger.merkle import WorkLeaf, leaf_hash, merkle_proof, merkle_root
from intellect_protocol.ledger.records import WorkCommit, WorkEntry
from intellect_protocol.ledger.typed_data import void_typed_data

C = b"C" * 32


async def _commit(world: World, *entries: WorkEntry, signers: list[LocalSigner] = VALIDATORS[:2]) -> None:
    commit = WorkCommit(RUN, 1, entries)
    await world.ledger.commit_work(STRANGER, commit, world.work_signatures(commit, signers))


async def test_a_recorded_checkpoint_carries_the_hash_of_its_block(world: World) -> None:
    assert await world.ledger.latest_version(RUN) is None
    assert await world.ledger.checkpoint(RUN, 0) is None
    receipt = await world.ledger.record_checkpoint(PUBLISHER, RUN, 0, C)
    recorded = await world.ledger.checkpoint(RUN, 0)
    assert recorded is not None
    assert (recorded.checkpoint_hash, recorded.block_number) == (C, receipt.block_number)
    assert recorded.block_hash == (await world.ledger.block(receipt.block_number)).hash
    assert recorded.recorded_at == world.now
    assert await world.ledger.latest_version(RUN) == 0


async def test_the_first_record_of_a_version_wins(world: World) -> None:
    first = await world.ledger.record_checkpoint(PUBLISHER, RUN, 0, C)
    assert await world.ledger.record_checkpoint(PUBLISHER, RUN, 0, C) == first
    await refused("WorkLedgerAlreadyRecorded", world.ledger.record_checkpoint(PUBLISHER, RUN, 0, b"D" * 32))
    recorded = await world.ledger.checkpoint(RUN, 0)
    assert recorded is not None
    assert recorded.checkpoint_hash == C


async def test_versions_ascend(world: World) -> None:
    await world.ledger.record_checkpoint(PUBLISHER, RUN, 4, C)
    await refused("WorkLedgerVersionNotAscending", world.ledger.record_checkpoint(PUBLISHER, RUN, 3, C))
    await refused("WorkLedgerZeroHash", world.ledger.record_checkpoint(PUBLISHER, RUN, 5, bytes(32)))
    await world.ledger.record_checkpoint(PUBLISHER, RUN, 6, C)
    assert await world.ledger.latest_version(RUN) == 6


async def test_only_the_publisher_records(world: World) -> None:
    for key in (COORDINATOR, DEPLOYER, STRANGER, VALIDATORS[0]):
        await refused("WorkLedgerNotPublisher", world.ledger.record_checkpoint(key, RUN, 0, C))
    await refused("WorkLedgerUnknownRun", world.ledger.record_checkpoint(PUBLISHER, b"X" * 32, 0, C))


async def test_a_stranger_cannot_take_the_name_of_a_run(world: World) -> None:
    name = b"N" * 32
    await refused("WorkLedgerNotCoordinator", world.ledger.open_run(STRANGER, name, STRANGER.address))
    await world.ledger.open_run(COORDINATOR, name, PUBLISHER.address)
    await refused(
        "WorkLedgerRunAlreadyOpen", world.call(COORDINATOR, "WorkLedger", "openRun", name, OWNER.address)
    )
    run = await world.ledger.run(name)
    assert run is not None
    assert (run.publisher, run.latest_version) == (PUBLISHER.address, None)


async def test_a_quorum_commits_to_several_versions_at_once(world: World) -> None:
    for version in (0, 1, 2):
        await world.ledger.record_checkpoint(PUBLISHER, RUN, version, C)
    await _commit(world, entry(0), entry(2, root=b"\3" * 32))
    work = await world.ledger.work(RUN, 2)
    assert (work.root, work.data_hash) == (b"\3" * 32, b"\2" * 32)
    assert (work.accepted, work.rejected, work.units, work.committed_at) == (3, 1, 24, world.now)
    assert (await world.ledger.work(RUN, 1)).committed_at == 0
    await refused("WorkLedgerAlreadyCommitted", _commit(world, entry(1), entry(2)))
    assert (await world.ledger.work(RUN, 1)).committed_at == 0


async def test_work_needs_a_recorded_version_and_a_quorum(world: World) -> None:
    await refused("WorkLedgerUnknownVersion", _commit(world, entry(0)))
    await world.ledger.record_checkpoint(PUBLISHER, RUN, 0, C)
    await refused("WorkLedgerInvalidEntries", _commit(world))
    await refused("ValidatorSetBelowThreshold", _commit(world, entry(0), signers=VALIDATORS[:1]))
    await refused("ValidatorSetNotAMember", _commit(world, entry(0), signers=[COORDINATOR, VALIDATORS[0]]))
    await _commit(world, entry(0))


async def test_signatures_under_work_are_good_for_their_run_content_and_set_only(world: World) -> None:
    other_run = b"O" * 32
    await world.ledger.open_run(COORDINATOR, other_run, PUBLISHER.address)
    for run in (RUN, other_run):
        await world.ledger.record_checkpoint(PUBLISHER, run, 0, C)
    signed = world.work_signatures(WorkCommit(RUN, 1, (entry(0),)))
    for commit in (WorkCommit(other_run, 1, (entry(0),)), WorkCommit(RUN, 1, (entry(0, root=b"\4" * 32),))):
        await refused_signatures(world.ledger.commit_work(STRANGER, commit, signed))
    commit = WorkCommit(RUN, 1, (entry(0),))
    of_another_set = world.work_signatures(WorkCommit(RUN, 2, (entry(0),)))
    await refused_signatures(world.ledger.commit_work(STRANGER, commit, of_another_set))
    await world.ledger.commit_work(STRANGER, commit, signed)


async def test_a_void_commitment_is_replaced_by_the_next_revision_only(world: World) -> None:
    await world.ledger.record_checkpoint(PUBLISHER, RUN, 0, C)
    await refused("WorkLedgerNotCommitted", _void(world, 0))
    await _commit(world, entry(0))
    await refused("ValidatorSetBelowThreshold", _void(world, 0, signers=VALIDATORS[:1]))
    await refused("WorkLedgerWrongRevision", _void(world, 1))
    await _void(world, 0)
    work = await world.ledger.work(RUN, 0)
    assert (work.revision, work.committed_at) == (1, 0)
    await refused("WorkLedgerWrongRevision", _commit(world, entry(0)))
    await _commit(world, entry(0, revision=1))
    await refused("WorkLedgerWrongRevision", _void(world, 0))
    world.now += PARAMETERS.void_window_s + 1
    await refused("WorkLedgerVoidWindowOver", _void(world, 1))


async def _void(world: World, revision: int, signers: list[LocalSigner] = VALIDATORS[:2]) -> None:
    typed = void_typed_data(77, world.address("WorkLedger"), RUN, 1, 0, revision)
    signatures = [key.sign_typed(typed) for key in signers]
    await world.ledger.void_work(STRANGER, RUN, 0, revision, signatures)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 4096])
async def test_python_and_solidity_agree_on_the_merkle_tree(world: World, count: int) -> None:
    leaves = [
        WorkLeaf(0, index, OWNER.address, index.to_bytes(32, "big"), index % 3 > 0, 8 * (index % 3))
        for index in range(count)
    ]
    hashes = [leaf_hash(RUN, leaf) for leaf in leaves]
    await world.ledger.record_checkpoint(PUBLISHER, RUN, 0, C)
    await _commit(world, entry(0, root=merkle_root(hashes)))
    for position in {0, count // 2, count - 1}:
        leaf = leaves[position]
        row = (leaf.version, leaf.index, leaf.node, leaf.work_hash, leaf.accepted, leaf.units)
        proof = merkle_proof(hashes, position)
        assert await world.view("WorkLedger", "leafOf", RUN, row) == hashes[position]
        assert await world.view("WorkLedger", "verifyWork", RUN, row, proof)
        richer = (*row[:5], leaf.units + 1)
        assert not await world.view("WorkLedger", "verifyWork", RUN, richer, proof)
        if proof:
            assert not await world.view("WorkLedger", "verifyWork", RUN, row, proof[:-1])
