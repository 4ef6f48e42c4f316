"""The rollout files of a node: durable before they are signed, checked before they are sent."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from intellect_protocol.errors import HistoryError, PreflightError
from intellect_protocol.wire import sha256


class UnitFiles:
    """A folder with one file for each (version, index, file hash)."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            OSError: the folder cannot be made.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder

    def path(self, version: int, index: int, file_hash: bytes) -> Path:
        """Where a unit's file is, if it is kept."""
        return self._folder / _name(version, index, file_hash)

    def write(self, version: int, index: int, file_hash: bytes, content: bytes) -> None:
        """Make a file durable: when this returns, its bytes and its name survive a power cut.

        Raises:
            PreflightError: the disk refuses.
        """
        path = self.path(version, index, file_hash)
        part = path.with_suffix(".part")
        try:
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            _fsync_folder(self._folder)
        except OSError as error:
            raise PreflightError(f"{path}: {error.strerror or error}") from error

    def read(self, version: int, index: int, file_hash: bytes) -> bytes:
        """A file's bytes.

        Raises:
            HistoryError: it is gone or changed.
        """
        path = self.path(version, index, file_hash)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise HistoryError(f"{path}: {error.strerror or error}") from error
        if sha256(content) != file_hash:
            raise HistoryError(f"{path}: not the file that was signed")
        return content

    def keep_only(self, units: Iterable[tuple[int, int, bytes]]) -> None:
        """Remove every file but those of `units` (version, index, file hash)."""
        known = {_name(*unit) for unit in units}
        for path in self._folder.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(version: int, index: int, file_hash: bytes) -> str:
    return f"v{version:08d}-{index:06d}-{file_hash.hex()[:16]}.parquet"
