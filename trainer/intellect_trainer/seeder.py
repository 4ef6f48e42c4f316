"""The seeder: a process of its own between the trainer's checkpoint folder and the swarm.

For each new manifest on disk: check it, take the checkpoint into the chunk store and serve it, record its
hash C on the ledger with the publisher's key, and only then announce it. So an announced version is always
recorded, and a recorded version can always be fetched.

The ledger keeps the first hash recorded for a version. The trainer never writes a manifest twice, so a
version that is recorded with another hash than its manifest means that this folder is not the run's: the
seeder says so and ends, it never announces such a version. What was recorded before a crash is found on
the ledger, published again and announced again; nothing else needs to be remembered.

Only the newest manifest is worked on. A version that was overtaken before it could be recorded (the chain
was down, say) is left out: nobody ever worked on it, and the ledger takes versions in ascending order.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import trio

from intellect_protocol.checkpoint import (
    ManifestLimits,
    SignedManifest,
    checkpoint_hash,
    verify_manifest,
)
from intellect_protocol.errors import LedgerError, ManifestError, PreflightError, UnreachableError, WireError
from intellect_protocol.file_lock import try_lock
from intellect_protocol.keys import PeerKey, Signer
from intellect_protocol.ledger.records import RecordedCheckpoint
from intellect_protocol.run import RunConfig
from intellect_protocol.wire import decode

from .files import write_json_atomically
from .layout import MAX_CHECKPOINT_BYTES, checkpoint_folder, manifest_path, published_versions

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 0.2
_RETRY_S = 2.0
_STATUS_INTERVAL_S = 1.0
_MAX_MANIFEST_BYTES = 64 << 20


class CheckpointLedger(Protocol):
    """What the seeder needs of `ledger.Ledger`."""

    async def checkpoint(self, run_id: bytes, version: int) -> RecordedCheckpoint | None: ...

    async def record_checkpoint(
        self, publisher: Signer, run_id: bytes, version: int, checkpoint_hash: bytes
    ) -> object: ...


class Weights(Protocol):
    """What the seeder needs of `network.policy.PolicyWeights`."""

    async def publish(self, signed: SignedManifest, folder: Path) -> None: ...


class Heads(Protocol):
    """What the seeder needs of `network.head.HeadTracker`."""

    async def announce(self, signed: SignedManifest, version: int, publisher: Signer) -> None: ...


@dataclass(frozen=True)
class SeedOptions:
    """What `intellect-trainer seed` was asked to do; `checkpoints` is the trainer's folder."""

    run: RunConfig
    data_dir: Path
    checkpoints: Path
    signer: Signer
    listen: tuple[str, ...]


class Seeder:
    """Publishes the newest checkpoint of a folder, again and again."""

    def __init__(
        self,
        run: RunConfig,
        checkpoints: Path,
        signer: Signer,
        *,
        ledger: CheckpointLedger,
        weights: Weights,
        heads: Heads,
    ) -> None:
        self._run = run
        self._checkpoints = checkpoints
        self._signer = signer
        self._ledger = ledger
        self._weights = weights
        self._heads = heads
        self.version = -1  # announced last; -1: none yet
        self.activity = "waiting for the first checkpoint"

    async def run(self) -> None:
        """Publish until cancelled.

        Raises:
            LedgerError: a version is recorded with another hash, or the contract refuses to record it.
            ManifestError: a manifest does not verify.
        """
        while True:
            try:
                published = await self.publish_newest()
            except UnreachableError as error:
                self.activity = f"waiting for the chain: {error}"
                logger.warning("%s", self.activity)
                await trio.sleep(_RETRY_S)
                continue
            if not published:
                await trio.sleep(_WATCH_INTERVAL_S)

    async def publish_newest(self) -> bool:
        """Record and announce the newest manifest on disk; False if it was announced already.

        Raises:
            UnreachableError: the chain does not answer.
            LedgerError, ManifestError: see `run`.
        """
        versions = await trio.to_thread.run_sync(published_versions, self._checkpoints)
        if not versions or versions[-1] <= self.version:
            return False
        version = versions[-1]
        signed = await trio.to_thread.run_sync(self._read, version)
        self.activity = f"publishing version {version}"
        await self._check_recorded(version, checkpoint_hash(signed.manifest))
        try:
            await self._weights.publish(signed, checkpoint_folder(self._checkpoints, version))
        except ManifestError:
            # The trainer prunes old folders; a newer version is there then.
            if await trio.to_thread.run_sync(published_versions, self._checkpoints) == versions:
                raise
            return True
        await self._record(version, checkpoint_hash(signed.manifest))
        await self._heads.announce(signed, version, self._signer)
        self.version = version
        self.activity = f"serving version {version}"
        logger.info("version %d is recorded and announced", version)
        return True

    def _read(self, version: int) -> SignedManifest:
        path = manifest_path(self._checkpoints, version)
        try:
            signed = decode(path.read_bytes(), SignedManifest, max_bytes=_MAX_MANIFEST_BYTES)
        except (OSError, WireError) as error:
            raise ManifestError(f"{path}: {error}") from error
        limits = ManifestLimits(max_checkpoint_bytes=MAX_CHECKPOINT_BYTES)
        manifest = verify_manifest(signed, self._run.run_id, self._run.terms.keys.publisher, limits)
        if manifest.version != version:
            raise ManifestError(f"{path} is the manifest of version {manifest.version}")
        return signed

    async def _check_recorded(self, version: int, checkpoint: bytes) -> bool:
        recorded = await self._ledger.checkpoint(self._run.run_id, version)
        if recorded is None:
            return False
        if recorded.checkpoint_hash != checkpoint:
            raise LedgerError(
                f"version {version} is recorded with hash {recorded.checkpoint_hash.hex()[:16]}, here it has "
                f"{checkpoint.hex()[:16]}: {self._checkpoints} is not this run's"
            )
        return True

    async def _record(self, version: int, checkpoint: bytes) -> None:
        if await self._check_recorded(version, checkpoint):
            return
        try:
            await self._ledger.record_checkpoint(self._signer, self._run.run_id, version, checkpoint)
        except LedgerError:
            # Refused: because it is there already, perhaps by a transaction sent before a crash.
            if not await self._check_recorded(version, checkpoint):
                raise


async def seed(options: SeedOptions) -> None:
    """Join the swarm and publish until cancelled.

    Raises:
        PreflightError: the data directory is in use, or a port is.
        UnreachableError: no bootstrap peer answers.
        LedgerError, ManifestError: see `Seeder.run`.
    """
    from intellect_protocol.network.swarm import SwarmOptions, open_swarm

    try:
        options.data_dir.mkdir(parents=True, exist_ok=True)
        lock = try_lock(options.data_dir / "lock")
    except OSError as error:
        raise PreflightError(f"{options.data_dir}: {error.strerror or error}") from error
    if lock is None:
        raise PreflightError(f"{options.data_dir} is in use by another seeder")
    swarm_options = SwarmOptions(
        role="seeder",
        data_dir=options.data_dir,
        config=options.run,
        peer_key=PeerKey.load_or_create(options.data_dir / "peer.key"),
        signer=options.signer,
        listen=list(options.listen),
        weights=True,
    )
    with lock:
        async with open_swarm(swarm_options) as swarm, trio.open_nursery() as nursery:
            assert swarm.policies is not None
            seeder = Seeder(
                options.run,
                options.checkpoints,
                options.signer,
                ledger=swarm.ledger,
                weights=swarm.policies,
                heads=swarm.heads,
            )
            nursery.start_soon(seeder.run)
            nursery.start_soon(_keep_status, seeder, options.data_dir / "status.json")


async def _keep_status(seeder: Seeder, path: Path) -> None:
    while True:
        status = {"role": "seeder", "state": seeder.activity, "version": seeder.version}
        await trio.to_thread.run_sync(partial(write_json_atomically, path, status, durable=False))
        await trio.sleep(_STATUS_INTERVAL_S)
