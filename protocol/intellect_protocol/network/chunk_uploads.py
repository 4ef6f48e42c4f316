"""Serving chunks: upload slots, tickets for the data plane, and chunks on the control stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import trio

from ..chunk_store import ChunkStore
from .chunk_config import ChunkConfig
from .chunk_download import SharedThrottle
from .chunk_frames import DATA_BYTES, Busy, Data, Refuse, Request, Ticket
from .chunk_peer import RemotePeer
from .chunk_slots import UploadSlots
from .dataplane_process import DataPlane

_STREAM_UPLOADS = 4  # to one peer at once


class Uploads:
    """What peers download from us.

    Attributes:
        bytes_to: chunk bytes sent, by peer id.
    """

    def __init__(self, store: ChunkStore, run_id: bytes, config: ChunkConfig) -> None:
        self.bytes_to: dict[bytes, int] = {}
        self.dataplane = DataPlane(
            store.root,
            run_id,
            host=config.http_host,
            port=config.http_port,
            upload_bytes_per_s=config.upload_bytes_per_s,
            on_sent=self._note_sent,
        )
        self._store = store
        self._address = config.http_address
        self._slots = UploadSlots(config.upload_slots, config.slot_lease_s)
        self._throttle = SharedThrottle(config.upload_bytes_per_s)
        self._nursery: trio.Nursery

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve inside this block.

        Raises:
            PreflightError: the data plane cannot listen.
        """
        async with self.dataplane.running(), trio.open_nursery() as nursery:
            self._nursery = nursery
            yield
            nursery.cancel_scope.cancel()

    def holds_slot(self, peer_id: bytes) -> bool:
        """Whether a peer may download now."""
        return self._slots.holds(peer_id, trio.current_time())

    def release(self, peer_id: bytes) -> None:
        """A peer needs its slot no more."""
        self._slots.release(peer_id)

    def on_ask(self, peer: RemotePeer, bytes_from: Mapping[bytes, int]) -> bool:
        """Answer `Ask` with a ticket or busy; whether it was a ticket."""
        wait_s = self._slots.ask(peer.peer_id, bytes_from, trio.current_time())
        if wait_s:
            peer.link.send(Busy(wait_s))
            return False
        lifetime_s = self._slots.lease_s
        token = self.dataplane.ticket(peer.peer_id, lifetime_s)
        peer.link.send(Ticket(self._address, self.dataplane.port, token, lifetime_s))
        return True

    def on_request(self, peer: RemotePeer, request: Request, digest: bytes | None) -> None:
        """Send a chunk on the stream, if there is one (`digest`) and the peer has a slot."""
        if digest is None:
            peer.link.send(Refuse(request.c, request.index, gone=True))
        elif peer.uploads >= _STREAM_UPLOADS or not self.holds_slot(peer.peer_id):
            peer.link.send(Refuse(request.c, request.index, gone=False))
        else:
            peer.uploads += 1
            self._nursery.start_soon(self._send, peer, request, digest)

    async def _send(self, peer: RemotePeer, request: Request, digest: bytes) -> None:
        try:
            data = await trio.to_thread.run_sync(self._store.get, digest)
            if data is None:
                peer.link.send(Refuse(request.c, request.index, gone=True))
                return
            for start in range(0, len(data), DATA_BYTES):
                piece = data[start : start + DATA_BYTES]
                await trio.sleep(self._throttle.delay(len(piece)))
                peer.link.send(Data(request.c, request.index, start, piece))
            self._note_sent(peer.peer_id, len(data))
        finally:
            peer.uploads -= 1

    def _note_sent(self, peer_id: bytes, size: int) -> None:
        self.bytes_to[peer_id] = self.bytes_to.get(peer_id, 0) + size
