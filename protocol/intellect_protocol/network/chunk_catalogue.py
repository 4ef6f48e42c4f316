"""What a chunk service offers to whom, and what it knows of others' offers, version by version."""

from __future__ import annotations

from random import Random

import trio

from ..checkpoint import Manifest
from ..file_lock import FileLock
from .chunk_config import ChunkHost
from .chunk_frames import MAX_PEERS, Bitfield, Done, Have, Peers, Want, pack_bits, unpack_bits
from .chunk_links import LinkTable
from .chunk_peer import RemotePeer
from .chunk_selection import mask_of
from .chunk_slots import Reveal
from .chunk_uploads import Uploads
from .fetch import VersionFetch


class Served:
    """A version this service holds, wholly or in part."""

    def __init__(self, checkpoint: bytes, manifest: Manifest, hold: FileLock) -> None:
        self.checkpoint = checkpoint
        self.manifest = manifest
        self.hold = hold
        self.have = 0
        self.everything = (1 << len(manifest.chunks)) - 1
        self.fetch: VersionFetch | None = None
        self.reveal: Reveal | None = None
        self.provided = False


class Catalogue:
    """The versions that are served or being downloaded.

    Attributes:
        versions: by hash C.
        links: set by the owner once it exists: each of the two tells the other what happens.
    """

    def __init__(self, host: ChunkHost, uploads: Uploads, random: Random) -> None:
        self.versions: dict[bytes, Served] = {}
        self.links: LinkTable
        self._host = host
        self._uploads = uploads
        self._random = random

    def add(self, served: Served) -> None:
        """Offer a version; those who asked for it before it was here are told."""
        self.versions[served.checkpoint] = served
        for peer in self.links:
            if peer.wants(served.checkpoint):
                self._greet_downloader(served, peer)

    def remove(self, checkpoint: bytes) -> Served | None:
        """Offer a version no more."""
        served = self.versions.pop(checkpoint, None)
        if served is not None:
            for peer in self.links:
                if peer.wants(checkpoint):
                    peer.link.send(Bitfield(checkpoint, b""))
        return served

    def show_more(self) -> None:
        """As an origin, show what it is time to show."""
        for served in list(self.versions.values()):
            self._show_more(served)

    def _offer(self, served: Served, peer: RemotePeer) -> bytes:
        """Bitfield of what `peer` may take from us; between origins, of what we have."""
        if served.reveal is None or peer.origin:
            return pack_bits(served.have)
        return pack_bits(served.reveal.shown(peer.peer_id))

    def tell_want(self, served: Served, peer: RemotePeer) -> None:
        """We download the version: tell a peer, and ask it for a slot."""
        peer.link.send(Want(served.checkpoint, self._offer(served, peer)))
        peer.has_slot(trio.current_time())  # asks for one
        if served.fetch is not None:
            served.fetch.offer(peer)

    def _greet_downloader(self, served: Served, peer: RemotePeer) -> None:
        self._track(served, peer)
        peer.link.send(Bitfield(served.checkpoint, self._offer(served, peer)))
        self._show_more(served)
        peer.introduced &= self.links.by_id.keys()  # who left may be back at another address
        others = [
            other.peer_id
            for other in self.links
            if other is not peer
            and other.peer_id not in peer.introduced
            and (other.wants(served.checkpoint) or other.offered(served.checkpoint))
        ]
        addresses: list[str] = []
        for peer_id in self._random.sample(others, min(len(others), MAX_PEERS)):
            where = self._host.dialable(peer_id)
            if where is not None:
                addresses += where.full()[:1]
                peer.introduced.add(peer_id)
        if addresses:
            peer.link.send(Peers(served.checkpoint, addresses))

    def gained(self, served: Served, indexes: list[int]) -> None:
        """New chunks are here."""
        served.have |= mask_of(indexes)
        if served.reveal is not None:
            served.reveal.available = served.have
            self._show_more(served)
        for peer in self.links:
            # Whoever downloads wants to know what it can get; an origin, what need not come from it.
            if peer.origin or (served.reveal is None and peer.wants(served.checkpoint)):
                peer.link.announce(served.checkpoint, indexes)

    def _show_more(self, served: Served) -> None:
        if served.reveal is None:
            return
        news = served.reveal.advance(trio.current_time(), self._uploads.holds_slot)
        for peer_id, indexes in news.items():
            if peer_id in self.links.by_id:
                self.links.by_id[peer_id].link.send(Have(served.checkpoint, indexes))

    def on_link(self, peer: RemotePeer) -> None:
        """A link is there."""
        for served in self.versions.values():
            if served.fetch is not None:
                self.tell_want(served, peer)

    def on_link_lost(self, peer: RemotePeer) -> None:
        """A link is gone."""
        self._uploads.release(peer.peer_id)
        for served in self.versions.values():
            if served.reveal is not None:
                served.reveal.remove(peer.peer_id)
            if served.fetch is not None:
                served.fetch.remove(peer.peer_id)

    def on_want(self, peer: RemotePeer, want: Want) -> None:
        """A peer downloads a version."""
        peer.note_want(want.c)
        peer.note_offer(want.c, unpack_bits(want.bits))
        served = self.versions.get(want.c)
        if served is not None:
            self._greet_downloader(served, peer)

    def on_done(self, peer: RemotePeer, done: Done) -> None:
        """A peer downloads a version no more."""
        served = self.versions.get(done.c)
        if done.complete and served is not None:
            if served.reveal is not None:
                served.reveal.update(peer.peer_id, served.everything, trio.current_time())
            if not peer.origin:
                peer.note_offer(done.c, served.everything)
                self._track_known(peer, done.c)
        elif not done.complete and served is not None and served.reveal is not None:
            served.reveal.remove(peer.peer_id)
        if not peer.note_done(done.c):
            self._uploads.release(peer.peer_id)

    def on_offer(self, peer: RemotePeer, frame: Bitfield | Have) -> None:
        """A peer offers chunks."""
        if isinstance(frame, Have):
            peer.note_offer(frame.c, peer.offered(frame.c) | mask_of(frame.indexes))
        else:
            peer.note_offer(frame.c, unpack_bits(frame.bits))
        self._track_known(peer, frame.c)

    def _track_known(self, peer: RemotePeer, checkpoint: bytes) -> None:
        served = self.versions.get(checkpoint)
        if served is not None:
            self._track(served, peer)
            self._show_more(served)

    def _track(self, served: Served, peer: RemotePeer) -> None:
        """Use what a peer has said of a version.

        A downloader, and any peer that is no origin, states what it has; an origin that does not
        download states what it shows us, and that says nothing of what the others can get.
        """
        offered = peer.offered(served.checkpoint)
        if served.reveal is not None and (peer.wants(served.checkpoint) or not peer.origin):
            served.reveal.update(peer.peer_id, offered, trio.current_time())
        if served.fetch is not None:
            served.fetch.offer(peer)
