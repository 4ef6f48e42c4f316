"""Writing a checkpoint's files from its chunks: the folder appears whole and verified, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from .checkpoint import Manifest, verify_folder, verify_state
from .errors import ManifestError, PreflightError
from .file_lock import sweep_temporaries, temporary_sibling

_FREE_SPACE_MARGIN_BYTES = 16 << 20


def write_folder(
    get_chunk: Callable[[bytes], bytes | None], manifest: Manifest, out_dir: Path, *, fsync: bool = False
) -> None:
    """Write the checkpoint's files to `out_dir` from checked chunks, one chunk in memory at a time.

    An intact `out_dir` is left as it is; a damaged one is replaced.

    Args:
        get_chunk: gives the verified bytes of a chunk hash, or None.

    Raises:
        ManifestError: a chunk is missing, or the state does not have the manifest's hash.
        PreflightError: the file system has no room or refuses.
    """
    parent, prefix = out_dir.parent, _prefix(out_dir)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if out_dir.exists():
            with contextlib.suppress(ManifestError):
                verify_folder(out_dir, manifest)
                return
        sweep_temporaries(parent, prefix)
        check_free_space(parent, manifest.size_bytes)
        with temporary_sibling(parent, prefix, directory=True) as partial:
            _write_files(get_chunk, manifest, partial, fsync)
            verify_state(partial, manifest)
            _swap(partial, out_dir, manifest)
        if fsync:
            fsync_folder(parent)
    except OSError as error:
        raise PreflightError(f"{out_dir}: {error.strerror or error}") from error


def _prefix(out_dir: Path) -> str:
    return f".{out_dir.name}.partial-"


def _write_files(
    get_chunk: Callable[[bytes], bytes | None], manifest: Manifest, folder: Path, fsync: bool
) -> None:
    pending = iter(manifest.chunks)
    buffer = memoryview(b"")
    for entry in manifest.files:
        with (folder / entry.name).open("xb") as file:
            remaining = entry.size_bytes
            while remaining:
                if not buffer:
                    digest = next(pending)
                    data = get_chunk(digest)
                    if data is None:
                        raise ManifestError(f"chunk {digest.hex()[:16]} is not in the store")
                    buffer = memoryview(data)
                piece = buffer[:remaining]
                file.write(piece)
                buffer = buffer[len(piece) :]
                remaining -= len(piece)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
    if fsync:
        fsync_folder(folder)


def _swap(partial: Path, out_dir: Path, manifest: Manifest) -> None:
    try:
        partial.rename(out_dir)
    except OSError:
        # There already: put by another process just now (and then it is intact), or damaged.
        with contextlib.suppress(ManifestError):
            verify_folder(out_dir, manifest)
            return
        with temporary_sibling(out_dir.parent, _prefix(out_dir), directory=True) as trash:
            out_dir.rename(trash / "replaced")
            partial.rename(out_dir)


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Check that the file system of `folder` has room.

    Raises:
        PreflightError: it does not.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _FREE_SPACE_MARGIN_BYTES:
        raise PreflightError(f"{folder}: {needed_bytes} bytes needed, {free} free")


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
