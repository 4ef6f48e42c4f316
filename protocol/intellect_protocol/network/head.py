"""The head of the run: which policy version is newest, learnt from anybody and believed from two.

Gossip is a hint and peers may lie or lag, so an announcement counts only if the run's publisher
signed it and the ledger recorded the same checkpoint hash for that version (first write wins
there). Whoever missed the gossip finds out by asking peers every `head_poll_s`; somebody who lost
every peer still sees the newest version in the ledger once it can ask for the manifest again.
"""

from __future__ import annotations

import logging
import random
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import trio

from ..checkpoint import Manifest, ManifestLimits, SignedManifest, checkpoint_hash, verify_manifest
from ..errors import IntellectError, ManifestError, RefusedError, UnreachableError, WireError
from ..keys import Signer, announcement_digest
from ..messages import Announcement, GetHead, GetHeadResult, GetManifest, GetManifestResult
from ..wire import decode_canonical, encode
from .gossip import checkpoints_topic
from .rpc_server import Call, Reply

if TYPE_CHECKING:
    from ..chunk_store import ChunkStore
    from ..ledger.client import Ledger
    from ..ledger.records import RecordedCheckpoint
    from ..run import RunConfig
    from .host import Host

_PEERS_PER_POLL = 2
_UNKNOWN_POLL_S = 2.0
_MANIFESTS_KEPT = 16
_RECORDS_KEPT = 1024
_ASK_S = 3.0
_MAX_VERSION = 1 << 40
_MANIFEST_LIMITS = ManifestLimits(max_checkpoint_bytes=1 << 40)

logger = logging.getLogger(__name__)


class HeadTracker:
    """Follows the newest version, and answers for it."""

    def __init__(
        self, host: Host, ledger: Ledger, config: RunConfig, store: ChunkStore | None = None
    ) -> None:
        self._host = host
        self._ledger = ledger
        self._config = config
        self._store = store
        self._records: OrderedDict[int, RecordedCheckpoint] = OrderedDict()
        self._manifests: OrderedDict[bytes, SignedManifest] = OrderedDict()
        self._changed = trio.Event()
        self.head: Announcement | None = None
        host.server.register(GetHead, self._answer_head)
        host.server.register(GetManifest, self._answer_manifest)

    # --- following ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Listen and poll until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen)
            nursery.start_soon(self._poll)

    async def _listen(self) -> None:
        topic = checkpoints_topic(self._config.run_id)
        async for message in self._host.gossip.subscribe(topic, self._is_announcement):
            await self._consider(decode_canonical(message, Announcement))

    def _is_announcement(self, message: bytes) -> bool:
        try:
            announcement = decode_canonical(message, Announcement)
        except WireError:
            return False
        return self._is_ours(announcement)

    def _is_ours(self, announcement: Announcement) -> bool:
        return (
            announcement.run_id == self._config.run_id
            and 0 <= announcement.version < _MAX_VERSION
            and announcement.is_signed_by(self._config.terms.keys.publisher)
        )

    async def _poll(self) -> None:
        while True:
            peers = [peer.peer_id for peer in self._host.peers()]
            random.shuffle(peers)
            async with trio.open_nursery() as nursery:
                for peer_id in peers[:_PEERS_PER_POLL]:
                    nursery.start_soon(self._ask_head, peer_id)
            pause_s = self._config.revision.head_poll_s
            if self.head is None:  # a newcomer should not wait for a whole interval
                pause_s = min(pause_s, _UNKNOWN_POLL_S)
            await trio.sleep(pause_s * random.uniform(0.75, 1.25))

    async def _ask_head(self, peer_id: bytes) -> None:
        try:
            answer, _ = await self._host.client.call(peer_id, GetHead(), GetHeadResult, deadline_s=_ASK_S)
        except IntellectError as error:
            logger.debug("asking for the head: %s", error)
            return
        if answer.announcement is not None and self._is_ours(answer.announcement):
            await self._consider(answer.announcement)

    async def _consider(self, announcement: Announcement) -> None:
        if self.head is not None and announcement.version <= self.head.version:
            return
        try:
            recorded = await self.recorded(announcement.version)
        except IntellectError as error:
            logger.info("cannot check version %d on the ledger now: %s", announcement.version, error)
            return
        if recorded is None or recorded.checkpoint_hash != announcement.checkpoint_hash:
            logger.warning("version %d is announced but not on the ledger", announcement.version)
            return
        self._set_head(announcement)

    def _set_head(self, announcement: Announcement) -> None:
        if self.head is None or announcement.version > self.head.version:
            self.head = announcement
            self._changed.set()
            self._changed = trio.Event()

    async def wait_newer_than(self, version: int) -> Announcement:
        """The head, once it is newer than `version` (-1: any)."""
        while self.head is None or self.head.version <= version:
            await self._changed.wait()
        return self.head

    # --- what the ledger and the manifests say ----------------------------------------------------

    async def recorded(self, version: int) -> RecordedCheckpoint | None:
        """What the ledger recorded for a version (C and the hash B of its block), or None.

        Raises:
            UnreachableError: no chain RPC answers.
            LedgerError: the chain answered something malformed.
        """
        found = self._records.get(version)
        if found is None:
            found = await self._ledger.checkpoint(self._config.run_id, version)
            if found is not None:
                self._records[version] = found
                while len(self._records) > _RECORDS_KEPT:
                    self._records.popitem(last=False)
        return found

    async def manifest(
        self, checkpoint: bytes, *, deadline_s: float = 20.0
    ) -> tuple[SignedManifest, Manifest]:
        """The verified manifest with hash `checkpoint`, from our store or from peers.

        Raises:
            UnreachableError: nobody who answers has it.
        """
        signed = self._known_manifest(checkpoint)
        if signed is not None:
            return signed, self._verified(signed, checkpoint)
        with trio.move_on_after(deadline_s):
            while True:
                for peer_id in self._peers_to_ask():
                    try:
                        return await self._ask_manifest(peer_id, checkpoint)
                    except IntellectError as error:
                        logger.debug("asking for a manifest: %s", error)
                await self._host.discovery.find_providers(checkpoint, 2.0)
                await trio.sleep(0.2)
        raise UnreachableError(f"no peer has the manifest {checkpoint.hex()[:16]}")

    def _peers_to_ask(self) -> list[bytes]:
        """Connected peers, those that publish first."""
        rows = sorted(self._host.peers(), key=lambda row: (row.role != "seeder", random.random()))
        return [row.peer_id for row in rows]

    async def _ask_manifest(self, peer_id: bytes, checkpoint: bytes) -> tuple[SignedManifest, Manifest]:
        answer, _ = await self._host.client.call(
            peer_id, GetManifest(checkpoint_hash=checkpoint), GetManifestResult, deadline_s=_ASK_S
        )
        signed = SignedManifest(manifest=answer.manifest, signature=answer.signature)
        manifest = self._verified(signed, checkpoint)
        self._keep(checkpoint, signed)
        return signed, manifest

    def _verified(self, signed: SignedManifest, checkpoint: bytes) -> Manifest:
        if checkpoint_hash(signed.manifest) != checkpoint:
            raise ManifestError("another manifest than the one asked for")
        return verify_manifest(
            signed, self._config.run_id, self._config.terms.keys.publisher, _MANIFEST_LIMITS
        )

    def _known_manifest(self, checkpoint: bytes) -> SignedManifest | None:
        found = self._manifests.get(checkpoint)
        if found is None and self._store is not None:
            found = self._store.signed_manifest(checkpoint)
        return found

    def _keep(self, checkpoint: bytes, signed: SignedManifest) -> None:
        self._manifests[checkpoint] = signed
        while len(self._manifests) > _MANIFESTS_KEPT:
            self._manifests.popitem(last=False)

    # --- publishing and answering -----------------------------------------------------------------

    async def announce(self, signed: SignedManifest, version: int, publisher: Signer) -> None:
        """Tell the run about a version that is recorded on the ledger and ready to be served."""
        checkpoint = checkpoint_hash(signed.manifest)
        size = len(signed.manifest)
        announcement = Announcement(
            run_id=self._config.run_id,
            version=version,
            checkpoint_hash=checkpoint,
            manifest_bytes=size,
            signature=publisher.sign_digest(
                announcement_digest(self._config.run_id, version, checkpoint, size)
            ),
        )
        self._keep(checkpoint, signed)
        self._set_head(announcement)
        await self._host.gossip.publish(checkpoints_topic(self._config.run_id), encode(announcement))

    async def _answer_head(self, call: Call[GetHead]) -> Reply:
        return Reply(GetHeadResult(announcement=self.head, clock_ms=int(time.time() * 1000)))

    async def _answer_manifest(self, call: Call[GetManifest]) -> Reply:
        signed = self._known_manifest(call.payload.checkpoint_hash)
        if signed is None:
            raise RefusedError("unknown_manifest", "this peer does not have that manifest")
        return Reply(GetManifestResult(manifest=signed.manifest, signature=signed.signature))
