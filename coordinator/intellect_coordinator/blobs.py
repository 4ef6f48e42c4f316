"""Files by content: rollout files, evidence bundles, work files.

A blob is written to a temporary file, synced, and renamed to its SHA-256; only then does its hash mean
anything to anybody. What a kill leaves half-written is swept at the next start.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from intellect_protocol.errors import InvalidDataError, PreflightError
from intellect_protocol.file_lock import sweep_temporaries, temporary_sibling
from intellect_protocol.wire import sha256


class BlobStore:
    """Blobs under one folder. Methods block: call them in threads."""

    def __init__(self, root: Path, *, keep_free_bytes: int = 64 << 20) -> None:
        """
        Args:
            keep_free_bytes: what must be left on the file system after a write.

        Raises:
            PreflightError: the folder cannot be used.
        """
        self.root = root
        self._keep_free_bytes = keep_free_bytes
        try:
            (root / "tmp").mkdir(parents=True, exist_ok=True, mode=0o700)
            sweep_temporaries(root / "tmp", "")
        except OSError as error:
            raise PreflightError(f"{root}: {error.strerror or error}") from error

    def path(self, digest: bytes) -> Path:
        """Where the blob is, or would be."""
        name = digest.hex()
        return self.root / name[:2] / name

    def has(self, digest: bytes) -> bool:
        """Whether the blob is here."""
        return self.path(digest).exists()

    def has_room(self, size_bytes: int) -> bool:
        """Whether the file system takes a blob of this size and keeps its reserve."""
        return shutil.disk_usage(self.root).free - size_bytes >= self._keep_free_bytes

    def put(self, data: bytes) -> bytes:
        """Store `data`; on disk when this returns.

        Returns:
            Its SHA-256.

        Raises:
            PreflightError: the disk refused.
        """
        digest = sha256(data)
        path = self.path(digest)
        if path.exists():
            return digest
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            with temporary_sibling(self.root / "tmp", "") as temporary:
                with temporary.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.rename(path)
            for folder in (path.parent, self.root):
                sync_folder(folder)
        except OSError as error:
            raise PreflightError(f"{path}: {error.strerror or error}") from error
        return digest

    def get(self, digest: bytes, *, max_bytes: int) -> bytes | None:
        """The blob, checked against its name, or None if it is not here.

        Raises:
            InvalidDataError: it is damaged or larger than `max_bytes`.
        """
        try:
            with self.path(digest).open("rb") as file:
                data = file.read(max_bytes + 1)
        except FileNotFoundError:
            return None
        if len(data) > max_bytes:
            raise InvalidDataError(f"blob {digest.hex()[:16]} is larger than {max_bytes} bytes")
        if sha256(data) != digest:
            raise InvalidDataError(f"blob {digest.hex()[:16]} is damaged on disk")
        return data

    def remove(self, digest: bytes) -> None:
        """Forget a blob; no error if it is not here."""
        self.path(digest).unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
