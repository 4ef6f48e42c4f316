"""Who may judge, and how that changes."""

from __future__ import annotations

import pytest
from world import DEPLOYER, PARAMETERS, STRANGER, VALIDATORS, World, refused, refused_signatures

from intellect_protocol.keys import LocalSigner, address_bytes
from intellect_protocol.ledger.typed_data import order_signatures, set_change_typed_data


def _addresses(count: int) -> list[str]:
    return sorted((LocalSigner.create().address for _ in range(count)), key=address_bytes)


def _change(world: World, set_id: int, members: list[str], signers: list[LocalSigner]) -> tuple[bytes, ...]:
    typed = set_change_typed_data(77, world.address("ValidatorSet"), set_id, members)
    return order_signatures(typed, [key.sign_typed(typed) for key in signers])


@pytest.mark.parametrize(("size", "threshold"), [(2, 2), (3, 2), (4, 3), (64, 33)])
async def test_a_quorum_is_more_than_half_of_the_members(world: World, size: int, threshold: int) -> None:
    members = _addresses(size)
    await world.ledger.appoint_validators(STRANGER, members, _change(world, 2, members, VALIDATORS))
    appointed = await world.ledger.validator_set(2)
    assert (appointed.members, appointed.threshold) == (tuple(members), threshold)


async def test_sets_too_small_too_large_or_unordered_are_refused(world: World) -> None:
    for size in (0, 1, 65):
        attempt = world.queue.create(DEPLOYER, "ValidatorSet", _addresses(size), 10)
        await refused("ValidatorSetInvalidSize", attempt)
    first, second = _addresses(2)
    for members in ([second, first], [first, first], ["0x" + 40 * "0", first]):
        await refused(
            "ValidatorSetMembersNotAscending", world.queue.create(DEPLOYER, "ValidatorSet", members, 10)
        )
    await refused(
        "ValidatorSetInvalidDelay", world.queue.create(DEPLOYER, "ValidatorSet", [first, second], 0)
    )


async def test_a_change_needs_a_quorum_and_waits_out_the_delay(world: World) -> None:
    members = _addresses(3)
    alone = _change(world, 2, members, VALIDATORS[:1])
    await refused("ValidatorSetBelowThreshold", world.ledger.appoint_validators(DEPLOYER, members, alone))
    quorum = _change(world, 2, members, VALIDATORS[:2])
    await world.ledger.appoint_validators(STRANGER, members, quorum)
    assert (await world.ledger.validator_set()).set_id == 1
    await refused("ValidatorSetChangePending", world.ledger.appoint_validators(STRANGER, members, quorum))
    world.now += PARAMETERS.set_change_s - 1
    assert (await world.ledger.validator_set()).set_id == 1
    world.now += 1
    in_force = await world.ledger.validator_set()
    assert (in_force.set_id, in_force.members) == (2, tuple(members))


async def test_a_change_is_good_once_and_for_its_members_only(world: World) -> None:
    same = [key.address for key in VALIDATORS]
    quorum = _change(world, 2, same, VALIDATORS)
    await refused_signatures(world.ledger.appoint_validators(STRANGER, _addresses(3), quorum))
    await world.ledger.appoint_validators(STRANGER, same, quorum)
    world.now += PARAMETERS.set_change_s
    await refused_signatures(world.ledger.appoint_validators(STRANGER, same, quorum))


async def test_an_unknown_set_has_no_quorum(world: World) -> None:
    await refused("ValidatorSetUnknownSet", world.ledger.validator_set(9))
