from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from sample_checkpoints import RUN_ID, describe, write_checkpoint

from intellect_protocol.checkpoint import Manifest
from intellect_protocol.chunk_store import ChunkStore
from intellect_protocol.errors import IntellectError, PreflightError, RefusedError, UnreachableError
from intellect_protocol.network.chunk_download import ConnectError, HttpSource, SharedThrottle
from intellect_protocol.network.dataplane_process import DataPlane

PEER = b"p" * 38


@pytest.fixture
def store(tmp_path: Path) -> tuple[ChunkStore, Manifest]:
    folder = write_checkpoint(tmp_path / "v")
    manifest, signed = describe(folder)
    store = ChunkStore(tmp_path / "store", quota_bytes=1 << 30)
    with store.admit(signed):
        store.import_folder(folder, manifest)
    return store, manifest


async def within(seconds: float, condition: Callable[[], bool]) -> None:
    """Poll for what another process does."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.02)


def get(port: int, path: str, token: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}", **headers})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("cap", [0, 50 << 20])
async def test_a_ticket_opens_chunks_and_ranges_and_nothing_else(
    store: tuple[ChunkStore, Manifest], cap: int
) -> None:
    chunks, manifest = store
    name = manifest.chunks[0].hex()
    data = chunks.get(manifest.chunks[0])
    assert data is not None
    sent: dict[bytes, int] = {}

    def note(peer: bytes, size: int) -> None:
        sent[peer] = sent.get(peer, 0) + size

    plane = DataPlane(chunks.root, RUN_ID, host="127.0.0.1", upload_bytes_per_s=cap, on_sent=note)
    async with plane.running():
        good = plane.ticket(PEER, 60.0)

        async def ask(path: str, token: str = good, **headers: str) -> tuple[int, bytes]:
            return await trio.to_thread.run_sync(lambda: get(plane.port, path, token, **headers))

        assert await ask(f"/chunks/{name}") == (200, data)
        assert await ask(f"/chunks/{name}", Range="bytes=100-199") == (206, data[100:200])
        assert (await ask(f"/chunks/{name}", plane.ticket(PEER, -1.0)))[0] == 401
        assert (await ask(f"/chunks/{name}", "forged"))[0] == 401
        assert (await ask(f"/chunks/{'0' * 64}"))[0] == 404
        for path in ("/chunks/../manifests", "/chunks/%2e%2e%2flock", f"/manifests/{name}", "/"):
            assert (await ask(path))[0] == 404
        await within(20, lambda: sent == {PEER: len(data) + 100})


async def test_a_killed_server_is_started_again_on_its_port(store: tuple[ChunkStore, Manifest]) -> None:
    plane = DataPlane(store[0].root, RUN_ID, host="127.0.0.1")
    async with plane.running():
        port, first = plane.port, plane.pid
        os.kill(first, signal.SIGKILL)
        await within(60, lambda: plane.pid != first)
        assert plane.port == port
        token = plane.ticket(PEER, 60.0)
        status, _ = await trio.to_thread.run_sync(get, port, f"/chunks/{store[1].chunks[0].hex()}", token)
        assert status == 200


async def test_a_port_in_use_is_a_preflight_error(store: tuple[ChunkStore, Manifest]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        plane = DataPlane(store[0].root, RUN_ID, host="127.0.0.1", port=taken.getsockname()[1])
        with pytest.raises(PreflightError, match="cannot listen"):
            async with plane.running():
                pass


OWNER = """
import sys, trio
from pathlib import Path
from intellect_protocol.network.dataplane_process import DataPlane
async def main():
    plane = DataPlane(Path(sys.argv[1]), b"r" * 32, host="127.0.0.1")
    async with plane.running():
        print(plane.pid, flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


def test_the_server_ends_with_a_killed_owner_and_its_key_is_in_no_command_line(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE)
    with owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        assert command[1:] == [b"-m", b"intellect_protocol.network.dataplane", b""]
        owner.kill()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the server outlives its owner"


def test_a_setup_that_does_not_parse_ends_the_server() -> None:
    for text in (b"", b"{}\n", b"\xff\n", json.dumps({"root": 1}).encode() + b"\n"):
        done = subprocess.run(
            [sys.executable, "-m", "intellect_protocol.network.dataplane"],
            input=text,
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == 1
        assert done.stderr.startswith(b"dataplane: ")


async def donor(nursery: trio.Nursery, behave: Callable[[trio.SocketStream], Awaitable[None]]) -> int:
    """A donor that reads a request and then behaves as told. Returns its port."""

    async def handle(stream: trio.SocketStream) -> None:
        await stream.receive_some(4096)
        with contextlib.suppress(trio.BrokenResourceError):
            await behave(stream)

    listeners = await nursery.start(functools.partial(trio.serve_tcp, handle, 0, host="127.0.0.1"))
    return int(listeners[0].socket.getsockname()[1])


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"


async def silent(stream: trio.SocketStream) -> None:
    await trio.sleep_forever()


async def trickling(stream: trio.SocketStream) -> None:
    await stream.send_all(HEAD)
    while True:
        await stream.send_all(b"x")
        await trio.sleep(0.05)


async def breaking_off(stream: trio.SocketStream) -> None:
    await stream.send_all(HEAD + bytes(5000))


async def trickling_headers(stream: trio.SocketStream) -> None:
    while True:
        await stream.send_all(HEAD[:1])
        await trio.sleep(0.05)


async def talking_nonsense(stream: trio.SocketStream) -> None:
    await stream.send_all(b"\x16\x03\x01\x00\xff" * 50)


async def endless_headers(stream: trio.SocketStream) -> None:
    await stream.send_all(b"HTTP/1.1 200 OK\r\n")
    while True:
        await stream.send_all(b"X: " + b"y" * 1000 + b"\r\n")


@pytest.mark.parametrize(
    "behaviour", [silent, trickling, trickling_headers, breaking_off, talking_nonsense, endless_headers]
)
async def test_a_donor_that_does_not_deliver_is_an_error_and_not_a_hang(
    behaviour: Callable[..., object],
) -> None:
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            port = await donor(nursery, behaviour)
            source = HttpSource("127.0.0.1", port, progress_s=0.5, throttle=SharedThrottle(0))
            with pytest.raises(UnreachableError):
                await source.fetch(bytes(32), 100_000, "t", trio.CapacityLimiter(1))
            nursery.cancel_scope.cancel()


async def test_cancelling_a_download_ends_its_thread() -> None:
    async with trio.open_nursery() as nursery:
        port = await donor(nursery, silent)
        limiter = trio.CapacityLimiter(1)
        source = HttpSource("127.0.0.1", port, progress_s=600.0, throttle=SharedThrottle(0))
        with trio.fail_after(30):
            with trio.move_on_after(0.2):
                await source.fetch(bytes(32), 100_000, "t", limiter)
            assert limiter.borrowed_tokens == 0
        nursery.cancel_scope.cancel()


async def test_answers_become_the_errors_that_say_what_to_do() -> None:
    async def answer_with(status: bytes, kind: type[IntellectError]) -> str:
        async def answer(stream: trio.SocketStream) -> None:
            await stream.send_all(b"HTTP/1.1 " + status + b" X\r\nContent-Length: 0\r\n\r\n")

        async with trio.open_nursery() as nursery:
            source = HttpSource(
                "127.0.0.1", await donor(nursery, answer), progress_s=5.0, throttle=SharedThrottle(0)
            )
            with pytest.raises(kind) as caught:
                await source.fetch(bytes(32), 10, "t", trio.CapacityLimiter(1))
            nursery.cancel_scope.cancel()
        return getattr(caught.value, "code", "")

    assert await answer_with(b"404", RefusedError) == "gone"
    assert await answer_with(b"401", RefusedError) == "ticket"
    assert await answer_with(b"503", RefusedError) == "busy"
    assert await answer_with(b"302", UnreachableError) == ""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    source = HttpSource("127.0.0.1", port, progress_s=5.0, throttle=SharedThrottle(0))
    with pytest.raises(ConnectError):
        await source.fetch(bytes(32), 10, "t", trio.CapacityLimiter(1))
