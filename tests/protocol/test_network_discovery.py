"""Peers in processes of their own: found through the DHT, reached by gossip, frozen, killed, moved."""

from __future__ import annotations

import os
import secrets
import signal
from pathlib import Path

import pytest
import trio
from network_hosts import loopback_host, until
from network_peer import RUN_ID, Echo, EchoResult, peer_process

from intellect_protocol.errors import UnreachableError
from intellect_protocol.keys import PeerKey, peer_id_text
from intellect_protocol.network.addresses import parse_address
from intellect_protocol.network.discovery import rendezvous_key
from intellect_protocol.network.gossip import checkpoints_topic
from intellect_protocol.network.limits import Timeouts
from intellect_protocol.wire import sha256

QUICK = Timeouts(
    bootstrap_dial_s=10.0,
    bootstrap_attempts=2,
    bootstrap_pause_s=0.1,
    ping_s=3.0,
    ping_interval_s=0.5,
    alone_interval_s=0.3,
    refresh_interval_s=2.0,
)


def _peer_id(address: str) -> bytes:
    return parse_address(address).peer_id


async def test_a_provider_is_found_by_a_peer_that_knew_only_the_bootstrap(tmp_path: Path) -> None:
    key = secrets.token_bytes(32)
    async with (
        peer_process(tmp_path / "boot") as boot,
        peer_process(tmp_path / "holder", bootstrap=boot.addresses) as holder,
        loopback_host(tmp_path / "seeker", bootstrap=boot.addresses) as seeker,
    ):
        assert (await holder.ask(do="provide", key=key.hex()))["ok"]
        found = await seeker.discovery.find_providers(key, 30)
        assert [where.peer_id for where in found] == [_peer_id(holder.addresses[0])]
        result, _ = await seeker.client.call(found[0], Echo("found you"), EchoResult)
        assert result.text == "found you"

        # A look-up of what only we hold names nobody: not ourselves.
        assert await seeker.discovery.provide(sha256(key))
        assert await seeker.discovery.find_providers(sha256(key), 0.5) == []


async def test_dead_providers_are_dropped(tmp_path: Path) -> None:
    key = secrets.token_bytes(32)
    async with loopback_host(tmp_path / "boot", timeouts=QUICK) as boot:
        async with peer_process(tmp_path / "dead", bootstrap=boot.addresses()) as dead:
            assert (await dead.ask(do="provide", key=key.hex()))["ok"]
        await until(lambda: not boot.is_connected(_peer_id(dead.addresses[0])))
        hearsay = await boot.discovery.find_providers(key, 1, alive=False)
        assert [where.peer_id for where in hearsay] == [_peer_id(dead.addresses[0])]
        assert await boot.discovery.find_providers(key, 1) == []


async def test_peers_of_a_run_meet_and_connect_by_themselves(tmp_path: Path) -> None:
    async with peer_process(tmp_path / "boot") as boot:
        bootstrap = boot.addresses
        async with (
            loopback_host(tmp_path / "a", bootstrap=bootstrap, timeouts=QUICK) as a,
            loopback_host(tmp_path / "b", bootstrap=bootstrap, timeouts=QUICK) as b,
        ):
            await until(lambda: a.is_connected(b.peer_id))

            async def found() -> bool:
                providers = await a.discovery.find_providers(rendezvous_key(RUN_ID), 5)
                return b.peer_id in [where.peer_id for where in providers]

            await until(found)


async def test_gossip_reaches_a_peer_that_the_publisher_never_dialled(tmp_path: Path) -> None:
    topic, message = checkpoints_topic(RUN_ID), secrets.token_bytes(100)
    async with (
        peer_process(tmp_path / "boot") as boot,
        peer_process(tmp_path / "far", bootstrap=boot.addresses) as far,
        loopback_host(tmp_path / "pub") as publisher,
    ):
        publisher.table.bar(_peer_id(far.addresses[0]), "to be reached in two hops")
        await publisher.connect(boot.addresses[0])
        await until(lambda: _peer_id(boot.addresses[0]) in publisher.gossip.peers(topic))

        async def arrived() -> bool:
            await publisher.gossip.publish(topic, message)
            return message.hex() in (await far.ask(do="received"))["messages"]

        await until(arrived)
        assert not publisher.is_connected(_peer_id(far.addresses[0]))


async def test_a_restarted_publisher_with_the_same_key_is_heard(tmp_path: Path) -> None:
    """Sequence numbers from the clock in seconds would repeat and be dropped as seen."""
    key, topic = PeerKey.create(), checkpoints_topic(RUN_ID)
    heard: list[bytes] = []
    async with loopback_host(tmp_path / "boot") as boot, trio.open_nursery() as nursery:

        async def listen() -> None:
            async for message in boot.gossip.subscribe(topic, lambda data: True):
                heard.append(message)

        nursery.start_soon(listen)
        for generation in range(2):
            async with loopback_host(tmp_path / "pub", bootstrap=boot.addresses(), peer_key=key) as publisher:
                await until(lambda host=publisher: boot.peer_id in host.gossip.peers(topic))
                for number in range(3):
                    await publisher.gossip.publish(topic, bytes([generation, number]))
                await until(lambda count=3 * generation + 3: len(heard) == count)
        nursery.cancel_scope.cancel()


async def test_invalid_gossip_is_neither_delivered_nor_forwarded(tmp_path: Path) -> None:
    """a - b - c in a line; only b stands between, and validates."""
    topic = checkpoints_topic(RUN_ID)
    heard: dict[str, list[bytes]] = {"b": [], "c": []}

    def is_valid(data: bytes) -> bool:
        if data == b"raise":
            raise ValueError(data)
        return data.startswith(b"good")

    async with (
        loopback_host(tmp_path / "a") as a,
        loopback_host(tmp_path / "b") as b,
        loopback_host(tmp_path / "c") as c,
        trio.open_nursery() as nursery,
    ):
        a.table.bar(c.peer_id, "the line has a middle")
        for end in (a, c):
            await end.connect(b.addresses()[0])

        async def listen(name: str, host, validator) -> None:
            async for message in host.gossip.subscribe(topic, validator):
                heard[name].append(message)

        nursery.start_soon(listen, "b", b, is_valid)
        nursery.start_soon(listen, "c", c, lambda data: True)
        await until(lambda: b.peer_id in a.gossip.peers(topic) and c.peer_id in b.gossip.peers(topic))
        for message in (b"bad", b"raise", b"good 1", b"good 1", b"good 2"):
            await a.gossip.publish(topic, message)
        await until(lambda: b"good 2" in heard["c"])
        assert sorted(heard["b"]) == [b"good 1", b"good 2"]
        assert sorted(heard["c"]) == [b"good 1", b"good 2"]
        nursery.cancel_scope.cancel()


async def test_a_frozen_peer_is_given_up_and_costs_others_nothing(tmp_path: Path) -> None:
    key = secrets.token_bytes(32)
    async with (
        loopback_host(tmp_path / "boot", timeouts=QUICK) as boot,
        peer_process(tmp_path / "frozen", bootstrap=boot.addresses()) as frozen,
        peer_process(tmp_path / "holder", bootstrap=boot.addresses()) as holder,
    ):
        assert (await holder.ask(do="provide", key=key.hex()))["ok"]
        frozen_id = _peer_id(frozen.addresses[0])
        os.kill(frozen.pid, signal.SIGSTOP)
        with pytest.raises(UnreachableError):
            await boot.client.call(frozen_id, Echo(""), EchoResult, deadline_s=0.5)
        found = await boot.discovery.find_providers(key, 30)
        assert [where.peer_id for where in found] == [_peer_id(holder.addresses[0])]
        await until(lambda: not boot.is_connected(frozen_id))


async def test_a_peer_that_comes_back_on_another_port_is_reached_again(tmp_path: Path) -> None:
    key = secrets.token_bytes(32).hex()
    async with loopback_host(tmp_path / "boot", timeouts=QUICK) as boot:
        seen = []
        for _ in range(2):
            async with peer_process(tmp_path / "moving", bootstrap=boot.addresses(), key=key) as peer:
                peer_id = _peer_id(peer.addresses[0])
                seen.append(peer.addresses[0])
                await until(lambda who=peer_id: boot.is_connected(who))
                # Known by its listening address, so a fresh dial reaches it too.
                await until(
                    lambda who=peer_id, where=peer: boot.dialable(who) == parse_address(where.addresses[0])
                )
                await boot.disconnect(peer_id, "test", pause=False)
                await boot.open_stream(peer_id, "/ipfs/ping/1.0.0", 30)
                os.kill(peer.pid, signal.SIGKILL)
                await until(lambda who=peer_id: not boot.is_connected(who))
                # A failed dial to the old address must not hold against the new one.
                with pytest.raises(UnreachableError):
                    await boot.open_stream(peer_id, "/ipfs/ping/1.0.0", 30)
        assert seen[0] != seen[1]


async def test_all_bootstraps_down_ends_in_one_clear_error(tmp_path: Path) -> None:
    nobody = f"/ip4/127.0.0.1/tcp/9/p2p/{peer_id_text(PeerKey.create().peer_id)}"
    with pytest.raises(UnreachableError, match="no known peer answers"):
        async with loopback_host(tmp_path / "a", bootstrap=[nobody], timeouts=QUICK):
            pass


async def test_one_bootstrap_of_three_is_enough(tmp_path: Path) -> None:
    async with loopback_host(tmp_path / "boot") as boot:
        nobody = [f"/ip4/127.0.0.1/tcp/9/p2p/{peer_id_text(PeerKey.create().peer_id)}" for _ in range(2)]
        async with loopback_host(tmp_path / "a", bootstrap=[*nobody, *boot.addresses()], timeouts=QUICK) as a:
            assert a.is_connected(boot.peer_id)


async def test_peers_of_the_last_run_are_tried_when_the_bootstrap_is_gone(tmp_path: Path) -> None:
    async with loopback_host(tmp_path / "friend") as friend:
        async with loopback_host(tmp_path / "a") as a:
            await a.connect(friend.addresses()[0])
            await until(lambda: a.dialable(friend.peer_id) is not None)
        nobody = f"/ip4/127.0.0.1/tcp/9/p2p/{peer_id_text(PeerKey.create().peer_id)}"
        async with loopback_host(tmp_path / "a", bootstrap=[nobody], timeouts=QUICK) as again:
            assert again.is_connected(friend.peer_id)
        (tmp_path / "a" / "peers.json").write_text("{damaged")
        async with loopback_host(tmp_path / "a", timeouts=QUICK) as alone:
            assert alone.peers() == []


async def test_a_lonely_peer_goes_back_to_its_bootstrap(tmp_path: Path) -> None:
    key = PeerKey.create()
    async with loopback_host(tmp_path / "boot", peer_key=key) as boot:
        addresses = boot.addresses()
        port = addresses[0].split("/")[4]
        listen = [f"/ip4/127.0.0.1/tcp/{port}"]
        async with peer_process(
            tmp_path / "a",
            bootstrap=addresses,
            timeouts={"alone_interval_s": 0.3, "failed_dial_pause_s": 0.1, "bootstrap_dial_s": 2},
        ) as a:
            await boot.close()
            async with loopback_host(tmp_path / "boot2", peer_key=key, listen=listen) as again:
                await until(lambda: again.is_connected(_peer_id(a.addresses[0])))
