"""Downloading one version from many peers at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from random import Random

import msgspec
import trio

from ..checkpoint import Manifest
from ..chunk_store import ChunkStore
from ..errors import DeadlineError, IntellectError, ManifestError, RefusedError, UnreachableError
from ..keys import peer_id_text
from .chunk_peer import RemotePeer
from .chunk_selection import Selection, Source, mask_of

logger = logging.getLogger(__name__)

_TICK_S = 0.05
_MIN_PATIENCE_S = 0.25  # before a chunk is asked of a second peer


class Progress(msgspec.Struct, frozen=True):
    """How far a download is; `bytes_from` counts verified bytes by peer id."""

    version: int
    chunks_done: int
    chunks: int
    bytes_from: Mapping[bytes, int]


class VersionFetch:
    """One download; the service tells it what peers offer and runs it.

    Args:
        checkpoint: hash C of the version.
        missing: indexes of the chunks to fetch; a chunk that occurs twice is fetched once.
        peers: linked peers by id, kept current by the service.
        on_verified: called with the indexes a new chunk stands for, the peer and the size in bytes.
        stalled_s: seconds without a new chunk after which `run` gives up.
    """

    def __init__(
        self,
        checkpoint: bytes,
        manifest: Manifest,
        missing: list[int],
        store: ChunkStore,
        peers: Mapping[bytes, RemotePeer],
        *,
        random: Random,
        limiter: trio.CapacityLimiter,
        requests_per_peer: int,
        stalled_s: float,
        on_verified: Callable[[list[int], bytes, int], None],
    ) -> None:
        self.checkpoint = checkpoint
        self.manifest = manifest
        self.bytes_from: dict[bytes, int] = {}
        self._store = store
        self._peers = peers
        self._random = random
        self._limiter = limiter
        self._requests_per_peer = requests_per_peer
        self._stalled_s = stalled_s
        self._on_verified = on_verified
        # A chunk that occurs at several indexes is fetched for all of them at the first.
        self._twins: dict[bytes, list[int]] = {}
        for index in missing:
            self._twins.setdefault(manifest.chunks[index], []).append(index)
        self._repeated = [twins for twins in self._twins.values() if len(twins) > 1]
        wanted = mask_of(twins[0] for twins in self._twins.values())
        self._selection = Selection(len(manifest.chunks), wanted, random)
        self._sources: dict[bytes, Source] = {}
        self._scopes: dict[tuple[bytes, int], trio.CancelScope] = {}
        self._typical_s = 0.05  # of a request
        self._wake = trio.Event()
        self._error: IntellectError | None = None

    def offer(self, peer: RemotePeer) -> None:
        """Take note of what `peer` offers now."""
        source = self._sources.get(peer.peer_id)
        if source is None:
            source = Source(self.manifest.chunk_size, self._requests_per_peer)
            self._sources[peer.peer_id] = source
        if not source.left:
            mask = peer.offered(self.checkpoint)
            for twins in self._repeated:
                if mask & mask_of(twins):
                    mask |= 1 << twins[0]
            self._selection.offer(peer.peer_id, mask)
        self._wake.set()

    def remove(self, peer_id: bytes) -> None:
        """The link to a peer is gone; what it did for this version is remembered."""
        if self._selection.offered(peer_id):
            self._selection.offer(peer_id, 0)
        self._wake.set()

    def wake(self) -> None:
        """Something changed, for example a ticket came."""
        self._wake.set()

    def banned(self) -> list[bytes]:
        """Peers that sent bad chunks too often."""
        return [peer for peer, source in self._sources.items() if source.banned]

    async def run(self) -> None:
        """Fetch until nothing is missing.

        Raises:
            DeadlineError: no chunk came for `stalled_s`.
            PreflightError: the disk refused.
        """
        count_before, progress_at = -1, trio.current_time()
        async with trio.open_nursery() as nursery:
            while self._selection.missing and self._error is None:
                self._wake = trio.Event()
                now = trio.current_time()
                self._start_requests(nursery, now)
                with trio.move_on_after(_TICK_S):
                    await self._wake.wait()
                count = self._selection.missing.bit_count()
                if count != count_before:
                    count_before, progress_at = count, now
                elif now - progress_at > self._stalled_s:
                    self._error = DeadlineError(
                        f"version {self.manifest.version}: {count} of {len(self.manifest.chunks)} chunks are "
                        f"missing and none came for {self._stalled_s:g} s"
                    )
            nursery.cancel_scope.cancel()
        if self._error is not None:
            raise self._error

    def _start_requests(self, nursery: trio.Nursery, now: float) -> None:
        patience_s = max(_MIN_PATIENCE_S, 4 * self._typical_s)
        ready = []
        delivered_by_peers = 0
        for peer_id, source in self._sources.items():
            peer = self._peers.get(peer_id)
            if peer is None or source.left:
                continue
            # Asked for even where nothing is on offer yet: an origin shows chunks to slot holders only.
            if not peer.has_slot(now):
                continue
            allowed = peer.max_requests(source.room(now) + source.outstanding)
            offered = self._selection.missing & self._selection.offered(peer_id)
            if not peer.origin and source.delivers(now, patience_s):
                delivered_by_peers |= offered
            if offered and source.outstanding < allowed:
                ready.append((peer, source, allowed))
        self._random.shuffle(ready)
        ready.sort(key=lambda entry: (entry[0].origin, entry[1].outstanding))
        while ready:
            # One request each in turn, so that the load is spread over the donors.
            still = []
            for peer, source, allowed in ready:
                avoid = delivered_by_peers if peer.origin else 0
                index = self._selection.take(peer.peer_id, now=now, patience_s=patience_s, avoid=avoid)
                if index is None:
                    continue
                source.asked(now)
                scope = self._scopes[peer.peer_id, index] = trio.CancelScope()
                nursery.start_soon(self._request, peer, source, index, scope, now)
                if source.outstanding < allowed:
                    still.append((peer, source, allowed))
            ready = still

    async def _request(
        self, peer: RemotePeer, source: Source, index: int, scope: trio.CancelScope, started: float
    ) -> None:
        try:
            with scope:
                await self._fetch_and_store(peer, index)
                seconds = trio.current_time() - started
                source.delivered(self.manifest.chunk_length(index), seconds)
                self._typical_s += 0.2 * (seconds - self._typical_s)
                self._verified(peer.peer_id, index)
        except ManifestError as error:
            source.bad_chunks += 1
            logger.warning("peer %s sent a bad chunk: %s", peer_id_text(peer.peer_id), error)
        except RefusedError as error:
            source.paused_until = trio.current_time() + (error.retry_after_s or 0.0)
            if error.code == "gone":
                self._selection.withdraw(peer.peer_id, index)
                peer.note_offer(self.checkpoint, peer.offered(self.checkpoint) & ~(1 << index))
        except UnreachableError as error:
            source.failed(trio.current_time())
            logger.debug("peer %s: %s", peer_id_text(peer.peer_id), error)
        except IntellectError as error:
            self._error = error
        finally:
            source.answered(started)
            del self._scopes[peer.peer_id, index]
            self._selection.release(peer.peer_id, index)
            if source.left:
                self._selection.offer(peer.peer_id, 0)
            self._wake.set()

    async def _fetch_and_store(self, peer: RemotePeer, index: int) -> None:
        digest, size = self.manifest.chunks[index], self.manifest.chunk_length(index)
        data = await peer.fetch(self.checkpoint, index, digest, size, self._limiter)
        # Not abandoned on cancellation: a chunk on its way to the disk gets there.
        await trio.to_thread.run_sync(self._store.put, digest, data)

    def _verified(self, peer_id: bytes, index: int) -> None:
        if not self._selection.missing >> index & 1:
            return
        for other in self._selection.verified(index):
            if other != peer_id:
                self._scopes[other, index].cancel()
        size = self.manifest.chunk_length(index)
        self.bytes_from[peer_id] = self.bytes_from.get(peer_id, 0) + size
        self._on_verified(self._twins[self.manifest.chunks[index]], peer_id, size)
