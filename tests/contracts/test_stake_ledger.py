"""Stake: what may leave, when, and to whom."""

from __future__ import annotations

import msgspec
from world import DEPLOYER, OWNER, PARAMETERS, STAKE, STRANGER, World, refused

from intellect_protocol.ledger.deployment import LedgerParameters, deploy


async def test_stake_is_active_at_once_and_held_by_the_ledger(world: World) -> None:
    account = await world.ledger.account(OWNER.address)
    assert (account.active, account.unbonding, account.frozen) == (STAKE, 0, 0)
    assert await world.ledger.token_balance(world.address("StakeLedger")) == STAKE
    assert await world.ledger.min_stake() == PARAMETERS.min_stake


async def test_unbonded_stake_comes_back_only_after_the_delay(world: World) -> None:
    before = await world.ledger.token_balance(OWNER.address)
    await world.ledger.request_unbond(OWNER, 300)
    account = await world.ledger.account(OWNER.address)
    assert (account.active, account.unbonding) == (STAKE - 300, 300)
    world.now = account.release_at - 1
    await refused("StakeLedgerStillUnbonding", world.ledger.withdraw(OWNER))
    world.now += 1
    await world.ledger.withdraw(OWNER)
    assert await world.ledger.token_balance(OWNER.address) == before + 300
    await refused("StakeLedgerNothingToWithdraw", world.ledger.withdraw(OWNER))


async def test_a_second_request_restarts_the_clock_of_the_whole_bucket(world: World) -> None:
    await world.ledger.request_unbond(OWNER, 300)
    world.now += PARAMETERS.unbonding_s - 1
    await world.ledger.request_unbond(OWNER, 1)
    world.now += 1
    await refused("StakeLedgerStillUnbonding", world.ledger.withdraw(OWNER))
    world.now += PARAMETERS.unbonding_s - 1
    await world.ledger.withdraw(OWNER)
    assert (await world.ledger.account(OWNER.address)).unbonding == 0


async def test_rebonded_stake_is_active_again(world: World) -> None:
    await world.ledger.request_unbond(OWNER, 300)
    await world.ledger.rebond(OWNER, 200)
    account = await world.ledger.account(OWNER.address)
    assert (account.active, account.unbonding) == (STAKE - 100, 100)
    await refused("StakeLedgerInsufficientStake", world.ledger.rebond(OWNER, 101))


async def test_nobody_unbonds_more_than_he_has(world: World) -> None:
    await refused("StakeLedgerInsufficientStake", world.ledger.request_unbond(OWNER, STAKE + 1))
    await refused("StakeLedgerInsufficientStake", world.ledger.request_unbond(STRANGER, 1))
    await refused("StakeLedgerZeroAmount", world.ledger.request_unbond(OWNER, 0))


async def test_only_the_court_freezes_releases_and_seizes(world: World) -> None:
    for key in (STRANGER, OWNER, DEPLOYER):
        await refused("StakeLedgerNotCourt", world.call(key, "StakeLedger", "freeze", OWNER.address, 1))
        await refused("StakeLedgerNotCourt", world.call(key, "StakeLedger", "release", OWNER.address, 0))
        await refused(
            "StakeLedgerNotCourt",
            world.call(key, "StakeLedger", "seize", OWNER.address, 0, 1, key.address),
        )


async def test_what_a_case_freezes_cannot_leave_and_the_rest_can(world: World) -> None:
    await world.ledger.request_unbond(OWNER, STAKE)
    case = await world.open_case(amount=400)
    account = await world.ledger.account(OWNER.address)
    assert account.frozen == 400
    # The case is kept open for ever in the eyes of the stake ledger: nobody decides.
    world.now = account.release_at
    before = await world.ledger.token_balance(OWNER.address)
    await world.ledger.withdraw(OWNER)
    assert await world.ledger.token_balance(OWNER.address) == before + STAKE - 400
    await refused("StakeLedgerFrozen", world.ledger.withdraw(OWNER))
    await world.ledger.expire(STRANGER, case.case_id)
    await world.ledger.withdraw(OWNER)
    assert await world.ledger.token_balance(OWNER.address) == before + STAKE + case.bond


async def test_active_stake_covers_a_freeze_before_unbonding_stake_does(world: World) -> None:
    await world.ledger.request_unbond(OWNER, 600)
    await world.open_case(amount=400)
    world.now += PARAMETERS.unbonding_s
    await world.ledger.withdraw(OWNER)
    account = await world.ledger.account(OWNER.address)
    assert (account.active, account.unbonding, account.frozen) == (400, 0, 400)


async def test_staking_with_a_permit_needs_no_approval_and_survives_its_replay(world: World) -> None:
    token, ledger = world.address("Token"), world.address("StakeLedger")
    deadline = world.now + 1000

    def permit(nonce: int) -> tuple[int, bytes, bytes]:
        typed = {
            "types": {
                "EIP712Domain": [
                    {"name": "name", "type": "string"},
                    {"name": "version", "type": "string"},
                    {"name": "chainId", "type": "uint256"},
                    {"name": "verifyingContract", "type": "address"},
                ],
                "Permit": [
                    {"name": "owner", "type": "address"},
                    {"name": "spender", "type": "address"},
                    {"name": "value", "type": "uint256"},
                    {"name": "nonce", "type": "uint256"},
                    {"name": "deadline", "type": "uint256"},
                ],
            },
            "primaryType": "Permit",
            "domain": {
                "name": "Intellect Development Token",
                "version": "1",
                "chainId": 77,
                "verifyingContract": token,
            },
            "message": {
                "owner": STRANGER.address,
                "spender": ledger,
                "value": 200,
                "nonce": nonce,
                "deadline": deadline,
            },
        }
        signature = STRANGER.sign_typed(typed)
        return signature[64], signature[:32], signature[32:64]

    v, r, s = permit(0)
    await world.call(STRANGER, "StakeLedger", "stakeWithPermit", 200, deadline, v, r, s)
    assert (await world.ledger.account(STRANGER.address)).active == 200
    # Somebody submits the next permit first; the staker's transaction must not fail for that.
    v, r, s = permit(1)
    await world.call(DEPLOYER, "Token", "permit", STRANGER.address, ledger, 200, deadline, v, r, s)
    await world.call(STRANGER, "StakeLedger", "stakeWithPermit", 200, deadline, v, r, s)
    assert (await world.ledger.account(STRANGER.address)).active == 400
    # The permit is used up, and so is the allowance.
    await refused(
        "ERC20InsufficientAllowance",
        world.call(STRANGER, "StakeLedger", "stakeWithPermit", 200, deadline, v, r, s),
    )


async def test_a_reporters_cut_above_a_tenth_cannot_be_deployed(world: World) -> None:
    parameters = _with(reporter_cut_bps=1_001)
    await refused("StakeLedgerCutTooHigh", deploy(world.queue, DEPLOYER, parameters))


async def test_delays_and_addresses_of_the_stake_ledger_are_checked(world: World) -> None:
    await refused("StakeLedgerInvalidDelay", deploy(world.queue, DEPLOYER, _with(unbonding_s=0)))
    await refused(
        "StakeLedgerInvalidDelay", deploy(world.queue, DEPLOYER, _with(unbonding_s=366 * 24 * 3600))
    )
    zero = "0x" + 40 * "0"
    await refused("StakeLedgerZeroAddress", deploy(world.queue, DEPLOYER, _with(sink=zero)))


async def test_only_the_deployer_mints_development_tokens(world: World) -> None:
    await refused("DevTokenNotMinter", world.ledger.mint_token(STRANGER, STRANGER.address, 1))


def _with(**changes: object) -> LedgerParameters:
    return msgspec.structs.replace(PARAMETERS, **changes)
