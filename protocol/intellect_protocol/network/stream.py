"""A stream to a peer: reads and writes that end, and errors of this project.

py-libp2p reports the end of a killed peer's stream like a clean end, so nothing here trusts an end
of stream: every length is declared beforehand, and a short read is an error.
"""

from __future__ import annotations

from typing import Any

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.stream.exceptions import StreamEOF

from ..errors import DeadlineError, UnreachableError, WireError
from ..wire import MAX_FRAME_BYTES, frame, frame_length

UNIT_BYTES = 4 << 20  # the most that is handed to a stream at once
_READ_BYTES = 256 << 10


class Stream:
    """One protocol stream over a multiplexed connection."""

    def __init__(self, raw: Any, protocol: str, *, progress_s: float) -> None:
        self._raw = raw
        self._progress_s = progress_s
        self.protocol = protocol
        self.peer_id: bytes = raw.muxed_conn.peer_id.to_bytes()

    async def read_some(self, max_bytes: int = _READ_BYTES, *, timeout_s: float | None = None) -> bytes:
        """At least one byte and at most `max_bytes`; b"" at the end of the stream.

        Args:
            timeout_s: seconds to wait for the first byte; default is the host's `progress_s`.

        Raises:
            UnreachableError: the stream was reset or the connection is gone.
            DeadlineError: nothing came in time.
        """
        with trio.move_on_after(self._progress_s if timeout_s is None else timeout_s) as scope:
            try:
                return bytes(await self._raw.read(max_bytes))
            except StreamEOF:
                return b""
            except (BaseLibp2pError, trio.ClosedResourceError, trio.BrokenResourceError) as error:
                raise UnreachableError("the peer closed the stream") from error
        assert scope.cancelled_caught
        raise DeadlineError("the peer sent nothing for too long")

    async def read_exactly(self, size: int, *, timeout_s: float | None = None) -> bytes:
        """`size` bytes; `timeout_s` bounds the wait for each piece.

        Raises:
            WireError: the stream ended early.
            UnreachableError, DeadlineError: as `read_some`.
        """
        buffer = bytearray()
        while len(buffer) < size:
            piece = await self.read_some(min(_READ_BYTES, size - len(buffer)), timeout_s=timeout_s)
            if not piece:
                raise WireError(f"stream ended {size - len(buffer)} bytes early")
            buffer += piece
        return bytes(buffer)

    async def write(self, data: bytes | memoryview, *, timeout_s: float | None = None) -> None:
        """Send all of `data`; `timeout_s` bounds each unit of 4 MiB.

        Raises:
            UnreachableError: the stream was reset or the connection is gone.
            DeadlineError: the peer does not read.
        """
        view = memoryview(data)
        for start in range(0, len(view), UNIT_BYTES):
            with trio.move_on_after(self._progress_s if timeout_s is None else timeout_s) as scope:
                try:
                    await self._raw.write(bytes(view[start : start + UNIT_BYTES]))
                except (BaseLibp2pError, trio.ClosedResourceError, trio.BrokenResourceError) as error:
                    raise UnreachableError("the peer closed the stream") from error
            if scope.cancelled_caught:
                raise DeadlineError("the peer does not read")

    async def read_frame(self, *, max_bytes: int = MAX_FRAME_BYTES, timeout_s: float | None = None) -> bytes:
        """One length-prefixed frame (`wire.frame`).

        Raises:
            WireError: oversize or truncated.
            UnreachableError, DeadlineError: as `read_some`.
        """
        size = frame_length(await self.read_exactly(4, timeout_s=timeout_s), max_bytes=max_bytes)
        return await self.read_exactly(size, timeout_s=timeout_s)

    async def write_frame(
        self, payload: bytes, *, max_bytes: int = MAX_FRAME_BYTES, timeout_s: float | None = None
    ) -> None:
        """Send one length-prefixed frame.

        Raises:
            WireError: larger than `max_bytes`.
            UnreachableError, DeadlineError: as `write`.
        """
        await self.write(frame(payload, max_bytes=max_bytes), timeout_s=timeout_s)

    async def close(self) -> None:
        """End our side; the peer may still send. Never raises."""
        await self._end(self._raw.close)

    async def reset(self) -> None:
        """Drop the stream in both directions. Never raises."""
        await self._end(self._raw.reset)

    async def _end(self, how: Any) -> None:
        with trio.CancelScope(deadline=trio.current_time() + 1.0, shield=True):
            try:
                await how()
            except (BaseLibp2pError, trio.ClosedResourceError, trio.BrokenResourceError):
                return

    async def finish(self, *, timeout_s: float | None = None) -> None:
        """End our side, let the peer read what is under way, then free the stream. Never raises."""
        await self.close()
        with trio.move_on_after(self._progress_s if timeout_s is None else timeout_s):
            try:
                while await self.read_some():
                    pass
            except (UnreachableError, DeadlineError):
                pass
        await self.reset()
