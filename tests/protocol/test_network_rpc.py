"""Requests: signatures, replays, limits, bodies, errors, and peers that misbehave in each of them."""

from __future__ import annotations

import hashlib
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import trio
from network_hosts import CHAIN_ID, REGISTRY, loopback_host, until
from network_peer import PATIENT, RUN_ID, Echo, EchoResult

from intellect_protocol.errors import (
    DeadlineError,
    RefusedError,
    UnreachableError,
    UpgradeRequiredError,
    WireError,
)
from intellect_protocol.keys import LocalSigner
from intellect_protocol.network.envelopes import seal
from intellect_protocol.network.host import Host
from intellect_protocol.network.limits import Limits, Timeouts
from intellect_protocol.network.rpc import RPC_PROTOCOL_ID, Request, Response
from intellect_protocol.network.rpc_server import Call, Reply
from intellect_protocol.wire import EMPTY_BODY_HASH, decode, encode, sha256


class Act(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request that must be signed."""

    what: str


class ActResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    signer: str


async def _echo(call: Call[Echo]) -> Reply:
    return Reply(EchoResult(call.payload.text), call.body)


async def _act(call: Call[Act]) -> Reply:
    return Reply(ActResult(call.signer))


@asynccontextmanager
async def _pair(tmp_path: Path, *, limits: Limits | None = None, timeouts: Timeouts | None = None):
    """(server, client), connected, the client's peer id known as `client.peer_id`."""
    async with (
        loopback_host(
            tmp_path / "server", limits=limits or Limits(), timeouts=timeouts or Timeouts(**PATIENT)
        ) as server,
        loopback_host(tmp_path / "client") as client,
    ):
        server.server.register(Echo, _echo, max_body_bytes=32 << 20)
        server.server.register(Act, _act, signed=True, access="public")
        await client.connect(server.addresses()[0])
        yield server, client


async def _raw(client: Host, server: Host, request: bytes | Request, body: bytes = b"") -> Response:
    """Send bytes of our choice where a request is expected."""
    stream = await client.open_stream(server.peer_id, RPC_PROTOCOL_ID, 60)
    try:
        await stream.write_frame(request if isinstance(request, bytes) else encode(request))
        await stream.write(body)
        return decode(await stream.read_frame(timeout_s=60), Response)
    finally:
        await stream.reset()


def _sealed(signer: LocalSigner, server: Host, **changes: object) -> Request:
    payload = encode(Act("now"))
    values = {
        "run_id": RUN_ID,
        "chain_id": CHAIN_ID,
        "audience": server.peer_id,
        "message_type": "Act",
        "payload": payload,
        "body_hash": EMPTY_BODY_HASH,
        "now_ms": int(server.options.wall_clock() * 1000),
        **changes,
    }
    return Request("Act", payload, seal(signer, **values), 0, EMPTY_BODY_HASH)


async def test_a_result_and_a_body_come_back(tmp_path: Path) -> None:
    async with _pair(tmp_path) as (server, client):
        result, body = await client.client.call(
            server.peer_id, Echo("hello"), EchoResult, body=b"x" * 1000, max_body_bytes=1000
        )
    assert result == EchoResult("hello")
    assert body == b"x" * 1000


async def test_a_large_file_goes_there_and_back_without_loss(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * (12 << 12))  # 12 MiB
    async with _pair(tmp_path) as (server, client):
        _, body = await client.client.call(
            server.peer_id,
            Echo(""),
            EchoResult,
            body=source,
            body_to=target,
            max_body_bytes=16 << 20,
            deadline_s=30,
        )
        assert body == b""
        assert target.read_bytes() == source.read_bytes()
        await until(lambda: not list((tmp_path / "server" / "spool").iterdir()))


async def test_the_signer_of_a_request_is_recovered(tmp_path: Path) -> None:
    signer = LocalSigner.create()
    async with _pair(tmp_path) as (server, client):
        result, _ = await client.client.call(server.peer_id, Act("now"), ActResult, signer=signer)
        assert result.signer == signer.address
        with pytest.raises(RefusedError, match="must be signed"):
            await client.client.call(server.peer_id, Act("now"), ActResult)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"run_id": b"\x12" * 32}, "bad_signature"),
        ({"chain_id": 1}, "bad_signature"),
        ({"audience": b"\x00" * 38}, "bad_signature"),
        ({"message_type": "Echo"}, "bad_signature"),
        ({"payload": b"other"}, "bad_signature"),
        ({"body_hash": b"\x00" * 32}, "bad_signature"),
        ({"now_ms": 0}, "clock"),
    ],
)
async def test_an_envelope_for_something_else_is_refused(
    tmp_path: Path, change: dict[str, object], code: str
) -> None:
    async with _pair(tmp_path) as (server, client):
        response = await _raw(client, server, _sealed(LocalSigner.create(), server, **change))
    assert not response.ok
    assert response.code == code


async def test_the_same_signed_bytes_are_served_once(tmp_path: Path) -> None:
    async with _pair(tmp_path) as (server, client):
        request = _sealed(LocalSigner.create(), server)
        assert (await _raw(client, server, request)).ok
        assert (await _raw(client, server, request)).code == "replayed"


async def test_a_body_with_another_hash_never_reaches_the_handler(tmp_path: Path) -> None:
    async with _pair(tmp_path) as (server, client):
        request = Request("Echo", encode(Echo("")), None, 3, sha256(b"abc"))
        response = await _raw(client, server, request, b"xyz")
        assert response.code == "body_hash"
        assert (await _raw(client, server, request, b"abc")).ok


async def test_an_oversize_body_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    async with _pair(tmp_path) as (server, client):
        request = Request("Echo", encode(Echo("")), None, 1 << 40, b"\x00" * 32)
        assert (await _raw(client, server, request)).code == "too_large"
        big = tmp_path / "big"
        with big.open("wb") as file:
            file.truncate(64 << 20)
        with pytest.raises(RefusedError, match="too_large"):
            await client.client.call(server.peer_id, Echo(""), EchoResult, body=big, deadline_s=30)


async def test_an_answer_larger_than_asked_for_is_refused_by_the_caller(tmp_path: Path) -> None:
    async with _pair(tmp_path) as (server, client):
        with pytest.raises(WireError, match="limit is 10"):
            await client.client.call(server.peer_id, Echo(""), EchoResult, body=b"x" * 11, max_body_bytes=10)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff" * 100,
        encode({"type": "Echo"}),
        encode(Request("Echo", b"\xc1", None, 0, EMPTY_BODY_HASH)),
        encode(Request("Echo", encode({"text": 1}), None, 0, EMPTY_BODY_HASH)),
        encode(Request("Echo", encode({"text": "", "more": 1}), None, 0, EMPTY_BODY_HASH)),
        encode(Request("Echo", encode(Echo("")), None, -1, EMPTY_BODY_HASH)),
        encode(Request("Echo", encode(Echo("")), None, 1, b"short")),
    ],
)
async def test_malformed_requests_are_answered_as_such(tmp_path: Path, frame: bytes) -> None:
    async with _pair(tmp_path) as (server, client):
        response = await _raw(client, server, frame)
        assert not response.ok
        assert response.code == "malformed"
        await client.client.call(server.peer_id, Echo(""), EchoResult)


async def test_an_unknown_request_is_refused(tmp_path: Path) -> None:
    async with _pair(tmp_path) as (server, client):
        with pytest.raises(RefusedError, match="unknown_request"):
            await client.client.call(server.peer_id, EchoResult(""), EchoResult)


async def test_handlers_refuse_fail_and_demand_upgrades_without_ending_the_host(tmp_path: Path) -> None:
    errors: list[Exception] = []

    async def answer(call: Call[Echo]) -> Reply:
        raise errors[0]

    async with _pair(tmp_path) as (server, client):
        server.server.register(Echo, answer)
        for error, expected, pattern in (
            (RefusedError("stale_version", "too old", 7.0), RefusedError, "stale_version: too old"),
            (ZeroDivisionError("secret detail"), RefusedError, "internal"),
            (UpgradeRequiredError("needs 2"), UpgradeRequiredError, "needs 2"),
            (WireError("bad file"), RefusedError, "malformed: bad file"),
        ):
            errors[:] = [error]
            with pytest.raises(expected, match=pattern) as caught:
                await client.client.call(server.peer_id, Echo(""), EchoResult)
            assert "secret" not in str(caught.value)
        errors[:] = [RefusedError("later", "soon", 7.0)]
        with pytest.raises(RefusedError) as later:
            await client.client.call(server.peer_id, Echo(""), EchoResult)
        assert later.value.retry_after_s == 7.0


async def test_a_peer_that_stalls_in_its_body_is_cut_off(tmp_path: Path) -> None:
    timeouts = Timeouts(**{**PATIENT, "progress_s": 0.3, "request_s": 0.3})
    async with _pair(tmp_path, timeouts=timeouts) as (server, client):
        stream = await client.open_stream(server.peer_id, RPC_PROTOCOL_ID, 60)
        request = Request("Echo", encode(Echo("")), None, 1000, b"\x00" * 32)
        await stream.write_frame(encode(request))
        await stream.write(b"x")
        with pytest.raises((UnreachableError, WireError)):
            await stream.read_exactly(1)
        silent = await client.open_stream(server.peer_id, RPC_PROTOCOL_ID, 60)
        with pytest.raises((UnreachableError, WireError)):
            await silent.read_exactly(1)
        await client.client.call(server.peer_id, Echo(""), EchoResult)


async def test_a_handler_that_does_not_answer_costs_the_caller_its_deadline(tmp_path: Path) -> None:
    async def never(call: Call[Echo]) -> Reply:
        await trio.sleep_forever()
        raise AssertionError

    async with _pair(tmp_path) as (server, client):
        server.server.register(Echo, never)
        with pytest.raises(DeadlineError):
            await client.client.call(server.peer_id, Echo(""), EchoResult, deadline_s=0.5)


async def test_a_flood_is_answered_busy_then_disconnected_and_barred(tmp_path: Path) -> None:
    limits = Limits(requests_per_s=0.01, request_burst=3)
    request = Request("Echo", encode(Echo("")), None, 0, EMPTY_BODY_HASH)
    async with _pair(tmp_path, limits=limits) as (server, client):
        assert (await _raw(client, server, request)).ok
        codes = [(await _raw(client, server, request)).code for _ in range(4)]
        assert codes[-1] == "busy"

        async def barred() -> bool:
            with suppress(UnreachableError, WireError, DeadlineError):
                await _raw(client, server, request)
            return server.table.barred_for(client.peer_id) > 0

        await until(barred)
        await until(lambda: not server.is_connected(client.peer_id))


async def test_more_requests_at_once_than_allowed_are_answered_busy(tmp_path: Path) -> None:
    free = trio.Event()

    async def wait(call: Call[Echo]) -> Reply:
        await free.wait()
        return Reply(EchoResult(""))

    codes: list[str] = []
    request = Request("Echo", encode(Echo("")), None, 0, EMPTY_BODY_HASH)
    async with _pair(tmp_path, limits=Limits(requests_per_peer=2)) as (server, client):
        server.server.register(Echo, wait)

        async def one() -> None:
            codes.append((await _raw(client, server, request)).code)
            free.set()

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(one)
    assert sorted(codes) == ["", "", "busy"]


async def test_the_caller_comes_back_when_it_is_told_to(tmp_path: Path) -> None:
    calls = 0

    async def second_time(call: Call[Echo]) -> Reply:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RefusedError("busy", "not now", 0.05)
        return Reply(EchoResult("now"))

    async with _pair(tmp_path) as (server, client):
        server.server.register(Echo, second_time)
        result, _ = await client.client.call(server.peer_id, Echo(""), EchoResult, retries=1)
    assert result.text == "now"
    assert calls == 2


async def test_only_bound_peers_may_do_more_than_ask_for_public_data(tmp_path: Path) -> None:
    registered, stranger = LocalSigner.create(), LocalSigner.create()
    bound: set[tuple[str, bytes]] = set()

    async def verify(node: str, peer_id: bytes) -> bool:
        return (node, peer_id) in bound

    async with loopback_host(tmp_path / "server", verify_node=verify) as server:
        server.server.register(Act, _act, signed=True)
        server.server.register(Echo, _echo)
        bootstrap = server.addresses()
        async with (
            loopback_host(tmp_path / "a", bootstrap=bootstrap, signer=registered) as member,
            loopback_host(tmp_path / "b", bootstrap=bootstrap, signer=stranger) as other,
        ):
            for peer in (member, other):
                await peer.client.call(server.peer_id, Echo("public"), EchoResult)
                with pytest.raises(RefusedError, match="not_bound"):
                    await peer.client.call(server.peer_id, Act(""), ActResult, signer=peer.options.signer)
            # Registered after the first greeting: the next request makes good for it.
            bound.add((registered.address, member.peer_id))
            result, _ = await member.client.call(server.peer_id, Act(""), ActResult, signer=registered)
            assert result.signer == registered.address
            with pytest.raises(RefusedError, match="bound to"):
                await member.client.call(server.peer_id, Act(""), ActResult, signer=stranger)


async def test_naming_somebody_elses_node_key_binds_nothing(tmp_path: Path) -> None:
    victim = LocalSigner.create()

    async def verify(node: str, peer_id: bytes) -> bool:
        return True

    async with (
        loopback_host(tmp_path / "server", verify_node=verify) as server,
        loopback_host(tmp_path / "thief") as thief,
    ):
        await thief.connect(server.addresses()[0])
        hello = msgspec.structs.replace(
            thief.bindings._hello,
            node=victim.address,
            binding=thief.options.peer_key.sign_binding(CHAIN_ID, REGISTRY, victim.address),
            vouch=LocalSigner.create().sign_digest(b"\x01" * 32),
        )
        await thief.client.exchange(server.peer_id, hello, type(hello))
        peer = server.table.get(thief.peer_id)
        assert peer is not None
        assert peer.greeted
        assert peer.node == ""


async def test_peers_of_other_runs_and_versions_are_told_so(tmp_path: Path) -> None:
    async with loopback_host(tmp_path / "server") as server:
        server.server.register(Echo, _echo)
        async with loopback_host(tmp_path / "a", bootstrap=server.addresses(), run_id=b"\x12" * 32) as other:
            with pytest.raises(RefusedError, match="wrong_run"):
                await other.client.call(server.peer_id, Echo(""), EchoResult)
        async with loopback_host(tmp_path / "b", bootstrap=server.addresses(), run_id=b"") as newcomer:
            await newcomer.client.call(server.peer_id, Echo(""), EchoResult)
            hello = msgspec.structs.replace(newcomer.bindings._hello, protocol=0)
            with pytest.raises(UpgradeRequiredError):
                await newcomer.client.exchange(server.peer_id, hello, type(hello))
            newer = msgspec.structs.replace(hello, protocol=999)
            with pytest.raises(RefusedError, match="wrong_version"):
                await newcomer.client.exchange(server.peer_id, newer, type(newer))


async def test_a_body_that_vanishes_half_way_is_an_error(tmp_path: Path) -> None:
    """The library shows the end of a killed peer's stream like a clean end."""
    target = tmp_path / "target"

    async def half(stream) -> None:
        await stream.read_frame()
        whole = hashlib.sha256(b"x" * 1000).digest()
        await stream.write_frame(encode(Response(True, "", "", None, encode(EchoResult("")), 1000, whole)))
        await stream.write(b"x" * 500)
        await stream.close()

    async with _pair(tmp_path) as (server, client):
        await client.bindings.hello(server.peer_id)
        server.set_stream_handler(RPC_PROTOCOL_ID, half)
        with pytest.raises((WireError, UnreachableError)):
            await client.client.call(
                server.peer_id, Echo(""), EchoResult, body_to=target, max_body_bytes=1000
            )
    assert not target.exists()
