"""Attacks on the connection: a peer that stalls in the middle of a stream, as client and as server.

Floods, garbage frames, idle sockets, windows ignored and peers that read nothing are mounted in
`tests/protocol/test_network_host.py`, `test_network_rpc.py` and `test_network_compat.py`; chunk peers that
lie or stall in `test_chunk_exchange.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from network_hosts import loopback_host, until
from network_peer import PATIENT, Echo, EchoResult

from intellect_protocol.errors import DeadlineError, RefusedError, UnreachableError, WireError
from intellect_protocol.network.host import Host
from intellect_protocol.network.limits import Limits, Timeouts
from intellect_protocol.network.rpc import RPC_PROTOCOL_ID, Request
from intellect_protocol.network.rpc_server import Call, Reply
from intellect_protocol.network.stream import Stream
from intellect_protocol.wire import encode


@asynccontextmanager
async def hosts(tmp_path: Path, timeouts: Timeouts) -> AsyncIterator[tuple[Host, Host]]:
    """(server that serves one request of a peer at a time, client)."""

    async def echo(call: Call[Echo]) -> Reply:
        return Reply(EchoResult(call.payload.text))

    async with (
        loopback_host(tmp_path / "server", limits=Limits(requests_per_peer=1), timeouts=timeouts) as server,
        loopback_host(tmp_path / "client") as client,
    ):
        server.server.register(Echo, echo, max_body_bytes=1 << 20)
        await client.connect(server.addresses()[0])
        yield server, client


async def stalled(client: Host, server: Host) -> Stream:
    """An upload that announces a megabyte and stops after one byte."""
    stream = await client.open_stream(server.peer_id, RPC_PROTOCOL_ID, 60)
    await stream.write_frame(encode(Request("Echo", encode(Echo("")), None, 1 << 20, b"\0" * 32)))
    await stream.write(b"x")
    return stream


async def served(client: Host, server: Host) -> bool:
    try:
        await client.client.call(server.peer_id, Echo("still there?"), EchoResult)
    except RefusedError as error:
        if error.code == "busy":
            return False
        raise
    return True


async def test_a_stalled_upload_holds_its_place_as_long_as_it_may(tmp_path: Path) -> None:
    """With patience for hours the peer's one place is taken and every other request of it refused."""
    patient = Timeouts(**{**PATIENT, "progress_s": 36_000.0, "request_s": 36_000.0})
    async with hosts(tmp_path, patient) as (server, client):
        stream = await stalled(client, server)

        async def refused() -> bool:
            return not await served(client, server)

        await until(refused)
        assert not await served(client, server)
        await stream.reset()


async def test_a_stalled_upload_is_cut_off_and_its_place_is_free_again(tmp_path: Path) -> None:
    brisk = Timeouts(**{**PATIENT, "progress_s": 0.3, "request_s": 0.3})
    async with hosts(tmp_path, brisk) as (server, client):
        stream = await stalled(client, server)
        with pytest.raises((UnreachableError, WireError)):
            await stream.read_exactly(1)
        assert await served(client, server)


async def test_a_server_that_never_ends_its_answer_costs_the_caller_its_deadline(tmp_path: Path) -> None:
    async def never(call: Call[Echo]) -> Reply:
        await trio.sleep_forever()
        raise AssertionError

    async with hosts(tmp_path, Timeouts(**PATIENT)) as (server, client):
        server.server.register(Echo, never)
        with pytest.raises(DeadlineError):
            await client.client.call(server.peer_id, Echo(""), EchoResult, deadline_s=0.5)
