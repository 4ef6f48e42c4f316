"""Yamux with bounds: what a peer can make us hold, and for how long it can make us wait.

Corrections 7 and 8 of `compat`. Anybody may cancel a write here (a deadline passed, a stream was
given up), so no task may hold half a frame: frames are handed over whole to one task that writes.
"""

from __future__ import annotations

import logging
from typing import Any

import trio
from libp2p.custom_types import TProtocol
from libp2p.network.connection.exceptions import RawConnError
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL_ID
from libp2p.stream_muxer.yamux.yamux import Yamux

from .limits import Limits, Timeouts

logger = logging.getLogger(__name__)


class _TooMuchUnread(trio.TooSlowError):
    """Ends the connection; yamux closes it on a `TooSlowError` while it reads a frame."""


class BoundedYamux(Yamux):  # type: ignore[misc]
    """Yamux with one writing task, a bound on unread bytes and streams, and counters."""

    def __init__(self, secured: Any, peer_id: Any, *, limits: Limits, timeouts: Timeouts) -> None:
        async def on_close() -> None:
            """Replaced by the swarm's connection object."""

        super().__init__(secured, peer_id, is_initiator=secured.is_initiator, on_close=on_close)
        self._limits = limits
        self._timeouts = timeouts
        self._outbox_in, self._outbox_out = trio.open_memory_channel[bytes](0)
        self.bytes_in = 0
        self.bytes_out = 0

    async def start(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_outbox)
                await super().start()
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):  # closing a socket does not wait
                await self.secured_conn.close()
            self.event_closed.set()

    async def _write_frame(self, data: bytes) -> None:
        """Hand over a whole frame: a caller that is cancelled leaves no half frame behind."""
        try:
            await self._outbox_in.send(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise RawConnError("connection closed") from error

    async def _write_outbox(self) -> None:
        with self._outbox_out:
            async for data in self._outbox_out:
                self.bytes_out += len(data)
                with trio.move_on_after(self._timeouts.stalled_write_s) as scope:
                    try:
                        await self.secured_conn.write(data)
                    except Exception as error:
                        logger.debug("write to %s failed: %s", self.peer_id, error)
                        break
                if scope.cancelled_caught:
                    logger.info("peer %s reads nothing; disconnecting", self.peer_id)
                    break
        await self._cleanup_on_error()

    async def _read_data_body(self, length: int) -> bytes:
        unread = sum(len(buffer) for buffer in self.stream_buffers.values())
        if unread + length > self._limits.unread_bytes_per_peer:
            logger.info("peer %s exceeds the limit of unread bytes; disconnecting", self.peer_id)
            raise _TooMuchUnread
        if len(self.streams) > 4 * self._limits.streams_per_connection:
            logger.info("peer %s holds too many streams; disconnecting", self.peer_id)
            raise _TooMuchUnread
        self.bytes_in += length
        return bytes(await super()._read_data_body(length))

    async def close(self, error_code: int = 0) -> None:
        with trio.move_on_after(self._timeouts.close_s / 4) as scope:
            await super().close(error_code)
        if scope.cancelled_caught:
            with trio.CancelScope(deadline=trio.current_time() + self._timeouts.close_s / 4, shield=True):
                await self._cleanup_on_error()


class BoundedMuxers(MuxerMultistream):  # type: ignore[misc]
    """Makes `BoundedYamux` whatever is asked for; nothing else is offered."""

    def __init__(self, limits: Limits, timeouts: Timeouts) -> None:
        super().__init__({TProtocol(YAMUX_PROTOCOL_ID): Yamux}, int(timeouts.negotiate_s))
        self._limits = limits
        self._timeouts = timeouts

    async def new_conn(self, conn: Any, peer_id: Any) -> Any:
        protocol, _ = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        muxed = BoundedYamux(conn, peer_id, limits=self._limits, timeouts=self._timeouts)
        return self._annotate_connection(muxed, conn, protocol)
