"""Operating-system file locks: the kernel drops them when their holder dies, however it dies.

`flock` belongs to the open file, so two opens in one process exclude each other as two processes do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import UnreachableError

_RETRY_S = 0.005


class FileLock:
    """An open file with a lock on it; `release` (or the end of the process) gives it up."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Give the lock up; further calls do nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def try_lock(path: Path, *, shared: bool = False) -> FileLock | None:
    """Lock a file (made if absent) or an existing folder; None if somebody else holds it."""
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return FileLock(descriptor)


def lock(path: Path, *, timeout_s: float, shared: bool = False) -> FileLock:
    """`try_lock` until it succeeds.

    Raises:
        UnreachableError: somebody else held it for `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while (held := try_lock(path, shared=shared)) is None:
        if time.monotonic() >= deadline:
            raise UnreachableError(f"{path} is locked by another process")
        time.sleep(_RETRY_S)
    return held


@contextlib.contextmanager
def temporary_sibling(folder: Path, prefix: str, *, directory: bool = False) -> Iterator[Path]:
    """A locked temporary file or folder in `folder`; what is still there at the end is removed."""
    path, held = _locked_temporary(folder, prefix, directory)
    try:
        yield path
    finally:
        _remove(path)
        held.release()


def _locked_temporary(folder: Path, prefix: str, directory: bool) -> tuple[Path, FileLock]:
    while True:
        path = folder / f"{prefix}{os.urandom(8).hex()}"
        if directory:
            path.mkdir(mode=0o700)
        else:
            path.touch(mode=0o600, exist_ok=False)
        held = None
        # A sweep may come between making and locking; then what we lock is gone, or another's.
        with contextlib.suppress(FileNotFoundError):
            inode = path.stat().st_ino
            held = try_lock(path)
            if held is not None and path.stat().st_ino == inode:
                return path, held
        if held is not None:
            held.release()


def sweep_temporaries(folder: Path, prefix: str) -> None:
    """Remove what `temporary_sibling` left in `folder` when its process was killed."""
    for path in folder.glob(f"{prefix}*"):
        with contextlib.suppress(FileNotFoundError):
            held = try_lock(path)
            if held is not None:
                with held:
                    _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
