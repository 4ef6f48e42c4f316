"""Reading strangers' Parquet files without dying of them.

pyarrow ends the whole process (abort in C++) on some malformed footers; no exception can be caught. The
naive way, checking the footer first, needs a parser of its own for the same hostile bytes. The way taken:
a child process reads the file first, with the same code and the same limits. What the child survives, the
caller survives, since the bytes are the same; a file that ends the child, takes too long or needs too
much memory is refused. One child serves a whole process and is started again after it died.

Not attempted: files that behave differently the second time. Reading is deterministic.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import select
import struct
import subprocess
import sys
import threading
import time
from typing import BinaryIO, Literal

import msgspec
import psutil

from .errors import RolloutFileError

FileKind = Literal["unit", "batch"]

_DEADLINE_S = 60.0
_SPARE_MEMORY_BYTES = 256 << 20  # for a file, over a few times of what its limits let it unpack to
_MEMORY_PER_BYTE = 16  # a token of 4 bytes becomes a Python integer in a list
_MAX_TEXT_BYTES = 4096


class _Question(msgspec.Struct, frozen=True):
    kind: FileKind
    limits: bytes  # msgpack of FileLimits
    size_bytes: int


class ParquetGuard:
    """One child process; thread-safe, one file at a time."""

    def __init__(self, *, deadline_s: float = _DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._mutex = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def screen(self, kind: FileKind, data: bytes, limits: msgspec.Struct) -> None:
        """Let the child read a file of `kind` under `limits` (`rollouts.FileLimits`).

        Raises:
            RolloutFileError: the child found it malformed, or did not survive it.
        """
        question = msgspec.msgpack.encode(_Question(kind, msgspec.msgpack.encode(limits), len(data)))
        with self._mutex:
            verdict = self._verdict(struct.pack("<I", len(question)) + question, data)
        if verdict:
            raise RolloutFileError(verdict)

    def close(self) -> None:
        """End the child."""
        with self._mutex:
            self._stop()

    def _verdict(self, question: bytes, data: bytes) -> str:
        """What the child says; empty if nothing is wrong.

        A child can die of something else, such as the kernel's want of memory: the file is to blame if it
        ends a fresh one too.
        """
        try:
            return self._ask(question, data)
        except EOFError:
            pass
        try:
            return self._ask(question, data)
        except EOFError as error:
            raise RolloutFileError("not a readable Parquet file: it ends its reader") from error

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._stop()
            self._child = subprocess.Popen(
                [sys.executable, "-m", "intellect_protocol.parquet_guard"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
                # The system's allocator reserves no memory ahead, so that a limit means something.
                env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"},
            )
            assert self._child.stdin is not None
            os.set_blocking(self._child.stdin.fileno(), False)  # a stopped child must not stop us
        return self._child

    def _ask(self, question: bytes, data: bytes) -> str:
        """Raises EOFError if the child died."""
        child = self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        deadline = time.monotonic() + self._deadline_s
        try:
            for part in (question, data):
                self._write(child.stdin.fileno(), part, deadline)
            length: int = struct.unpack("<I", self._read(child.stdout.fileno(), 4, deadline))[0]
            if length > _MAX_TEXT_BYTES:
                raise EOFError
            return self._read(child.stdout.fileno(), length, deadline).decode(errors="replace")
        except TimeoutError as error:
            self._stop()
            raise RolloutFileError("not a readable Parquet file: it takes too long to read") from error
        except (OSError, EOFError) as error:
            self._stop()
            raise EOFError from error

    @staticmethod
    def _write(descriptor: int, content: bytes, deadline: float) -> None:
        view = memoryview(content)
        while view:
            if not select.select([], [descriptor], [], max(0.0, deadline - time.monotonic()))[1]:
                raise TimeoutError
            view = view[os.write(descriptor, view) :]

    @staticmethod
    def _read(descriptor: int, size: int, deadline: float) -> bytes:
        content = b""
        while len(content) < size:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            piece = os.read(descriptor, size - len(content))
            if not piece:
                raise EOFError
            content += piece
        return content

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        child.wait()


GUARD = ParquetGuard()
atexit.register(GUARD.close)


def _read_exactly(file: BinaryIO, size: int) -> bytes:
    content = file.read(size)
    if len(content) != size:
        raise EOFError
    return content


def _limit_memory(bytes_more: int) -> None:
    """Bound this process's address space to what it has now and `bytes_more`."""
    limit = psutil.Process().memory_info().vms + bytes_more
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    """The child: read files from stdin until it closes; answer with an error text, empty if there is none."""
    from . import rollouts

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    while prefix := source.read(4):
        length: int = struct.unpack("<I", prefix)[0]
        question = msgspec.msgpack.decode(_read_exactly(source, length), type=_Question)
        limits = msgspec.msgpack.decode(question.limits, type=rollouts.FileLimits)
        data = _read_exactly(source, question.size_bytes)
        _limit_memory(_SPARE_MEMORY_BYTES + _MEMORY_PER_BYTE * limits.max_uncompressed_bytes)
        try:
            rollouts.parse(question.kind, data, limits)
            text = ""
        except RolloutFileError as error:
            text = str(error)
        encoded = text.encode()[:_MAX_TEXT_BYTES]
        answers.write(struct.pack("<I", len(encoded)) + encoded)
        answers.flush()


if __name__ == "__main__":
    main()
