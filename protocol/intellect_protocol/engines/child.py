"""The engine's process: `python -m intellect_protocol.engines.child PARENT_PID`, frames on stdin and stdout.

It lives for its parent only. A thread reads stdin, so the end of the parent is noticed in the
middle of a computation too, and ends this process at once; where the kernel can, it is also asked
to kill this process with its parent, which helps if this one is stopped. Whatever is printed goes
to stderr: stdout belongs to the frames.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO, NoReturn

from ..errors import IntellectError, WireError
from . import pipe
from .base import MAX_ROWS, Completion, Engine, RowScore

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PROGRESS_INTERVAL_S = 0.1
_QUEUE_FRAMES = 256


class _CancelledByParent(Exception):
    """Raised out of an engine's progress callback."""


def _die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(0)


class _Reader(threading.Thread):
    """Reads frames from the parent; ends the process when the parent has closed the pipe."""

    def __init__(self, source: BinaryIO) -> None:
        super().__init__(daemon=True)
        self.frames: queue.Queue[pipe.ToChild] = queue.Queue(_QUEUE_FRAMES)
        self.cancelled = threading.Event()
        self._source = source

    def run(self) -> None:
        try:
            while True:
                prefix = self._source.read(4)
                if not prefix:
                    os._exit(0)
                message = pipe.unpack_to_child(self._source.read(pipe.length_of(prefix)))
                if isinstance(message, pipe.Cancel):
                    self.cancelled.set()
                else:
                    # The parent sends an operation only when the one before has ended.
                    self.cancelled.clear()
                    self.frames.put(message)
        except (WireError, OSError) as error:
            print(f"engine: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _make_engine(start: pipe.Start) -> Engine:
    if start.engine == "torch":
        import torch

        from .torch_engine import TorchEngine

        torch.set_num_threads(start.threads)
        return TorchEngine(
            device=start.device, dtype=start.dtype, max_rows=start.max_rows, attention=start.attention
        )
    from ..errors import ConfigError

    raise ConfigError(f"engine must be torch, not {start.engine!r}")


def _is_out_of_memory(error: BaseException) -> bool:
    # torch reports a failed allocation on the CPU as a plain RuntimeError.
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and any(word in str(error) for word in ("out of memory", "allocate memory"))
    )


class _Server:
    """Carries out one operation after the other."""

    def __init__(self, reader: _Reader, sink: BinaryIO) -> None:
        self._reader, self._sink = reader, sink
        self._engine: Engine | None = None
        self._reported_at = 0.0

    def serve(self) -> NoReturn:
        while True:
            message = self._reader.frames.get()
            try:
                answer = self._answer(message)
            except _CancelledByParent:
                answer = pipe.Failed(pipe.CANCELLED, "")
            except IntellectError as error:
                answer = pipe.Failed(type(error).__name__, str(error))
            except Exception as error:
                if _is_out_of_memory(error):
                    answer = pipe.Failed(pipe.OUT_OF_MEMORY, str(error).splitlines()[0][:500])
                else:
                    sys.excepthook(type(error), error, error.__traceback__)
                    answer = pipe.Failed(type(error).__name__, (str(error).splitlines() or [""])[0][:500])
            self._send(answer)

    def _answer(self, message: pipe.ToChild) -> pipe.FromChild:
        if isinstance(message, pipe.Start):
            self._engine = _make_engine(message)
            return pipe.Done()
        engine = self._engine
        if engine is None:
            raise WireError("the first frame must be Start")
        if isinstance(message, pipe.Load):
            return pipe.Loaded(engine.load(Path(message.checkpoint_dir)))
        if isinstance(message, pipe.Update):
            return pipe.Loaded(engine.update(Path(message.checkpoint_dir)))
        if isinstance(message, pipe.Probe):
            return pipe.Probed(engine.probe(message.prompt))
        if isinstance(message, pipe.Generate):
            requests = [item.request for item in self._items(pipe.Request, message.count)]
            engine.generate(requests, message.sampling, self._sampled, self._progress)
        elif isinstance(message, pipe.Score):
            rows = [item.row for item in self._items(pipe.Row, message.count)]
            engine.score(rows, message.sampling, message.secret, self._scored, self._progress)
        elif isinstance(message, pipe.Unload):
            engine.unload()
        else:
            raise WireError(f"{type(message).__name__} out of place")
        return pipe.Done()

    def _items(self, kind: type[pipe.ItemT], count: int) -> list[pipe.ItemT]:
        if not 0 <= count <= MAX_ROWS:
            raise WireError(f"{count} rows exceed the limit of {MAX_ROWS}")
        items: list[pipe.ItemT] = []
        while len(items) < count:
            item = self._reader.frames.get()
            if not isinstance(item, kind):
                raise WireError(f"{type(item).__name__} out of place")
            items.append(item)
        return items

    def _sampled(self, request: int, sample: int, completion: Completion) -> None:
        self._send(pipe.Sampled(request, sample, completion))

    def _scored(self, row: int, score: RowScore) -> None:
        self._send(pipe.Scored(row, score))

    def _progress(self, tokens: int) -> None:
        if self._reader.cancelled.is_set():
            raise _CancelledByParent
        now = time.monotonic()
        if now - self._reported_at >= _PROGRESS_INTERVAL_S:
            self._reported_at = now
            self._send(pipe.Progress(tokens))

    def _send(self, message: pipe.FromChild) -> None:
        try:
            self._sink.write(pipe.pack(message))
            self._sink.flush()
        except BrokenPipeError:
            os._exit(0)


def main() -> NoReturn:
    """Serve the parent until it goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    _die_with_parent(int(sys.argv[1]))
    reader = _Reader(os.fdopen(os.dup(0), "rb"))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    reader.start()
    _Server(reader, sink).serve()


if __name__ == "__main__":
    main()
