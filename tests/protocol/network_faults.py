"""Faults of py-libp2p 0.8.1, each as a program: `python network_faults.py FAULT plain|guarded`.

Prints one word: what became of it. `plain` uses the library as it comes, `guarded` our subclasses.
"""

from __future__ import annotations

import logging
import secrets
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio
from libp2p import new_host
from libp2p.custom_types import TProtocol
from libp2p.host.ping import PingService
from libp2p.network.config import ConnectionConfig
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.tools.anyio_service import background_trio_service
from libp2p.utils.varint import encode_varint_prefixed
from multiaddr import Multiaddr
from network_hosts import loopback_host
from network_peer import RUN_ID

from intellect_protocol.keys import PeerKey
from intellect_protocol.network import compat
from intellect_protocol.network.gossip import checkpoints_topic
from intellect_protocol.network.limits import Limits, Timeouts

SLOTS = 8
LISTEN = [Multiaddr("/ip4/127.0.0.1/tcp/0")]
GOSSIP = TProtocol("/meshsub/1.1.0")
TOPIC = checkpoints_topic(RUN_ID)

Attack = Callable[[str], Awaitable[str]]


def _plain_host() -> Any:
    config = ConnectionConfig(
        max_connections=SLOTS + 4, min_connections=4, low_watermark=4, high_watermark=SLOTS + 4
    )
    return new_host(connection_config=config)


async def _run_plain(attack: Attack, prepare: Callable[[Any], None] | None = None) -> str:
    host = _plain_host()
    router = GossipSub([GOSSIP], 6, 4, 12)
    pubsub = Pubsub(host, router)
    if prepare is not None:
        prepare(host)
    async with background_trio_service(router), background_trio_service(pubsub), host.run(LISTEN):
        await pubsub.subscribe(TOPIC)
        return await attack(str(host.get_addrs()[0]))


async def _run_guarded(attack: Attack, prepare: Callable[[Any], None] | None = None) -> str:
    with tempfile.TemporaryDirectory() as folder:
        limits = Limits(connections=SLOTS, pending_upgrades=SLOTS, pending_upgrades_per_address=SLOTS)
        async with loopback_host(Path(folder), limits=limits) as host, trio.open_nursery() as nursery:
            if prepare is not None:
                prepare(host.basic)

            async def listen() -> None:
                async for _ in host.gossip.subscribe(TOPIC, lambda data: True):
                    pass

            nursery.start_soon(listen)
            result = await attack(host.addresses()[0])
            nursery.cancel_scope.cancel()
            return result


async def _served(address: str) -> str:
    """Whether a new peer is answered."""
    host = new_host()
    info = info_from_p2p_addr(Multiaddr(address))
    with trio.move_on_after(5):
        async with host.run([]):
            try:
                await host.connect(info)
                if await PingService(host).ping(info.peer_id, 1):
                    return "served"
            except Exception:
                return "refused"
    return "refused"


async def _send(address: str, protocol: str, *messages: bytes) -> None:
    """Write bytes to a stream as a stranger, and wait until the other side has had time to fall."""
    host = new_host()
    info = info_from_p2p_addr(Multiaddr(address))
    async with host.run([]):
        await host.connect(info)
        with trio.move_on_after(1):
            try:
                stream = await host.new_stream(info.peer_id, [TProtocol(protocol)])
                for message in messages:
                    await stream.write(message)
                while await stream.read(1000):
                    pass
            except Exception:
                return


async def inbound_slots(address: str) -> str:
    for _ in range(SLOTS + 2):
        if await _served(address) == "refused":
            return "refused"
    return await _served(address)


async def gossip_garbage(address: str) -> str:
    await _send(address, GOSSIP, encode_varint_prefixed(b"\xff" * 20))
    return await _served(address)


async def gossip_key(address: str) -> str:
    message = rpc_pb2.Message(
        from_id=b"\x12\x20" + secrets.token_bytes(32),  # a hash: the key must come from `key`
        seqno=b"\x00" * 8,
        data=b"x",
        topicIDs=[TOPIC],
        signature=b"x" * 64,
        key=b"garbage",
    )
    await _send(address, GOSSIP, encode_varint_prefixed(rpc_pb2.RPC(publish=[message]).SerializeToString()))
    return await _served(address)


async def handler_error(address: str) -> str:
    await _send(address, "/test/broken/1", b"x")
    return await _served(address)


def _break(host: Any) -> None:
    async def broken(stream: Any) -> None:
        raise ZeroDivisionError

    host.set_stream_handler(TProtocol("/test/broken/1"), broken)


async def idle_sockets(address: str) -> str:
    parts = address.split("/")
    idle = [await trio.open_tcp_stream(parts[2], int(parts[4])) for _ in range(4 * SLOTS)]
    result = await _served(address)
    for stream in idle:
        await stream.aclose()
    return result


async def plaintext(address: str) -> str:
    from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport

    keys = compat.key_pair(PeerKey.create())
    security = {TProtocol(PLAINTEXT_PROTOCOL_ID): InsecureTransport(keys)}
    host = new_host(key_pair=keys, sec_opt=security)
    info = info_from_p2p_addr(Multiaddr(address))
    with trio.move_on_after(5):
        async with host.run([]):
            try:
                await host.connect(info)
            except Exception:
                return "refused"
            return "accepted"
    return "refused"


async def dial_delay(kind: str) -> str:
    """With the head start set to an hour, only a dialer that ignores it gets anywhere."""
    import libp2p.network.swarm as swarm_module

    swarm_module._HAPPY_EYEBALLS_DELAY = 3600.0
    server = new_host()
    if kind == "plain":
        client = new_host()
        swarm: Swarm = client.get_network()
    else:
        swarm, client = compat.build(PeerKey.create(), Limits(), Timeouts(), [])
    async with server.run(LISTEN), client.run([]):
        info = info_from_p2p_addr(server.get_addrs()[0])
        client.peerstore.add_addrs(info.peer_id, info.addrs, 60)
        with trio.move_on_after(3):
            await swarm.dial_peer(ID(info.peer_id.to_bytes()))
            return "connected"
        return "waiting"


FAULTS: dict[str, tuple[Attack, Callable[[Any], None] | None]] = {
    "inbound_slots": (inbound_slots, None),
    "gossip_garbage": (gossip_garbage, None),
    "gossip_key": (gossip_key, None),
    "handler_error": (handler_error, _break),
    "idle_sockets": (idle_sockets, None),
    "plaintext": (plaintext, None),
}


async def main(fault: str, kind: str) -> None:
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    if fault == "dial_delay":
        print(await dial_delay(kind))
        return
    attack, prepare = FAULTS[fault]
    run = _run_plain if kind == "plain" else _run_guarded
    print(await run(attack, prepare))


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2])
