"""The control streams of a chunk service: one per peer, opened by either side, kept open."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import trio

from ..errors import IntellectError
from ..keys import peer_id_text
from .addresses import PeerAddress
from .chunk_config import ChunkConfig, ChunkHost
from .chunk_download import SharedThrottle
from .chunk_frames import PROTOCOL, Frame, Hello
from .chunk_link import FrameStream, Link
from .chunk_peer import RemotePeer

logger = logging.getLogger(__name__)


class LinkTable:
    """The linked peers.

    Args:
        hello: our first frame.
        on_up, on_down: called when a link is there, and when it is gone.
        on_frame: called with each frame of a linked peer; may raise `WireError`.
    """

    def __init__(
        self,
        host: ChunkHost,
        config: ChunkConfig,
        hello: Hello,
        *,
        on_up: Callable[[RemotePeer], None],
        on_down: Callable[[RemotePeer], None],
        on_frame: Callable[[RemotePeer, Frame], None],
    ) -> None:
        self.by_id: dict[bytes, RemotePeer] = {}
        self._host = host
        self._config = config
        self._hello = hello
        self._on_up = on_up
        self._on_down = on_down
        self._on_frame = on_frame
        self._throttle = SharedThrottle(config.download_bytes_per_s)
        self._dial_limiter = trio.CapacityLimiter(config.dials)
        self._dialling: set[bytes] = set()
        self._dial_after: dict[bytes, float] = {}
        self._nursery: trio.Nursery

    def __iter__(self) -> Iterator[RemotePeer]:
        return iter(list(self.by_id.values()))

    def serve(self, nursery: trio.Nursery) -> None:
        """Accept links; all of them live in `nursery`."""
        self._nursery = nursery
        self._host.set_stream_handler(PROTOCOL, self._accept)

    def dial(self, peer_id: bytes, where: PeerAddress | None = None) -> None:
        """Link to a peer in the background, unless it is linked or did not answer just now.

        Args:
            where: its addresses; None if the host knows how to reach it.
        """
        now = trio.current_time()
        if peer_id == self._host.peer_id or peer_id in self.by_id or peer_id in self._dialling:
            return
        if now < self._dial_after.get(peer_id, 0.0) or len(self.by_id) >= self._config.links:
            return
        self._dialling.add(peer_id)
        self._nursery.start_soon(self._open, peer_id, where)

    async def _open(self, peer_id: bytes, where: PeerAddress | None) -> None:
        try:
            async with self._dial_limiter:
                if where is not None:
                    await self._host.connect(where, timeout_s=self._config.dial_s)
                stream = await self._host.open_stream(peer_id, PROTOCOL, self._config.dial_s)
        except IntellectError as error:
            logger.debug("no chunk link to %s: %s", peer_id_text(peer_id), error)
            now = trio.current_time()
            self._dial_after = {peer: after for peer, after in self._dial_after.items() if after > now}
            self._dial_after[peer_id] = now + self._config.dial_pause_s
            return
        finally:
            self._dialling.discard(peer_id)
        await self._converse(stream, initiator=self._host.peer_id)

    async def _accept(self, stream: FrameStream) -> None:
        if len(self.by_id) >= self._config.links and stream.peer_id not in self.by_id:
            return
        done = trio.Event()

        async def converse() -> None:
            try:
                await self._converse(stream, initiator=stream.peer_id)
            finally:
                done.set()

        # The host calls, but the link must end with the service.
        self._nursery.start_soon(converse)
        await done.wait()

    async def _converse(self, stream: FrameStream, initiator: bytes) -> None:
        link = Link(stream, initiator, gather_s=self._config.gather_s)
        peer: RemotePeer | None = None

        def on_frame(frame: Frame) -> None:
            assert peer is not None
            if self.by_id.get(peer.peer_id) is peer:
                self._on_frame(peer, frame)

        try:
            await link.greet(self._hello)
            peer = self._adopt(link)
            if peer is not None:
                await link.run(on_frame)
        except IntellectError as error:
            logger.debug("chunk link with %s: %s", peer_id_text(link.peer_id), error)
        finally:
            if peer is not None:
                self._forget(peer)
            await stream.reset()

    def _adopt(self, link: Link) -> RemotePeer | None:
        """Make a link the one to its peer; None if the other one wins.

        When both sides dialled at once, both keep the link that the smaller peer id opened; a second
        one from the same side means that the first is dead.
        """
        old = self.by_id.get(link.peer_id)
        if old is not None:
            if old.link.initiator < link.initiator:
                return None
            old.link.close()
            self._forget(old)
        address = next((row.address for row in self._host.peers() if row.peer_id == link.peer_id), "")
        peer = self.by_id[link.peer_id] = RemotePeer(
            link, _ip_of(address), progress_s=self._config.progress_s, throttle=self._throttle
        )
        self._on_up(peer)
        return peer

    def _forget(self, peer: RemotePeer) -> None:
        if self.by_id.get(peer.peer_id) is peer:
            del self.by_id[peer.peer_id]
            peer.gone()
            self._on_down(peer)


def _ip_of(multiaddress: str) -> str:
    """The IP address at the start of a multiaddress, "" if there is none."""
    parts = multiaddress.split("/")
    return parts[2] if len(parts) > 2 and parts[1] in ("ip4", "ip6") else ""
