"""The data plane: an HTTP server for chunks, as a process of its own.

    python -m intellect_protocol.network.dataplane

The parent writes a `Setup` as one line of JSON to standard input (the ticket key must not appear
in argv or the environment) and reads one line of JSON from standard output for each `Report`. When
standard input ends, because the parent closed it or died in whatever way, the server ends.

    GET /chunks/<64 hex digits>      Authorization: Bearer <ticket>      Range as in RFC 9110

200 or 206 with the chunk; 401 without a valid ticket; 404 if the chunk is not here; 503 with
Retry-After when the peer has too many requests under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from ..chunk_store import chunk_path
from .chunk_tickets import check_ticket

MAX_SETUP_BYTES = 64 << 10
_PIECE_BYTES = 64 << 10
_REPORT_INTERVAL_S = 0.25
_PR_SET_PDEATHSIG = 1  # prctl(2)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What the parent decides."""

    root: str  # folder of the chunk store
    key: bytes  # ticket key
    run_id: bytes
    host: str = "0.0.0.0"
    port: int = 0  # 0: any free one
    upload_bytes_per_s: int = 0  # 0: no cap
    connections: int = 256
    connections_per_address: int = 64
    requests_per_peer: int = 16  # at once
    unauthorised_s: float = 10.0  # a connection must present a ticket within this time
    request_s: float = 120.0  # to send one chunk
    stalled_s: float = 10.0  # a client that acknowledges nothing for so long is cut off


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the server tells: its port once it listens, then bytes of chunks sent, by peer id (hex)."""

    port: int = 0
    sent: dict[str, int] = {}


class Throttle:
    """Delays so that at most `rate` bytes per second pass, with a quarter of a second of burst."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._free_at = 0.0

    def delay(self, size: int, now: float) -> float:
        """Account for `size` bytes; seconds to wait before sending them."""
        if not self._rate:
            return 0.0
        self._free_at = max(self._free_at, now - 0.25) + size / self._rate
        return max(0.0, self._free_at - now)


class Server:
    """The HTTP application and its accept loop."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._root = Path(setup.root)
        self._throttle = Throttle(setup.upload_bytes_per_s)
        self._connections: dict[asyncio.Transport, tuple[str, float]] = {}
        self._authorised: set[asyncio.Transport] = set()
        self._under_way: defaultdict[bytes, int] = defaultdict(int)
        self.sent: defaultdict[str, int] = defaultdict(int)

    async def chunk(self, request: web.Request) -> web.StreamResponse:
        """Send one chunk."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        setup = self.setup
        peer: bytes | None = None
        if scheme == "Bearer":
            peer = check_ticket(setup.key, setup.run_id, token, int(time.time() * 1000))
        if peer is None:
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": "Bearer"})
        if isinstance(request.transport, asyncio.Transport):
            self._authorised.add(request.transport)
        if self._under_way[peer] >= setup.requests_per_peer:
            raise web.HTTPServiceUnavailable(headers={"Retry-After": "1"})
        path = chunk_path(self._root, request.match_info["name"])
        if not setup.upload_bytes_per_s:
            return _ChunkResponse(path, self, peer)
        with self.sending(peer) as count:
            async with asyncio.timeout(setup.request_s):
                response = await self._send_throttled(request, path)
            count(response)
        return response

    @contextlib.contextmanager
    def sending(self, peer: bytes) -> Iterator[Callable[[web.StreamResponse], None]]:
        """Account for a response to `peer`; call what is yielded when all of it was sent."""

        def count(response: web.StreamResponse) -> None:
            if response.status < 300:
                self.sent[peer.hex()] += response.content_length or 0

        self._under_way[peer] += 1
        try:
            yield count
        finally:
            self._under_way[peer] -= 1
            if not self._under_way[peer]:
                del self._under_way[peer]

    async def _send_throttled(self, request: web.Request, path: Path) -> web.StreamResponse:
        try:
            data = await asyncio.to_thread(path.read_bytes)
        except FileNotFoundError:
            raise web.HTTPNotFound from None
        wanted = data[request.http_range]
        response = web.StreamResponse(status=200 if len(wanted) == len(data) else 206)
        response.content_length = len(wanted)
        if response.status == 206:
            start = request.http_range.indices(len(data))[0]
            response.headers["Content-Range"] = f"bytes {start}-{start + len(wanted) - 1}/{len(data)}"
        await response.prepare(request)
        for at in range(0, len(wanted), _PIECE_BYTES):
            piece = wanted[at : at + _PIECE_BYTES]
            await asyncio.sleep(self._throttle.delay(len(piece), time.monotonic()))
            await response.write(piece)
        await response.write_eof()
        return response

    async def accept(self, listener: socket.socket, handlers: web.Server) -> None:
        """Accept for ever; a connection beyond a cap is closed at once."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (address, *_) = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(0.1)  # out of descriptors: those that close free some
                continue
            self._drop_closed()
            same = sum(other == address for other, _ in self._connections.values())
            if len(self._connections) >= self.setup.connections or same >= self.setup.connections_per_address:
                connection.close()
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.setup.stalled_s * 1000)
            )
            transport, _ = await loop.connect_accepted_socket(handlers, connection)
            self._connections[transport] = (address, time.monotonic())

    def _drop_closed(self) -> None:
        for transport in [transport for transport in self._connections if transport.is_closing()]:
            del self._connections[transport]
            self._authorised.discard(transport)

    async def maintain(self) -> None:
        """Report what was sent, and close connections that never showed a ticket."""
        while True:
            await asyncio.sleep(_REPORT_INTERVAL_S)
            self.report()
            self._drop_closed()
            horizon = time.monotonic() - self.setup.unauthorised_s
            for transport, (_, since) in self._connections.items():
                if since < horizon and transport not in self._authorised:
                    transport.abort()

    def report(self) -> None:
        """Write the bytes sent since the last report."""
        if self.sent:
            sent, self.sent = dict(self.sent), defaultdict(int)
            write_report(Report(sent=sent))


class _ChunkResponse(web.FileResponse):
    """A file sent by the kernel (sendfile), within a deadline and accounted for."""

    def __init__(self, path: Path, server: Server, peer: bytes) -> None:
        super().__init__(path)
        self._server = server
        self._peer = peer

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        with self._server.sending(self._peer) as count:
            async with asyncio.timeout(self._server.setup.request_s):
                writer = await super().prepare(request)
            count(self)
        return writer


def write_report(report: Report) -> None:
    """One line on standard output; a parent that is gone is no error here."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, msgspec.json.encode(report) + b"\n")


async def serve(setup: Setup) -> None:
    """Run the server until standard input ends."""
    server = Server(setup)
    application = web.Application()
    application.router.add_get("/chunks/{name:[0-9a-f]{64}}", server.chunk)
    runner = web.AppRunner(
        application, access_log=None, handle_signals=False, handler_cancellation=True, keepalive_timeout=60.0
    )
    await runner.setup()
    assert runner.server is not None
    family = socket.AF_INET6 if ":" in setup.host else socket.AF_INET
    with socket.create_server((setup.host, setup.port), family=family, backlog=128) as listener:
        listener.setblocking(False)
        write_report(Report(port=listener.getsockname()[1]))
        tasks = [
            asyncio.create_task(server.accept(listener, runner.server)),
            asyncio.create_task(server.maintain()),
        ]
        try:
            await _end_of_input()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            server.report()
            await runner.cleanup()


async def _end_of_input() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    while await reader.read(4096):
        pass


def main() -> None:
    """Entry point of the process."""
    # The parent's death also ends stdin; this covers a copy of the pipe that leaked elsewhere.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A Ctrl-C in the terminal reaches the whole group: ending is for the parent to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte or len(line) > MAX_SETUP_BYTES:
            sys.exit("dataplane: no setup on standard input")
        line += byte
    try:
        setup = msgspec.json.decode(line, type=Setup)
    except msgspec.MsgspecError as error:
        sys.exit(f"dataplane: {error}")
    try:
        asyncio.run(serve(setup))
    except OSError as error:
        sys.exit(f"dataplane: cannot listen on {setup.host}:{setup.port}: {error.strerror or error}")


if __name__ == "__main__":
    main()
