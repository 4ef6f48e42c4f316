"""The owner's side of the data plane: starts the server process, restarts it, issues tickets."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import trio

from ..errors import PreflightError
from .chunk_tickets import issue_ticket
from .dataplane import Report, Setup

logger = logging.getLogger(__name__)

_START_S = 60.0  # a busy machine may take long to import the server's libraries
_STOP_S = 2.0


class DataPlane:
    """A supervised `intellect_protocol.network.dataplane` process serving one chunk store.

    Args:
        root: the store's folder.
        run_id: tickets are good for this run only.
        host, port: where to listen; port 0 takes a free one and keeps it over restarts.
        upload_bytes_per_s: cap on what is sent, 0 for none.
        on_sent: called with (peer id, bytes) for chunk bytes that left.
    """

    def __init__(
        self,
        root: Path,
        run_id: bytes,
        *,
        host: str = "0.0.0.0",
        port: int = 0,
        upload_bytes_per_s: int = 0,
        on_sent: Callable[[bytes, int], None] = lambda peer, size: None,
    ) -> None:
        self.port = port
        self.pid = 0
        self._setup = Setup(
            root=str(root.absolute()),
            key=secrets.token_bytes(32),
            run_id=run_id,
            host=host,
            upload_bytes_per_s=upload_bytes_per_s,
        )
        self._on_sent = on_sent

    def ticket(self, peer_id: bytes, lifetime_s: float) -> str:
        """A token for `peer_id`, valid for `lifetime_s` from now on this machine's clock."""
        expires_at_ms = int((time.time() + lifetime_s) * 1000)
        return issue_ticket(self._setup.key, self._setup.run_id, peer_id, expires_at_ms)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The server listens on `port` inside this block; a server that dies is started again.

        Raises:
            PreflightError: it cannot listen.
        """
        server = await self._start()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._supervise, server)
            yield
            nursery.cancel_scope.cancel()

    async def _supervise(self, server: _Server) -> None:
        pause_s = 0.1
        while True:
            try:
                while (report := await server.next_report()) is not None:
                    pause_s = 0.1
                    for peer, size in report.sent.items():
                        self._on_sent(bytes.fromhex(peer), size)
            finally:
                await server.stop()
            logger.warning("the data plane ended with status %s; starting it again", server.status)
            while True:
                await trio.sleep(pause_s)
                pause_s = min(pause_s * 2, 10.0)
                try:
                    server = await self._start()
                    break
                except PreflightError as error:
                    logger.warning("%s", error)

    async def _start(self) -> _Server:
        server = _Server(msgspec.structs.replace(self._setup, port=self.port))
        try:
            with trio.move_on_after(_START_S) as scope:
                while (report := await server.next_report()) is not None:
                    if report.port:
                        self.port, self.pid = report.port, server.pid
                        return server
        except BaseException:
            await server.stop()
            raise
        await server.stop()
        where = f"{self._setup.host}:{self.port}"
        if scope.cancelled_caught:
            raise PreflightError(f"the data plane did not listen on {where} within {_START_S:g} s")
        raise PreflightError(f"the data plane cannot listen on {where} (status {server.status})")


class _Server:
    """One server process."""

    def __init__(self, setup: Setup) -> None:
        # Not trio.open_process: that forks in a worker thread, and the server's parent-death signal
        # would fire when trio retires the idle thread.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "intellect_protocol.network.dataplane"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._buffer = bytearray()
        with contextlib.suppress(BrokenPipeError):
            self._input.write(msgspec.json.encode(setup) + b"\n")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status once it was stopped."""
        return self._process.returncode

    async def next_report(self) -> Report | None:
        """What it reports next; None when its output ended."""
        while b"\n" not in self._buffer:
            await trio.lowlevel.wait_readable(self._output.fileno())
            piece = os.read(self._output.fileno(), 65536)
            if not piece:
                return None
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return msgspec.json.decode(line, type=Report)

    async def stop(self) -> None:
        """Close its input, give it a moment, kill it if it must be, reap it."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()

        def reap() -> None:
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(reap)
        self._output.close()
