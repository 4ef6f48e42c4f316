"""Downloading one chunk over HTTP, in a worker thread that its owner can stop at once."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections import deque

import trio

from ..errors import IntellectError, ManifestError, RefusedError, UnreachableError
from .dataplane import Throttle

_READ_BYTES = 256 << 10
_CONNECT_S = 2.0
_MIN_PROGRESS_BYTES = 16 << 10
_MAX_IDLE_CONNECTIONS = 16


class ConnectError(UnreachableError):
    """Nothing answers at the address of a ticket."""


class SharedThrottle:
    """`Throttle` for several threads."""

    def __init__(self, rate_bytes_per_s: int) -> None:
        self._throttle = Throttle(rate_bytes_per_s)
        self._mutex = threading.Lock()

    def delay(self, size: int) -> float:
        """Account for `size` bytes; seconds to wait before reading on."""
        with self._mutex:
            return self._throttle.delay(size, time.monotonic())


class HttpSource:
    """The data plane of one peer, with its idle connections."""

    def __init__(self, address: str, port: int, *, progress_s: float, throttle: SharedThrottle) -> None:
        self.address = address
        self.port = port
        self._progress_s = progress_s
        self._throttle = throttle
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._closed = False

    async def fetch(self, digest: bytes, size_bytes: int, token: str, limiter: trio.CapacityLimiter) -> bytes:
        """The bytes the peer sends for a chunk; whether they are the chunk is the caller's to check.

        Raises:
            RefusedError: code ``busy``, ``gone`` or ``ticket`` by the answer's status.
            ManifestError: it answers with another size.
            ConnectError: it cannot be reached.
            UnreachableError: it broke off, or sent less than 16 KiB in `progress_s` seconds.
        """
        job = _Job(self, digest, size_bytes, token)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(job.abort_when_cancelled)
            # Shielded: the thread is not left behind, it is woken and ends.
            with trio.CancelScope(shield=True):
                outcome = await trio.to_thread.run_sync(job.run, limiter=limiter)
            nursery.cancel_scope.cancel()
        await trio.lowlevel.checkpoint_if_cancelled()
        if isinstance(outcome, IntellectError):
            raise outcome
        return outcome

    def close(self) -> None:
        """Close the idle connections; those in use close when they are given back."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it was used before."""
        with contextlib.suppress(IndexError):
            return self._idle.pop(), True
        connection = http.client.HTTPConnection(self.address, self.port, timeout=_CONNECT_S)
        try:
            connection.connect()
        except OSError as error:
            raise ConnectError(f"{self.address}:{self.port} does not answer") from error
        connection.sock.settimeout(self._progress_s)
        return connection, False

    def give_back(self, connection: http.client.HTTPConnection) -> None:
        """Keep a connection whose response was read to the end."""
        ended = connection.sock is None  # the server said Connection: close
        if ended or self._closed or len(self._idle) >= _MAX_IDLE_CONNECTIONS:
            connection.close()
        else:
            self._idle.append(connection)

    @property
    def progress_s(self) -> float:
        """Time within which 16 KiB (or the rest of the chunk) must come."""
        return self._progress_s

    def delay(self, size: int) -> float:
        """Seconds to wait under the download cap."""
        return self._throttle.delay(size)


class _Job:
    def __init__(self, source: HttpSource, digest: bytes, size_bytes: int, token: str) -> None:
        self._source = source
        self._path = f"/chunks/{digest.hex()}"
        self._size = size_bytes
        self._token = token
        self._aborted = threading.Event()
        self._socket: socket.socket | None = None
        self._answered = False

    def abort(self) -> None:
        """Make `run` end if it has not: it wakes from a blocking read when the socket is shut down."""
        self._aborted.set()
        connected = self._socket
        if connected is not None:
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    async def abort_when_cancelled(self) -> None:
        """Wait for the cancellation of the caller, or for headers that take too long, then `abort`."""
        try:
            await trio.sleep(_CONNECT_S + self._source.progress_s)
            if self._answered:
                await trio.sleep_forever()
        finally:
            self.abort()

    def run(self) -> bytes | IntellectError:
        """Download, in a worker thread; what went wrong is returned."""
        try:
            connection, used = self._source.connection()
        except ConnectError as error:
            return error
        try:
            try:
                return self._exchange(connection)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                # A kept connection may have been closed since; a fresh one must answer.
                if not used or self._aborted.is_set():
                    raise
                connection.close()
                connection, _ = self._source.connection()
                return self._exchange(connection)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return UnreachableError(f"{self._source.address}:{self._source.port} broke off: {error}")
        except IntellectError as error:
            connection.close()
            return error

    def _exchange(self, connection: http.client.HTTPConnection) -> bytes:
        self._socket = connection.sock
        if self._aborted.is_set():
            raise UnreachableError("aborted")
        connection.request("GET", self._path, headers={"Authorization": f"Bearer {self._token}"})
        response = connection.getresponse()
        if response.status != 200:
            self._refused(response)
        if response.length != self._size:
            raise ManifestError(f"a chunk of {response.length} bytes where {self._size} are right")
        self._answered = True
        data = self._read(response)
        self._socket = None
        response.close()
        self._source.give_back(connection)
        return data

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        buffer = bytearray()
        window_filled, window_start = 0, time.monotonic()
        while len(buffer) < self._size:
            # Not `readinto`: that waits until it has all, and a trickle would never be noticed.
            piece = response.read1(min(_READ_BYTES, self._size - len(buffer)))
            if not piece:
                raise UnreachableError(f"the peer broke off {self._size - len(buffer)} bytes early")
            buffer += piece
            delay = self._source.delay(len(piece))
            if delay:
                self._aborted.wait(delay)
                window_start += delay
            if self._aborted.is_set():
                raise UnreachableError("aborted")
            now = time.monotonic()
            if now - window_start >= self._source.progress_s:
                if len(buffer) - window_filled < _MIN_PROGRESS_BYTES and len(buffer) < self._size:
                    raise UnreachableError("the peer trickles")
                window_filled, window_start = len(buffer), now
        return bytes(buffer)

    def _refused(self, response: http.client.HTTPResponse) -> None:
        code = {401: "ticket", 404: "gone", 503: "busy"}.get(response.status)
        if code is None:
            raise UnreachableError(f"the peer answers with status {response.status}")
        retry_after_s = 0.2 if code == "busy" else None
        raise RefusedError(code, "the peer does not send the chunk now", retry_after_s)
