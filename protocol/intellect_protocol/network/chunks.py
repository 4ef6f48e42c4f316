"""The chunk exchange: one service per process that serves and downloads versions.

    async with open_chunk_service(host, store, run_id=run_id, discovery=host.discovery) as chunks:
        await chunks.publish(signed)                    # the seeder: everything is in the store
        report = await chunks.fetch(signed, providers)  # a node: returns when all is verified
        store.assemble(report.manifest, folder)

A version is served from the moment its first chunk is verified. Links to peers (the control
streams) stay open between versions, so that a new one needs no dialling. What peers say is kept per
link and forgotten with it; what they deliver is checked against the signed manifest alone.

Whom to ask is found in four ways: peers named by the caller, peers the host is connected to, the
DHT (records under C), and peers that linked peers name (`Peers`).
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

import msgspec
import trio

from ..checkpoint import Manifest, SignedManifest, checkpoint_hash
from ..chunk_store import ChunkStore
from ..errors import IntellectError, ManifestError, PreflightError, RefusedError, UsageError
from ..file_lock import FileLock
from .addresses import PeerAddress, parse_address
from .chunk_catalogue import Catalogue, Served
from .chunk_config import ChunkConfig, ChunkHost, Providers
from .chunk_frames import (
    Ask,
    Bitfield,
    Busy,
    Data,
    Done,
    Frame,
    Have,
    Hello,
    Peers,
    Refuse,
    Request,
    Ticket,
    Want,
)
from .chunk_links import LinkTable
from .chunk_peer import RemotePeer
from .chunk_selection import indexes_of, mask_of
from .chunk_slots import Reveal
from .chunk_uploads import Uploads
from .fetch import Progress, VersionFetch

logger = logging.getLogger(__name__)

_FIND_DEADLINE_S = 5.0
_TICK_S = 0.2


class FetchReport(msgspec.Struct, frozen=True):
    """A finished download: verified bytes by peer id, and the peers banned for bad chunks."""

    checkpoint: bytes
    manifest: Manifest
    seconds: float
    bytes_from: Mapping[bytes, int]
    banned: list[bytes]


class ChunkService:
    """Serves and downloads versions of one run; made by `open_chunk_service`.

    Attributes:
        bytes_from: verified chunk bytes received, by peer id.
        bytes_to: chunk bytes sent, by peer id.
    """

    def __init__(
        self,
        host: ChunkHost,
        store: ChunkStore,
        run_id: bytes,
        config: ChunkConfig,
        origin: bool,
        discovery: Providers | None,
        rng: random.Random,
    ) -> None:
        self.bytes_from: dict[bytes, int] = {}
        self.uploads = Uploads(store, run_id, config)
        self.bytes_to = self.uploads.bytes_to
        self._host = host
        self._store = store
        self._config = config
        self._origin = origin
        self._discovery = discovery
        self._random = rng
        self._catalogue = Catalogue(host, self.uploads, rng)
        self._links = LinkTable(
            host,
            config,
            Hello(run_id, origin),
            on_up=self._catalogue.on_link,
            on_down=self._catalogue.on_link_lost,
            on_frame=self._on_frame,
        )
        self._catalogue.links = self._links
        self._versions = self._catalogue.versions
        self._limiter = trio.CapacityLimiter(config.downloads)
        self._nursery: trio.Nursery

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve inside this block."""
        async with self.uploads.running(), trio.open_nursery() as nursery:
            self._nursery = nursery
            self._links.serve(nursery)
            nursery.start_soon(self._tick)
            try:
                yield
            finally:
                nursery.cancel_scope.cancel()
                for served in self._versions.values():
                    served.hold.release()

    def linked_peers(self) -> list[bytes]:
        """Peers with a control stream to us."""
        return list(self._links.by_id)

    def served_versions(self) -> list[bytes]:
        """Hashes C of the versions that are served or being downloaded."""
        return list(self._versions)

    async def publish(self, signed: SignedManifest) -> bytes:
        """Serve a version all of whose chunks are in the store. Returns C.

        Raises:
            ManifestError: chunks are missing.
            PreflightError: the store has no room for it.
        """
        served = await self._open_version(signed)
        if served.have != served.everything:
            if served.fetch is None:
                self.withdraw(served.checkpoint)
            raise ManifestError(f"version {served.manifest.version} is not complete in the store")
        self._provide(served)
        return served.checkpoint

    async def fetch(
        self,
        signed: SignedManifest,
        providers: Iterable[PeerAddress] = (),
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> FetchReport:
        """Download a version whose manifest is verified, and go on serving it.

        What is in the store already is not fetched again. Cancel it to give up earlier than
        `stalled_s`; what has arrived stays.

        Args:
            providers: peers to try besides those that are found.

        Raises:
            DeadlineError: nobody delivered a chunk for `stalled_s`.
            PreflightError: disk or quota have no room.
            RefusedError: the same version is being fetched already.
        """
        started = trio.current_time()
        served = await self._open_version(signed)
        manifest = served.manifest
        if served.fetch is not None:
            raise RefusedError("busy", f"version {manifest.version} is being fetched already")

        def verified(indexes: list[int], peer: bytes, size: int) -> None:
            self.bytes_from[peer] = self.bytes_from.get(peer, 0) + size
            self._catalogue.gained(served, indexes)
            if not served.provided:
                self._provide(served)
            done = served.have.bit_count()
            on_progress(Progress(manifest.version, done, len(manifest.chunks), dict(fetch.bytes_from)))

        fetch = served.fetch = VersionFetch(
            served.checkpoint,
            manifest,
            indexes_of(served.everything & ~served.have),
            self._store,
            self._links.by_id,
            random=self._random,
            limiter=self._limiter,
            requests_per_peer=self._config.requests_per_peer,
            stalled_s=self._config.stalled_s,
            on_verified=verified,
        )
        try:
            for peer in self._links:
                self._catalogue.tell_want(served, peer)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._find_peers, served, list(providers))
                error = await _outcome(fetch.run)
                nursery.cancel_scope.cancel()
            if error is not None:
                raise error
        finally:
            served.fetch = None
            complete = served.have == served.everything
            idle = all(other.fetch is None for other in self._versions.values())
            for peer in self._links:
                peer.link.send(Done(served.checkpoint, complete))
                if idle:
                    peer.end_slot()
            if not complete:
                self.withdraw(served.checkpoint)
        self._provide(served)
        seconds = trio.current_time() - started
        return FetchReport(served.checkpoint, manifest, seconds, dict(fetch.bytes_from), fetch.banned())

    def withdraw(self, checkpoint: bytes) -> None:
        """Serve a version no more; its chunks stay until the store evicts them."""
        served = self._catalogue.remove(checkpoint)
        if served is None:
            return
        served.hold.release()
        if self._discovery is not None and served.provided:
            self._discovery.stop_providing(checkpoint)

    # Versions

    async def _open_version(self, signed: SignedManifest) -> Served:
        checkpoint = checkpoint_hash(signed.manifest)
        if checkpoint in self._versions:
            return self._versions[checkpoint]
        hold = await self._admit(signed)
        try:
            manifest = await trio.to_thread.run_sync(self._store.manifest, checkpoint)
            missing = mask_of(await trio.to_thread.run_sync(self._store.missing, manifest))
        except BaseException:
            hold.release()
            raise
        if checkpoint in self._versions:  # by another task, meanwhile
            hold.release()
            return self._versions[checkpoint]
        served = Served(checkpoint, manifest, hold)
        served.have = served.everything & ~missing
        if self._origin:
            # Long enough for a slow home link to fetch and announce its first chunks.
            lease_s = self._config.reveal_lease_s + Reveal.FIRST_WINDOW * manifest.chunk_size / (1 << 20)
            served.reveal = Reveal(len(manifest.chunks), lease_s, self._random)
            served.reveal.available = served.have
        self._catalogue.add(served)
        return served

    async def _admit(self, signed: SignedManifest) -> FileLock:
        """Admit a version to the store; older ones that are only served make room for it."""
        while True:
            try:
                return await trio.to_thread.run_sync(self._store.admit, signed)
            except PreflightError:
                idle = [served for served in self._versions.values() if served.fetch is None]
                if not idle:
                    raise
                self.withdraw(min(idle, key=lambda served: served.manifest.version).checkpoint)

    def _provide(self, served: Served) -> None:
        newest_first = sorted(
            (other for other in self._versions.values() if other.fetch is None),
            key=lambda other: -other.manifest.version,
        )
        for old in newest_first[self._store.retain :]:
            self.withdraw(old.checkpoint)
        if self._discovery is not None and not served.provided:
            served.provided = True
            self._nursery.start_soon(self._provide_in_dht, self._discovery, served)

    async def _provide_in_dht(self, discovery: Providers, served: Served) -> None:
        """Put our record into the DHT: an origin at once, others if the version lasts.

        A record costs dozens of streams; a version that is replaced within seconds reaches everybody
        over the links that exist, and newcomers ask for the newest one.
        """
        if not self._origin:
            await trio.sleep(self._config.provide_delay_s * self._random.uniform(1.0, 2.0))
            newest = max((other.manifest.version for other in self._versions.values()), default=-1)
            if served.checkpoint not in self._versions or served.manifest.version < newest:
                served.provided = False
                return
        try:
            await discovery.provide(served.checkpoint)
        except IntellectError as error:
            logger.debug("providing %s: %s", served.checkpoint.hex()[:16], error)

    async def _find_peers(self, served: Served, providers: list[PeerAddress]) -> None:
        """Link to more peers until cancelled; the DHT is asked at once if no linked peer offers anything."""
        first = True
        if self._links.by_id:
            await trio.sleep(_TICK_S)  # those linked since the last version usually have it
        while True:
            for where in providers:
                self._links.dial(where.peer_id, where)
            for row in self._host.peers():
                self._links.dial(row.peer_id)
            # Mostly the peers at hand are enough and the download is over before this look-up.
            first = False
            await trio.sleep(self._config.find_interval_s * self._random.uniform(0.5, 1.0))
            linked = any(peer.offered(served.checkpoint) for peer in self._links)
            if self._discovery is not None and not (first and linked):
                try:
                    found = await self._discovery.find_providers(served.checkpoint, _FIND_DEADLINE_S)
                except IntellectError as error:
                    logger.debug("looking for providers: %s", error)
                else:
                    for where in found:
                        self._links.dial(where.peer_id, where)

    async def _tick(self) -> None:
        while True:
            await trio.sleep(_TICK_S)
            self._catalogue.show_more()

    # What peers tell us

    def _on_frame(self, peer: RemotePeer, frame: Frame) -> None:
        now = trio.current_time()
        match frame:
            case Want():
                self._catalogue.on_want(peer, frame)
            case Bitfield() | Have():
                self._catalogue.on_offer(peer, frame)
            case Done():
                self._catalogue.on_done(peer, frame)
            case Ask():
                if self.uploads.on_ask(peer, self.bytes_from):
                    self._catalogue.show_more()
            case Ticket():
                peer.note_ticket(frame, now)
                for served in self._versions.values():
                    if served.fetch is not None:
                        served.fetch.wake()
            case Busy():
                peer.note_busy(frame, now)
            case Request():
                self._on_request(peer, frame)
            case Data():
                peer.note_data(frame)
            case Refuse():
                peer.note_refuse(frame)
            case Peers():
                self._on_peers(frame)

    def _on_request(self, peer: RemotePeer, request: Request) -> None:
        served = self._versions.get(request.c)
        digest = None
        if served is not None and served.have >> request.index & 1:
            digest = served.manifest.chunks[request.index]
        self.uploads.on_request(peer, request, digest)

    def _on_peers(self, frame: Peers) -> None:
        served = self._versions.get(frame.c)
        if served is None or served.fetch is None:
            return
        for text in frame.addresses:
            try:
                where = parse_address(text)
            except UsageError:
                continue
            self._links.dial(where.peer_id, where)


async def _outcome(work: Callable[[], Awaitable[None]]) -> IntellectError | None:
    """Run `work` and return its error: raised inside a nursery it would come out as a group."""
    try:
        await work()
    except IntellectError as error:
        return error
    return None


@asynccontextmanager
async def open_chunk_service(
    host: ChunkHost,
    store: ChunkStore,
    *,
    run_id: bytes,
    config: ChunkConfig | None = None,
    origin: bool = False,
    discovery: Providers | None = None,
    rng: random.Random | None = None,
) -> AsyncIterator[ChunkService]:
    """A running chunk service; leaving the block closes its links and its data plane.

    Args:
        origin: this is the run's seeder or coordinator: others take from it only what no other
            peer offers, and it shows each chunk to one of them at a time.
        discovery: DHT, to provide and to find versions under their hash.

    Raises:
        PreflightError: the data plane cannot listen.
    """
    service = ChunkService(
        host, store, run_id, config or ChunkConfig(), origin, discovery, rng or random.SystemRandom()
    )
    async with service.running():
        yield service
