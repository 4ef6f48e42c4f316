"""A role's copy of the policy: versions fetched chunk by chunk from peers, verified, on disk, re-served."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from ..checkpoint import SignedManifest, checkpoint_hash, verify_folder
from ..chunk_store import ChunkStore
from ..errors import ManifestError, PreflightError
from .chunk_config import ChunkConfig
from .chunks import ChunkService, open_chunk_service

if TYPE_CHECKING:
    from ..run import RunConfig
    from .head import HeadTracker
    from .host import Host

DEFAULT_QUOTA_BYTES = 64 << 30
_PIN_OWNER = "policy"


class PolicyWeights:
    """Obtains versions by number; made by `open_swarm`.

    Attributes:
        bytes_from_origin: verified bytes received from the run's seeder or coordinator.
        bytes_from_peers: verified bytes received from everybody else.
    """

    heads: HeadTracker
    chunks: ChunkService

    def __init__(
        self,
        host: Host,
        data_dir: Path,
        config: RunConfig,
        *,
        origin: bool,
        chunk_config: ChunkConfig,
        quota_bytes: int = DEFAULT_QUOTA_BYTES,
    ) -> None:
        self._host = host
        self._config = config
        self._origin = origin
        self._chunk_config = chunk_config
        self._folder = data_dir / "policies"
        self._locks: dict[int, trio.Lock] = {}
        self._obtained: dict[int, bytes] = {}
        self._origins: set[bytes] = set()
        self.store = ChunkStore(data_dir / "chunks", quota_bytes=quota_bytes)
        self.bytes_from_origin = 0
        self.bytes_from_peers = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve chunks inside this block.

        Raises:
            PreflightError: the data plane cannot listen.
        """
        async with open_chunk_service(
            self._host,
            self.store,
            run_id=self._config.run_id,
            config=self._chunk_config,
            origin=self._origin,
            discovery=self._host.discovery,
        ) as self.chunks:
            yield

    def folder(self, version: int) -> Path:
        """Where a version's files are, once it was obtained."""
        return self._folder / f"v{version:08d}"

    async def obtain(self, version: int) -> Path:
        """The folder of a verified version, fetched from peers as far as it is not here.

        Raises:
            ManifestError: the ledger does not know the version, or what came does not verify.
            UnreachableError: nobody who answers has it, or the chain does not answer.
            PreflightError: disk or quota have no room.
        """
        async with self._locks.setdefault(version, trio.Lock()):
            if version in self._obtained:
                return self.folder(version)
            recorded = await self.heads.recorded(version)
            if recorded is None:
                raise ManifestError(f"version {version} is not on the ledger")
            signed, manifest = await self.heads.manifest(recorded.checkpoint_hash)
            if manifest.version != version:
                raise ManifestError(f"the manifest recorded for version {version} says {manifest.version}")
            report = await self.chunks.fetch(signed)
            self._count(report.bytes_from.items())
            folder = self.folder(version)
            await trio.to_thread.run_sync(self.store.assemble, manifest, folder)
            self._obtained[version] = recorded.checkpoint_hash
            self.store.pin(recorded.checkpoint_hash, _PIN_OWNER)
            return folder

    async def publish(self, signed: SignedManifest, folder: Path) -> None:
        """The seeder's way: take a checkpoint from its folder and serve it.

        Raises:
            ManifestError: the folder does not hold what the manifest says.
            PreflightError: disk or quota have no room.
        """
        hold = await trio.to_thread.run_sync(self.store.admit, signed)
        try:
            manifest = self.store.manifest(checkpoint_hash(signed.manifest))
            await trio.to_thread.run_sync(verify_folder, folder, manifest)
            await trio.to_thread.run_sync(self.store.import_folder, folder, manifest)
            await self.chunks.publish(signed)
        finally:
            hold.release()

    def retain(self, versions: Iterable[int]) -> None:
        """Keep the files of these versions and no others; chunks go when the store needs the room."""
        keep = set(versions)
        for version in set(self._obtained) - keep:
            self.store.unpin(self._obtained.pop(version), _PIN_OWNER)
        names = {self.folder(version).name for version in keep}
        try:
            present = list(self._folder.iterdir()) if self._folder.is_dir() else []
            for path in present:
                locked = any(lock.locked() and self.folder(v) == path for v, lock in self._locks.items())
                if path.name not in names and path.name.startswith("v") and not locked:
                    shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            raise PreflightError(f"{self._folder}: {error.strerror or error}") from error

    def _count(self, received: Iterable[tuple[bytes, int]]) -> None:
        keys = self._config.terms.keys
        for peer in self._host.peers():
            if peer.node in (keys.publisher, keys.coordinator):
                self._origins.add(peer.peer_id)
        for peer_id, size in received:
            if peer_id in self._origins:
                self.bytes_from_origin += size
            else:
                self.bytes_from_peers += size
