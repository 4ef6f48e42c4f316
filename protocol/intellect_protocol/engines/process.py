"""The engine's child process as a pair of pipes, and plain words for how it ended.

The process is started from the thread that runs trio and not from a worker: the kernel ties the
child's life to the thread that started it (see `child`), and trio's worker threads come and go.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from functools import partial
from pathlib import Path

import psutil
import trio

from ..errors import EngineError
from . import pipe

_LOOK_S = 0.25  # how often a waiting parent looks at the child's memory and stderr
_EXIT_GRACE_S = 2.0
_KILL_GRACE_S = 10.0
_READ_BYTES = 1 << 16
_STDERR_LINES = 50
_STDERR_LINE_BYTES = 2000

logger = logging.getLogger("intellect.engine")


class ChildProcess:
    """One run of `child.py`."""

    def __init__(self, popen: subprocess.Popen[bytes], stdin: int, stdout: int, stderr: int) -> None:
        self._popen = popen
        self._stdin = trio.lowlevel.FdStream(stdin)
        self._stdout = trio.lowlevel.FdStream(stdout)
        os.set_blocking(stderr, False)
        self._stderr = stderr
        self._buffer = bytearray()
        self._line = b""
        self._lines: deque[str] = deque(maxlen=_STDERR_LINES)
        self.memory_bytes = 0

    @classmethod
    def spawn(cls, threads: int) -> ChildProcess:
        """Start the process with `threads` threads for its math libraries."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("INTELLECT_")}
        environment |= {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "OPENBLAS_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
        pipes = [os.pipe() for _ in range(3)]
        (child_in, stdin), (stdout, child_out), (stderr, child_err) = pipes
        try:
            popen = subprocess.Popen(
                [sys.executable, "-m", "intellect_protocol.engines.child", str(os.getpid())],
                stdin=child_in,
                stdout=child_out,
                stderr=child_err,
                env=environment,
            )
        except OSError as error:
            for ends in pipes:
                for end in ends:
                    os.close(end)
            raise EngineError("crashed", f"cannot start the engine: {error}") from error
        for end in (child_in, child_out, child_err):
            os.close(end)
        return cls(popen, stdin, stdout, stderr)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._popen.pid

    async def send(self, frame: bytes, patience_s: float) -> None:
        """Write one frame.

        Raises:
            EngineError: the child has died, or does not read for `patience_s`.
        """
        with trio.move_on_after(patience_s) as scope:
            try:
                await self._stdin.send_all(frame)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                raise await self._obituary() from None
        if scope.cancelled_caught:
            raise EngineError("stalled", f"stalled: the engine read nothing for {patience_s:.0f} s")

    async def receive(self, patience_s: float) -> bytes:
        """The payload of the next frame.

        Raises:
            EngineError: the child has died, or sends nothing for `patience_s`.
            WireError: the frame is over the limit.
        """
        # A whole frame has this long: they are small next to what a pipe carries in a second.
        deadline = trio.current_time() + patience_s
        while len(self._buffer) < 4:
            await self._read(deadline, patience_s)
        end = 4 + pipe.length_of(bytes(self._buffer[:4]))
        while len(self._buffer) < end:
            await self._read(deadline, patience_s)
        payload = bytes(self._buffer[4:end])
        del self._buffer[:end]
        return payload

    async def _read(self, deadline: float, patience_s: float) -> None:
        data: bytes | bytearray | None = None
        while data is None:
            self._look()
            if trio.current_time() >= deadline:
                raise EngineError("stalled", f"stalled: no tokens for {patience_s:.0f} s")
            with trio.move_on_after(min(_LOOK_S, deadline - trio.current_time())):
                data = await self._stdout.receive_some(_READ_BYTES)
        if not data:
            raise await self._obituary()
        self._buffer += data

    def _look(self) -> None:
        """Note the child's memory and what it has printed, while it still can be seen."""
        with contextlib.suppress(psutil.Error):
            self.memory_bytes = psutil.Process(self.pid).memory_info().rss or self.memory_bytes
        try:
            # Bounded: a child that floods stderr must not keep the parent here.
            for _ in range(16):
                printed = os.read(self._stderr, _READ_BYTES)
                if not printed:
                    break
                *whole, self._line = (self._line + printed).split(b"\n")
                self._line = self._line[-_STDERR_LINE_BYTES:]
                for raw in whole:
                    line = raw[-_STDERR_LINE_BYTES:].decode(errors="replace")
                    self._lines.append(line)
                    logger.info("%s", line)
        except BlockingIOError:
            pass

    async def _obituary(self) -> EngineError:
        """Why the child is dead."""
        with trio.CancelScope(shield=True):
            status = await self._exited(_EXIT_GRACE_S)
            if status is None:
                await self.kill()
                return EngineError("crashed", "crashed: the engine closed its pipes")
        self._look()
        if status == -signal.SIGKILL:
            had, total = self.memory_bytes / 1e9, memory_limit_bytes() / 1e9
            return EngineError("killed", f"killed, probably out of memory: had {had:.1f} of {total:.1f} GB")
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        last = next((line for line in reversed(self._lines) if line.strip()), "")
        return EngineError("crashed", f"crashed: the engine ended with {how}{': ' + last if last else ''}")

    async def _exited(self, seconds: float) -> int | None:
        """Exit status, or None if it is still running after `seconds`."""
        try:
            return await trio.to_thread.run_sync(partial(self._popen.wait, timeout=seconds))
        except subprocess.TimeoutExpired:
            return None

    async def close(self) -> None:
        """Let it end by itself, which it does when its stdin closes; then make sure."""
        with trio.CancelScope(shield=True):
            await self._stdin.aclose()
            await self._exited(_EXIT_GRACE_S)
            await self.kill()

    async def kill(self) -> None:
        """Kill it and free its pipes."""
        with trio.CancelScope(shield=True):
            if self._popen.poll() is None:
                self._popen.kill()
                await self._exited(_KILL_GRACE_S)
            await self._stdin.aclose()
            await self._stdout.aclose()
            if self._stderr >= 0:
                self._look()
                os.close(self._stderr)
                self._stderr = -1


def memory_limit_bytes() -> int:
    """What this machine or its container has, whichever is less."""
    total = int(psutil.virtual_memory().total)
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return min(total, int(text))
    except (OSError, ValueError):
        return total
