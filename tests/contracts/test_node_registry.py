"""Which node keys work for whom: both must want it."""

from __future__ import annotations

from typing import Any

from world import OWNER, STRANGER, World, peer_id, refused

from intellect_protocol.keys import LocalSigner
from intellect_protocol.ledger.typed_data import binding_typed_data

NODE = LocalSigner(b"\x07" * 32)


def _consent(world: World, owner: str, peer: bytes, nonce: int, deadline: int, chain_id: int = 77) -> bytes:
    typed = binding_typed_data(
        chain_id, world.address("NodeRegistry"), owner, NODE.address, peer, nonce, deadline
    )
    return NODE.sign_typed(typed)


async def _bind(world: World, sender: LocalSigner, *arguments: Any) -> None:
    await world.call(sender, "NodeRegistry", "bind", NODE.address, *arguments)


async def test_a_bound_node_is_known_with_its_peer_id_and_block(world: World) -> None:
    assert await world.ledger.node(NODE.address) is None
    receipt = await world.ledger.bind_node(OWNER, NODE, peer_id())
    binding = await world.ledger.node(NODE.address)
    assert binding is not None
    assert (binding.owner, binding.peer_id) == (OWNER.address, peer_id())
    assert (binding.bound_block, binding.bound_at) == (receipt.block_number, world.now)
    second = LocalSigner.create()
    await world.ledger.bind_node(OWNER, second, peer_id(2))
    assert set(await world.ledger.nodes_of(OWNER.address)) == {NODE.address, second.address}


async def test_a_node_key_is_bound_to_one_owner_at_a_time(world: World) -> None:
    await world.ledger.bind_node(OWNER, NODE, peer_id())
    await refused("NodeRegistryAlreadyBound", world.ledger.bind_node(STRANGER, NODE, peer_id()))


async def test_nobody_binds_a_node_without_its_consent_to_him_and_to_the_peer_id(world: World) -> None:
    deadline = world.now + 60
    consent = _consent(world, OWNER.address, peer_id(), 0, deadline)
    await refused("NodeRegistryWrongSigner", _bind(world, STRANGER, peer_id(), deadline, consent))
    await refused("NodeRegistryWrongSigner", _bind(world, OWNER, peer_id(2), deadline, consent))
    await refused("NodeRegistryWrongSigner", _bind(world, OWNER, peer_id(), deadline + 1, consent))
    elsewhere = _consent(world, OWNER.address, peer_id(), 0, deadline, chain_id=78)
    await refused("NodeRegistryWrongSigner", _bind(world, OWNER, peer_id(), deadline, elsewhere))
    await _bind(world, OWNER, peer_id(), deadline, consent)


async def test_a_consent_is_good_once_and_until_its_deadline(world: World) -> None:
    deadline = world.now + 60
    consent = _consent(world, OWNER.address, peer_id(), 0, deadline)
    await _bind(world, OWNER, peer_id(), deadline, consent)
    await world.ledger.transfer_eth(STRANGER, NODE.address, 10**16)
    await world.ledger.unbind_node(NODE, NODE.address)
    await refused("NodeRegistryWrongSigner", _bind(world, OWNER, peer_id(), deadline, consent))
    fresh = _consent(world, OWNER.address, peer_id(), 1, deadline)
    world.now = deadline + 1
    await refused("NodeRegistryExpired", _bind(world, OWNER, peer_id(), deadline, fresh))


async def test_owner_and_node_unbind_and_nobody_else_does(world: World) -> None:
    await world.ledger.bind_node(OWNER, NODE, peer_id())
    await refused("NodeRegistryNotAllowed", world.ledger.unbind_node(STRANGER, NODE.address))
    await world.ledger.unbind_node(OWNER, NODE.address)
    assert await world.ledger.node(NODE.address) is None
    assert await world.ledger.nodes_of(OWNER.address) == ()
    await refused("NodeRegistryNotBound", world.ledger.unbind_node(OWNER, NODE.address))
    await world.ledger.bind_node(STRANGER, NODE, peer_id())


async def test_peer_ids_have_one_to_64_bytes(world: World) -> None:
    for peer in (b"", bytes(65)):
        await refused("NodeRegistryInvalidPeerId", world.ledger.bind_node(OWNER, NODE, peer))
