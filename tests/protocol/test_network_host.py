"""The host itself: caps, floods, garbage on every protocol, and a shutdown that ends."""

from __future__ import annotations

import secrets
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import pytest
import trio
from libp2p.peer.id import ID
from multiaddr import Multiaddr
from network_hosts import loopback_host, until
from network_peer import PATIENT, Echo, EchoResult

from intellect_protocol.errors import (
    DeadlineError,
    PreflightError,
    RefusedError,
    UnreachableError,
    UsageError,
    WireError,
)
from intellect_protocol.keys import PeerKey
from intellect_protocol.network import compat
from intellect_protocol.network.addresses import parse_address
from intellect_protocol.network.host import Host
from intellect_protocol.network.limits import Limits, Timeouts
from intellect_protocol.network.rpc_server import Call, Reply


async def _echo(call: Call[Echo]) -> Reply:
    return Reply(EchoResult(call.payload.text))


async def _still_serves(server: Host, tmp_path: Path) -> None:
    """A newcomer is served."""
    folder = tmp_path / secrets.token_hex(4)
    async with loopback_host(folder, bootstrap=server.addresses()) as newcomer:
        result, _ = await newcomer.client.call(server.peer_id, Echo("there?"), EchoResult, deadline_s=60)
        assert result.text == "there?"


def _tcp_address(host: Host) -> tuple[str, int]:
    parts = host.addresses()[0].split("/")
    return parts[2], int(parts[4])


async def test_garbage_on_every_protocol_leaves_the_host_serving(tmp_path: Path) -> None:
    pieces = [
        b"\x00",
        b"\xff" * 64,
        b"\xff\xff\xff\xff\x0f" + b"x" * 100,  # a length of 4 GiB
        b"\x7f" + secrets.token_bytes(127),
        b"\x0a\x12\x08\x12\x04\xff\xff\xff\xff",
        secrets.token_bytes(5000),
    ]
    async with loopback_host(tmp_path / "server") as server:
        server.server.register(Echo, _echo)
        protocols = [str(protocol) for protocol in server.basic.multiselect.handlers if protocol]
        assert {"/intellect/rpc/1", "/intellect/kad/1.0.0", "/meshsub/1.2.0"} <= set(protocols)
        for protocol in protocols:
            async with loopback_host(tmp_path / "fuzzer", bootstrap=server.addresses()) as fuzzer:
                for piece in pieces:
                    with suppress(UnreachableError, WireError, DeadlineError, RefusedError):
                        stream = await fuzzer.open_stream(server.peer_id, protocol, 60)
                        await stream.write(piece)
                        await stream.close()
                        await stream.read_some(timeout_s=0.2)
        for piece in pieces:
            with suppress(OSError, trio.BrokenResourceError):
                raw = await trio.open_tcp_stream(*_tcp_address(server))
                await raw.send_all(piece)
                await raw.aclose()
        await _still_serves(server, tmp_path)


async def test_300_connections_one_after_another_are_all_served(tmp_path: Path) -> None:
    """The library stops accepting after 250 in all."""
    async with loopback_host(tmp_path / "server") as server:
        server.server.register(Echo, _echo)
        peer_id = ID(server.peer_id)
        address = [Multiaddr(server.addresses()[0].partition("/p2p/")[0])]

        async def reconnect() -> None:
            swarm, client = compat.build(PeerKey.create(), Limits(), Timeouts(**PATIENT), [])
            async with client.run([]):
                for _ in range(15):
                    (connection,) = await swarm.dial_addresses(peer_id, address, 60.0)
                    await connection.close()

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(reconnect)
        await until(lambda: len(server.table) == 0)
        await _still_serves(server, tmp_path)


async def test_260_idle_sockets_of_one_address_do_not_keep_newcomers_out(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            loopback_host(tmp_path / "server", timeouts=Timeouts(**{**PATIENT, "upgrade_s": 3600.0}))
        )
        server.server.register(Echo, _echo)
        for _ in range(260):
            idle = await trio.open_tcp_stream(*_tcp_address(server))
            await stack.enter_async_context(idle)
        await _still_serves(server, tmp_path)


async def test_a_newcomer_displaces_an_idle_stranger_but_no_peer_of_the_run(tmp_path: Path) -> None:
    timeouts = Timeouts(**{**PATIENT, "grace_s": 0.0})
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            loopback_host(tmp_path / "server", limits=Limits(connections=3), timeouts=timeouts)
        )
        server.server.register(Echo, _echo)
        member = await stack.enter_async_context(loopback_host(tmp_path / "member"))
        await member.client.call(server.addresses()[0], Echo(""), EchoResult, deadline_s=60)
        address = [Multiaddr(server.addresses()[0].partition("/p2p/")[0])]
        for _ in range(2):
            swarm, stranger = compat.build(PeerKey.create(), Limits(), timeouts, [])
            await stack.enter_async_context(stranger.run([]))
            await swarm.dial_addresses(ID(server.peer_id), address, 60.0)
        await until(lambda: len(server.table) == 3)
        await _still_serves(server, tmp_path)
        assert server.is_connected(member.peer_id)
        await until(lambda: len(server.table) <= 3)


async def test_a_barred_peer_is_refused_in_both_directions_for_a_growing_time(tmp_path: Path) -> None:
    async with (
        loopback_host(tmp_path / "a") as a,
        loopback_host(tmp_path / "b", bootstrap=a.addresses()) as b,
    ):
        await a.disconnect(b.peer_id, "a test")
        first = a.table.barred_for(b.peer_id)
        with pytest.raises(RefusedError) as refused:
            await a.connect(b.addresses()[0])
        assert refused.value.retry_after_s is not None
        with suppress(UnreachableError):
            await b.connect(a.addresses()[0])
        await until(lambda: not a.is_connected(b.peer_id))
        await a.disconnect(b.peer_id, "again")
        assert a.table.barred_for(b.peer_id) > 1.5 * first
        assert a.table.get(b.peer_id) is None


async def test_a_peer_that_fills_our_buffers_is_disconnected(tmp_path: Path) -> None:
    """Nobody reads the streams; yamux alone would keep whatever comes."""
    limits = Limits(unread_bytes_per_peer=1 << 20)
    opened = trio.Event()

    async def never_read(stream) -> None:
        opened.set()
        await trio.sleep_forever()

    async with (
        loopback_host(tmp_path / "server", limits=limits) as server,
        loopback_host(tmp_path / "flooder", bootstrap=server.addresses()) as flooder,
    ):
        server.set_stream_handler("/test/1", never_read)
        server.server.register(Echo, _echo)

        async def flood() -> None:
            with suppress(UnreachableError, DeadlineError):
                stream = await flooder.open_stream(server.peer_id, "/test/1", 60)
                await stream.write(b"x" * (256 << 10))

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(flood)
            await until(lambda: not server.is_connected(flooder.peer_id))
            nursery.cancel_scope.cancel()
        await _still_serves(server, tmp_path)


async def test_streams_beyond_the_limit_are_reset(tmp_path: Path) -> None:
    held = 0

    async def hold(stream) -> None:
        nonlocal held
        held += 1
        await trio.sleep_forever()

    async with (
        loopback_host(tmp_path / "server", limits=Limits(streams_per_connection=16)) as server,
        loopback_host(tmp_path / "client", bootstrap=server.addresses()) as client,
    ):
        server.set_stream_handler("/test/1", hold)
        refused = 0
        for _ in range(20):
            try:
                await client.open_stream(server.peer_id, "/test/1", 60)
            except UnreachableError:
                refused += 1
        assert refused >= 4
        assert held <= 16


async def test_400_parallel_streams_are_all_served(tmp_path: Path) -> None:
    async def answer(stream) -> None:
        await stream.write(await stream.read_exactly(1))
        await stream.finish()

    async with (
        loopback_host(tmp_path / "server", limits=Limits(streams_per_connection=512)) as server,
        loopback_host(tmp_path / "client", bootstrap=server.addresses()) as client,
    ):
        server.set_stream_handler("/test/1", answer)
        answered = 0

        async def one() -> None:
            nonlocal answered
            stream = await client.open_stream(server.peer_id, "/test/1", 30)
            await stream.write(b"x")
            assert await stream.read_exactly(1, timeout_s=30) == b"x"
            await stream.reset()
            answered += 1

        async with trio.open_nursery() as nursery:
            for _ in range(400):
                nursery.start_soon(one)
        assert answered == 400


async def test_a_host_under_load_closes_within_five_seconds(tmp_path: Path) -> None:
    async def busy(host: Host, peer: bytes) -> None:
        with suppress(UnreachableError, RefusedError, WireError):
            while True:
                await host.client.call(peer, Echo("x" * 1000), EchoResult)

    stop, closed = trio.Event(), trio.Event()

    async def serve(task_status=trio.TASK_STATUS_IGNORED) -> None:
        async with loopback_host(tmp_path / "server") as server:
            server.server.register(Echo, _echo)
            task_status.started(server)
            await stop.wait()
        closed.set()

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(loopback_host(tmp_path / f"{i}")) for i in range(8)]
        async with trio.open_nursery() as nursery:
            server = await nursery.start(serve)
            for client in clients:
                await client.connect(server.addresses()[0])
                nursery.start_soon(busy, client, server.peer_id)
            await until(lambda: len(server.table) == 8 and all(peer.greeted for peer in server.table))
            stop.set()
            with trio.fail_after(5):
                await closed.wait()
            nursery.cancel_scope.cancel()


async def test_an_error_in_the_block_comes_out_as_itself(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mine"):
        async with loopback_host(tmp_path / "a"):
            raise UsageError("mine")


async def test_a_port_in_use_is_an_error_and_not_shared(tmp_path: Path) -> None:
    async with loopback_host(tmp_path / "a") as a:
        listen = [f"/ip4/127.0.0.1/tcp/{_tcp_address(a)[1]}"]
        with pytest.raises(PreflightError, match="in use"):
            async with loopback_host(tmp_path / "b", listen=listen):
                pass


async def test_a_wildcard_listener_advertises_addresses_that_can_be_dialled(tmp_path: Path) -> None:
    async with (
        loopback_host(tmp_path / "a", listen=["/ip4/0.0.0.0/tcp/0"]) as a,
        loopback_host(tmp_path / "b") as b,
    ):
        assert not [address for address in a.addresses() if "0.0.0.0" in address]
        for address in a.addresses():
            await b.connect(address)
            await b.disconnect(a.peer_id, "next", pause=False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/ip4/127.0.0.1/tcp/1",
        "/ip4/127.0.0.1/udp/1/quic-v1/p2p/" + "1" * 52,
        "/ip4/127.0.0.1/tcp/1/p2p/garbage!",
        "/ip4/127.0.0.1/tcp/99999/p2p/12D3KooWNccJn5gZrUnsnhaqbE1rwQAEEeZs2zD7CHCvkaxjqibm",
        "x" * 10_000,
    ],
)
def test_a_malformed_address_is_one_clear_error(text: str) -> None:
    with pytest.raises(UsageError, match="not a peer address"):
        parse_address(text)


async def test_a_silent_bootstrap_that_answers_late_still_works(tmp_path: Path) -> None:
    """The time-out for bootstrap peers, and no other, decides how long a dial may take."""
    release = trio.Event()
    key = PeerKey.create()
    async with loopback_host(tmp_path / "boot", peer_key=key) as boot, trio.open_nursery() as nursery:
        target = _tcp_address(boot)

        async def slow_proxy(near: trio.SocketStream) -> None:
            await release.wait()
            async with await trio.open_tcp_stream(*target) as far, trio.open_nursery() as pipes:

                async def copy(source: trio.SocketStream, sink: trio.SocketStream) -> None:
                    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                        async for data in source:
                            await sink.send_all(data)
                    pipes.cancel_scope.cancel()

                pipes.start_soon(copy, near, far)
                pipes.start_soon(copy, far, near)

        listeners = await nursery.start(partial(trio.serve_tcp, slow_proxy, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{boot.addresses()[0].split('/')[-1]}"

        async def let_go() -> None:
            await trio.sleep(0.5)  # longer than dial_s below
            release.set()

        nursery.start_soon(let_go)
        timeouts = Timeouts(dial_s=0.1, upgrade_s=0.1, bootstrap_dial_s=60.0, bootstrap_attempts=1)
        async with loopback_host(tmp_path / "a", bootstrap=[address], timeouts=timeouts) as a:
            assert a.is_connected(boot.peer_id)
        nursery.cancel_scope.cancel()
