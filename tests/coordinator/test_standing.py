"""Who may work: the ledger's events on a real chain, followed block by block."""

from __future__ import annotations

import pytest
from coordinator_site import NODE, Site
from world import DEPLOYER, OWNER, PUBLISHER, STRANGER, VALIDATORS

from intellect_coordinator.standing import Standing, stored_events
from intellect_protocol.errors import RefusedError, SlashedError, UnreachableError
from intellect_protocol.keys import PeerKey
from intellect_protocol.ledger.devkeys import development_signer
from intellect_protocol.ledger.records import RecordedCheckpoint

SECOND_NODE, THIRD_NODE = development_signer(11), development_signer(12)
NEW_VERSION = 9


async def recorded(site: Site, version: int = 0) -> RecordedCheckpoint:
    found = await site.heads.recorded(version)
    assert found is not None
    return found


async def record(site: Site, version: int = NEW_VERSION) -> RecordedCheckpoint:
    await site.world.ledger.record_checkpoint(PUBLISHER, site.config.run_id, version, b"\x09" * 32)
    return await recorded(site, version)


async def test_a_node_that_was_bound_and_staked_before_the_version_may_work(site: Site) -> None:
    assert await site.standing.check(NODE.address, await recorded(site)) == OWNER.address


async def test_an_unbound_key_may_not_work(site: Site) -> None:
    with pytest.raises(RefusedError, match="not_bound"):
        await site.standing.check(SECOND_NODE.address, await recorded(site))


async def test_a_node_bound_after_the_version_was_recorded_waits_for_the_next_one(site: Site) -> None:
    await site.world.ledger.bind_node(OWNER, SECOND_NODE, PeerKey(b"\x06" * 32).peer_id)
    with pytest.raises(RefusedError, match="bound_late"):
        await site.standing.check(SECOND_NODE.address, await recorded(site))
    assert await site.standing.check(SECOND_NODE.address, await record(site)) == OWNER.address


async def test_stake_that_came_after_the_version_was_recorded_does_not_count(site: Site) -> None:
    ledger = site.world.ledger
    await ledger.bind_node(STRANGER, SECOND_NODE, PeerKey(b"\x06" * 32).peer_id)
    early = await record(site)
    await ledger.stake(STRANGER, 500)
    with pytest.raises(RefusedError, match="bound_late"):
        await site.standing.check(SECOND_NODE.address, early)
    assert await site.standing.check(SECOND_NODE.address, await record(site, 10)) == STRANGER.address


async def test_every_node_needs_a_minimum_stake_of_its_own_and_the_oldest_come_first(site: Site) -> None:
    ledger = site.world.ledger
    await ledger.bind_node(OWNER, SECOND_NODE, PeerKey(b"\x06" * 32).peer_id)
    await ledger.bind_node(OWNER, THIRD_NODE, PeerKey(b"\x07" * 32).peer_id)
    late = await record(site)
    assert await site.standing.check(NODE.address, late) == OWNER.address
    assert await site.standing.check(SECOND_NODE.address, late) == OWNER.address
    with pytest.raises(RefusedError, match="no_stake"):
        await site.standing.check(THIRD_NODE.address, late)
    await ledger.unbind_node(OWNER, SECOND_NODE.address)
    await site.standing.sync()
    assert await site.standing.check(THIRD_NODE.address, late) == OWNER.address


async def test_stake_that_was_pulled_and_put_back_counts_from_when_it_came_back(site: Site) -> None:
    ledger = site.world.ledger
    await ledger.request_unbond(OWNER, 900)
    await site.standing.sync()
    with pytest.raises(RefusedError, match="unbonding"):
        await site.standing.check(NODE.address, await recorded(site))
    await ledger.rebond(OWNER, 900)
    with pytest.raises(RefusedError, match="bound_late"):
        await site.standing.check(NODE.address, await recorded(site))
    assert await site.standing.check(NODE.address, await record(site)) == OWNER.address


async def test_an_open_case_freezes_standing_and_a_dismissal_gives_it_back(site: Site) -> None:
    world = site.world
    case = await world.open_case(amount=400)
    second = await world.open_case(amount=400, evidence=b"F" * 32)
    await site.standing.sync()
    with pytest.raises(RefusedError, match="stake_frozen") as caught:
        await site.standing.check(NODE.address, await recorded(site))
    assert caught.value.retry_after_s is not None
    await world.decide(case, False)
    await world.decide(second, False)
    assert await site.standing.check(NODE.address, await recorded(site)) == OWNER.address


async def test_an_upheld_fraud_bars_every_node_of_the_owner(site: Site) -> None:
    case = await site.world.open_case()
    site.pass_time(101)
    await site.world.decide(case, True)
    await site.standing.sync()
    with pytest.raises(SlashedError, match="evicted"):
        await site.standing.check(NODE.address, await recorded(site))


async def test_the_book_agrees_with_the_contracts_after_all_of_this(site: Site) -> None:
    world, ledger = site.world, site.world.ledger
    await ledger.request_unbond(OWNER, 300)
    case = await world.open_case(amount=400)
    site.pass_time(101)
    await world.decide(case, True)
    await world.open_case(amount=100, evidence=b"F" * 32)
    await ledger.mint_token(DEPLOYER, OWNER.address, 1_000)
    await ledger.stake(OWNER, 70)
    await site.standing.sync()
    book, account = site.standing.book, await ledger.account(OWNER.address)
    assert (book.active(OWNER.address), book.unbonding(OWNER.address), book.frozen(OWNER.address)) == (
        account.active,
        account.unbonding,
        account.frozen,
    )
    assert account.total == 670


async def test_a_restart_reads_nothing_twice_and_knows_the_same(site: Site) -> None:
    before = site.standing.book
    with site.store.snapshot() as connection:
        count = len(stored_events(connection))
    await site.restart()
    after = site.standing.book
    assert after.nodes_of(OWNER.address) == before.nodes_of(OWNER.address) == [NODE.address]
    assert after.active(OWNER.address) == before.active(OWNER.address)
    with site.store.snapshot() as connection:
        assert len(stored_events(connection)) == count


async def test_amounts_beyond_64_bits_survive_a_restart(site: Site) -> None:
    tokens = 2_500 * 10**18
    await site.world.ledger.mint_token(DEPLOYER, STRANGER.address, tokens)
    await site.world.ledger.stake(STRANGER, tokens)
    await site.standing.sync()
    await site.restart()
    assert site.standing.book.active(STRANGER.address) == tokens


async def test_blocks_without_confirmations_are_not_believed_yet(site: Site) -> None:
    await site.world.ledger.bind_node(STRANGER, SECOND_NODE, PeerKey(b"\x06" * 32).peer_id)
    from intellect_coordinator.store import Store

    store = Store(f"sqlite:///{site.folder / 'careful.sqlite'}")
    try:
        careful = Standing(store, site.world.ledger, confirmations=1)
        await careful.open()
        assert careful.book.binding(SECOND_NODE.address) is None
        await record(site)
        await careful.sync()
        assert careful.book.binding(SECOND_NODE.address) is not None
    finally:
        store.close()


async def test_before_the_ledger_was_read_nobody_is_judged(site: Site) -> None:
    unopened = Standing(site.store, site.world.ledger)
    with pytest.raises(UnreachableError):
        _ = unopened.min_stake


async def test_the_validator_set_is_that_of_the_ledger(site: Site) -> None:
    assert (await site.standing.validators()).members == tuple(key.address for key in VALIDATORS)
    with pytest.raises(RefusedError, match="not_a_validator"):
        await site.standing.check_validator(OWNER.address)
