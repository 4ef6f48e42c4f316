"""Chunks on disk, by content: what a peer holds of every version, shared by all its processes.

    chunks/ab/abcd...   one file per chunk, named by its BLAKE3 hash
    manifests/<C>       the signed manifest of each admitted version
    pins/<C>.<owner>    a version that must stay, across restarts
    holds/<C>           locked (shared) by each process that downloads, loads or serves the version
    lock                taken for admission and eviction, never while bytes move

A version is admitted before its first chunk is written: admission reserves its whole size under the
quota, evicting the oldest free versions if it must, so that no download can exceed the quota.
A chunk is written to a temporary file, checked against its hash and renamed into place: what has a
chunk's name was whole when it got there. `missing` and `assemble` hash it again, because disks and
power cuts do not keep promises. Everything needed after kill -9 is in these files alone.

Calls block on the disk; a trio program makes them in worker threads. All methods are thread-safe.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import msgspec
from blake3 import blake3

from .checkpoint import Manifest, SignedManifest, checkpoint_hash, read_chunks
from .checkpoint_folder import check_free_space, fsync_folder, write_folder
from .errors import ManifestError, PreflightError, WireError
from .file_lock import FileLock, lock, sweep_temporaries, temporary_sibling, try_lock
from .wire import decode, decode_canonical, encode

DEFAULT_RETAIN = 5
_LOCK_TIMEOUT_S = 30.0
_MAX_MANIFEST_FILE_BYTES = 64 << 20
_HEX = re.compile(r"[0-9a-f]{64}")
_OWNER = re.compile(r"[a-z0-9-]{1,64}")


class StoredVersion(msgspec.Struct, frozen=True):
    """An admitted version: its hash C and its manifest."""

    checkpoint: bytes
    manifest: Manifest


class ChunkStore:
    """The chunk store under `root`.

    Args:
        root: folder of the store, made if absent.
        quota_bytes: what all chunks together may take.
        retain: how many newest versions of a run `prune` keeps.
        fsync: also survive a power cut without fetching again (slower).

    Raises:
        PreflightError: the folder cannot be used.
    """

    def __init__(
        self, root: Path, *, quota_bytes: int, retain: int = DEFAULT_RETAIN, fsync: bool = False
    ) -> None:
        self.root = root
        self.quota_bytes = quota_bytes
        self.retain = retain
        self._fsync = fsync
        self._mutex = threading.Lock()
        self._sizes: dict[bytes, int] = {}
        self._verified: set[bytes] = set()
        self._decoded: dict[bytes, Manifest] = {}
        try:
            for name in ("chunks", "manifests", "pins", "holds", "tmp"):
                (root / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._exclusive():
                sweep_temporaries(root / "tmp", "")
                self._remove_orphans()
        except OSError as error:
            raise PreflightError(f"{root}: {error.strerror or error}") from error

    # Versions

    def admit(self, signed: SignedManifest) -> FileLock:
        """Reserve room for a verified manifest's chunks and hold the version.

        Eviction under the quota takes the oldest versions that nobody holds or pins; the newest
        `retain` are spared by `prune`, but they give way here.

        Returns:
            The hold: the version stays until it is released.

        Raises:
            PreflightError: the quota or the file system has no room for it.
            ManifestError: `signed` does not hold a manifest.
        """
        checkpoint = checkpoint_hash(signed.manifest)
        manifest = _decode_manifest(signed.manifest)
        with self._exclusive():
            versions = self._load_versions()
            if checkpoint not in versions:
                versions[checkpoint] = manifest
                self._make_room(versions, checkpoint)
                self._write_atomically(self.root / "manifests" / checkpoint.hex(), encode(signed))
                self._note(versions)
            return self._hold(checkpoint)

    def hold(self, checkpoint: bytes) -> FileLock | None:
        """Keep an admitted version from being evicted; None if it is not here."""
        with self._exclusive():
            return self._hold(checkpoint) if checkpoint in self._load_versions() else None

    def versions(self) -> list[StoredVersion]:
        """All admitted versions, complete or not, oldest first."""
        with self._exclusive():
            return _oldest_first(self._load_versions())

    def signed_manifest(self, checkpoint: bytes) -> SignedManifest | None:
        """The signed manifest of an admitted version."""
        return self._read_signed(self.root / "manifests" / checkpoint.hex())

    def manifest(self, checkpoint: bytes) -> Manifest:
        """The manifest of an admitted version.

        Raises:
            ManifestError: it is not here.
        """
        signed = self.signed_manifest(checkpoint)
        if signed is None:
            raise ManifestError(f"version {checkpoint.hex()[:16]} is not in the store")
        return _decode_manifest(signed.manifest)

    def pin(self, checkpoint: bytes, owner: str) -> None:
        """Keep a version until `unpin` with the same owner, across restarts."""
        (self.root / "pins" / _pin_name(checkpoint, owner)).touch(mode=0o600)

    def unpin(self, checkpoint: bytes, owner: str) -> None:
        """Take one owner's pin away; no error if there is none."""
        (self.root / "pins" / _pin_name(checkpoint, owner)).unlink(missing_ok=True)

    def prune(self, keep: int | None = None) -> list[bytes]:
        """Evict all but the newest `keep` (default `retain`) versions of each run.

        Versions that are pinned or held by any process stay. Returns the evicted hashes.
        """
        keep = self.retain if keep is None else keep
        with self._exclusive():
            versions = self._load_versions()
            kept_of_run: dict[bytes, int] = {}
            evicted = []
            for stored in reversed(_oldest_first(versions)):
                run_id = stored.manifest.run_id
                kept_of_run[run_id] = kept_of_run.get(run_id, 0) + 1
                if kept_of_run[run_id] > keep and self._evict(stored.checkpoint, versions):
                    evicted.append(stored.checkpoint)
            self._note(versions)
        return evicted

    def reserved_bytes(self) -> int:
        """What the admitted versions take when complete; chunks they share count once."""
        with self._exclusive():
            return sum(_union(self._load_versions()).values())

    # Chunks

    def path(self, digest: bytes) -> Path:
        """Where the chunk is, or would be."""
        return chunk_path(self.root, digest.hex())

    def has(self, digest: bytes) -> bool:
        """Whether the chunk of an admitted version is here."""
        try:
            return self.path(digest).stat().st_size == self._sizes.get(digest)
        except FileNotFoundError:
            return False

    def put(self, digest: bytes, data: bytes) -> None:
        """Check a chunk and store it.

        Raises:
            ManifestError: not the bytes `digest` names, or no admitted version needs them.
            PreflightError: the disk refused.
        """
        size = self._sizes.get(digest)
        if size is None:
            raise ManifestError(f"chunk {digest.hex()[:16]} belongs to no admitted version")
        if len(data) != size or blake3(data).digest() != digest:
            raise ManifestError(f"chunk {digest.hex()[:16]} does not have its hash")
        if not (digest in self._verified and self.has(digest)):
            self._write_atomically(self.path(digest), data)
            with self._mutex:
                self._verified.add(digest)

    def get(self, digest: bytes) -> bytes | None:
        """The chunk's bytes, checked; a damaged chunk is removed and None returned."""
        path = self.path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if blake3(data).digest() == digest:
            with self._mutex:
                self._verified.add(digest)
            return data
        with self._mutex:
            self._verified.discard(digest)
        path.unlink(missing_ok=True)
        return None

    def missing(self, manifest: Manifest) -> list[int]:
        """Indexes of the chunks that are not here; each chunk found is hashed once per process."""
        absent = []
        known: dict[bytes, bool] = {}
        for index, digest in enumerate(manifest.chunks):
            if digest not in known:
                present = digest in self._verified and self.has(digest)
                known[digest] = present or self.get(digest) is not None
            if not known[digest]:
                absent.append(index)
        return absent

    def import_folder(self, folder: Path, manifest: Manifest) -> None:
        """Store the chunks of an admitted version from its files, as a seeder does.

        Raises:
            ManifestError: the folder does not hold that checkpoint.
        """
        for index, chunk in enumerate(read_chunks(folder, manifest.files, manifest.chunk_size)):
            if index >= len(manifest.chunks):
                raise ManifestError(f"{folder}: more bytes than version {manifest.version} has")
            self.put(manifest.chunks[index], chunk)

    def assemble(self, manifest: Manifest, out_dir: Path) -> Path:
        """Write the checkpoint's files to `out_dir`, which appears whole or not at all.

        An intact `out_dir` is left as it is; a damaged one is replaced.

        Raises:
            ManifestError: a chunk is missing, or the state does not have the manifest's hash.
            PreflightError: the file system has no room.
        """
        write_folder(self.get, manifest, out_dir, fsync=self._fsync)
        return out_dir

    # Under the exclusive lock

    def _exclusive(self) -> FileLock:
        return lock(self.root / "lock", timeout_s=_LOCK_TIMEOUT_S)

    def _load_versions(self) -> dict[bytes, Manifest]:
        versions = {}
        for path in (self.root / "manifests").iterdir():
            checkpoint = bytes.fromhex(path.name) if _HEX.fullmatch(path.name) else b""
            manifest = self._decoded.get(checkpoint)
            if manifest is None:
                signed = self._read_signed(path)
                if signed is None:
                    path.unlink(missing_ok=True)
                    continue
                manifest = self._decoded[checkpoint] = _decode_manifest(signed.manifest)
            versions[checkpoint] = manifest
        self._note(versions)
        return versions

    def _note(self, versions: dict[bytes, Manifest]) -> None:
        with self._mutex:
            self._decoded = dict(versions)
            self._sizes = _union(versions)
            self._verified &= self._sizes.keys()

    def _hold(self, checkpoint: bytes) -> FileLock:
        return lock(self.root / "holds" / checkpoint.hex(), timeout_s=_LOCK_TIMEOUT_S, shared=True)

    def _read_signed(self, path: Path) -> SignedManifest | None:
        try:
            signed = decode(path.read_bytes(), SignedManifest, max_bytes=_MAX_MANIFEST_FILE_BYTES)
        except (FileNotFoundError, WireError):
            return None
        return signed if checkpoint_hash(signed.manifest).hex() == path.name else None

    def _make_room(self, versions: dict[bytes, Manifest], wanted: bytes) -> None:
        for stored in _oldest_first(versions):
            if sum(_union(versions).values()) <= self.quota_bytes:
                break
            if stored.checkpoint != wanted:
                self._evict(stored.checkpoint, versions)
        needed = sum(_union(versions).values())
        if needed > self.quota_bytes:
            raise PreflightError(
                f"version {versions[wanted].version} needs {needed - self.quota_bytes} bytes more than the "
                f"disk quota of {self.quota_bytes} leaves beside the versions in use"
            )
        absent = {
            digest: size
            for digest, size in versions[wanted].chunk_sizes().items()
            if not self.path(digest).exists()
        }
        check_free_space(self.root, sum(absent.values()))

    def _evict(self, checkpoint: bytes, versions: dict[bytes, Manifest]) -> bool:
        """Remove a version and the chunks no other one has, unless it is pinned or held."""
        name = checkpoint.hex()
        if any((self.root / "pins").glob(f"{name}.*")):
            return False
        unheld = try_lock(self.root / "holds" / name)
        if unheld is None:
            return False
        with unheld:
            manifest = versions.pop(checkpoint)
            # The manifest goes first: chunks without one are orphans, and the next start removes them.
            (self.root / "manifests" / name).unlink(missing_ok=True)
            shared = {digest for other in versions.values() for digest in other.chunks}
            for digest in set(manifest.chunks) - shared:
                self.path(digest).unlink(missing_ok=True)
            (self.root / "holds" / name).unlink(missing_ok=True)
        return True

    def _remove_orphans(self) -> None:
        versions = self._load_versions()
        wanted = {digest.hex() for manifest in versions.values() for digest in manifest.chunks}
        for path in (self.root / "chunks").glob("*/*"):
            if path.name not in wanted:
                path.unlink(missing_ok=True)
        for path in (self.root / "holds").iterdir():
            if _HEX.fullmatch(path.name) is None or bytes.fromhex(path.name) not in versions:
                path.unlink(missing_ok=True)

    def _write_atomically(self, path: Path, data: bytes) -> None:
        try:
            new_folder = not path.parent.exists()
            path.parent.mkdir(exist_ok=True, mode=0o700)
            with temporary_sibling(self.root / "tmp", "") as temporary:
                with temporary.open("wb") as file:
                    file.write(data)
                    if self._fsync:
                        file.flush()
                        os.fsync(file.fileno())
                temporary.rename(path)
            if self._fsync:
                fsync_folder(path.parent)
                if new_folder:
                    fsync_folder(path.parent.parent)
        except OSError as error:
            raise PreflightError(f"{path}: {error.strerror or error}") from error


def chunk_path(root: Path, name: str) -> Path:
    """Path of the chunk with hexadecimal hash `name` in the store under `root`."""
    return root / "chunks" / name[:2] / name


def _decode_manifest(content: bytes) -> Manifest:
    try:
        return decode_canonical(content, Manifest, max_bytes=_MAX_MANIFEST_FILE_BYTES)
    except WireError as error:
        raise ManifestError(f"malformed manifest: {error}") from error


def _pin_name(checkpoint: bytes, owner: str) -> str:
    if _OWNER.fullmatch(owner) is None:
        raise ValueError(f"not a pin owner: {owner!r}")
    return f"{checkpoint.hex()}.{owner}"


def _oldest_first(versions: dict[bytes, Manifest]) -> list[StoredVersion]:
    stored = [StoredVersion(checkpoint, manifest) for checkpoint, manifest in versions.items()]
    return sorted(stored, key=lambda item: (item.manifest.version, item.manifest.created_at_ms))


def _union(versions: dict[bytes, Manifest]) -> dict[bytes, int]:
    """Sizes of all chunks of `versions` by hash: what they share counts once."""
    sizes: dict[bytes, int] = {}
    for manifest in versions.values():
        sizes.update(manifest.chunk_sizes())
    return sizes
