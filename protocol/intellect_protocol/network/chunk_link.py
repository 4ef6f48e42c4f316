"""One end of a control stream: frames in, frames out, nothing unbounded in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import trio

from ..errors import IntellectError, UnreachableError, WireError
from ..wire import frame as with_length
from ..wire import frame_length
from .chunk_frames import (
    MAX_FRAME_BYTES,
    MAX_INDEXES,
    Data,
    Frame,
    Have,
    Hello,
    Keep,
    decode_frame,
    encode_frame,
)

_HELLO_S = 5.0
_KEEP_S = 20.0  # a frame at least this often
_SILENCE_S = 65.0  # a peer that sends nothing for so long is gone
_READ_BYTES = 256 << 10
_MAX_QUEUED = 4096
_MAX_WRITE_BYTES = 512 << 10


class FrameStream(Protocol):
    """What a link needs of `network.stream.Stream`."""

    peer_id: bytes

    async def read_some(self, max_bytes: int = ..., *, timeout_s: float | None = None) -> bytes: ...

    async def write(self, data: bytes | memoryview, *, timeout_s: float | None = None) -> None: ...

    async def reset(self) -> None: ...


class Link:
    """The control stream to one peer after both sides said hello.

    Args:
        stream: the stream, at its start.
        initiator: peer id of the side that opened it.
        gather_s: how long announcements of new chunks wait for more of their kind.
    """

    def __init__(self, stream: FrameStream, initiator: bytes, *, gather_s: float) -> None:
        self.peer_id = stream.peer_id
        self.initiator = initiator
        self.hello: Hello
        self._stream = stream
        self._gather_s = gather_s
        self._received = bytearray()
        self._queue: deque[Frame] = deque()
        self._data: deque[Data] = deque()
        self._haves: dict[bytes, list[int]] = {}
        self._wake = trio.Event()
        self._closed = False

    async def greet(self, hello: Hello) -> None:
        """Exchange hellos.

        Raises:
            WireError: the peer is of another run, or does not say hello first.
            UnreachableError: it is gone or too slow.
        """
        await self._stream.write(with_length(encode_frame(hello)), timeout_s=_HELLO_S)
        answer = await self._read_frame(_HELLO_S)
        if not isinstance(answer, Hello):
            raise WireError("the peer does not say hello")
        if answer.run_id != hello.run_id:
            raise WireError("the peer takes part in another run")
        self.hello = answer

    def send(self, frame: Frame) -> None:
        """Queue a frame; the link closes when the peer lets too many pile up."""
        if isinstance(frame, Data):
            self._data.append(frame)
        else:
            self._queue.append(frame)
        if len(self._queue) > _MAX_QUEUED:
            self.close()
        self._wake.set()

    def announce(self, checkpoint: bytes, indexes: list[int]) -> None:
        """Queue `Have`; what comes within `gather_s` goes into one frame."""
        self._haves.setdefault(checkpoint, []).extend(indexes)
        self._wake.set()

    def close(self) -> None:
        """Let `run` end soon."""
        self._closed = True
        self._wake.set()

    async def run(self, on_frame: Callable[[Frame], None]) -> None:
        """Read and write until either side closes.

        Raises:
            WireError: the peer broke the protocol.
            UnreachableError: the peer is gone.
        """
        failure: IntellectError | None = None
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                nonlocal failure
                try:
                    await self._write_all()
                except IntellectError as error:
                    failure = error
                nursery.cancel_scope.cancel()

            async def read() -> None:
                nonlocal failure
                try:
                    while not self._closed:
                        on_frame(await self._read_frame(_SILENCE_S))
                except IntellectError as error:
                    failure = error
                nursery.cancel_scope.cancel()

            nursery.start_soon(write)
            nursery.start_soon(read)
        await self._stream.reset()
        if failure is not None:
            raise failure

    async def _read_frame(self, timeout_s: float) -> Frame:
        """The next frame; one read takes all frames that are there, as each read costs an answer."""
        while True:
            if len(self._received) >= 4:
                end = 4 + frame_length(bytes(self._received[:4]), max_bytes=MAX_FRAME_BYTES)
                if len(self._received) >= end:
                    payload = bytes(self._received[4:end])
                    del self._received[:end]
                    return decode_frame(payload)
            piece = await self._stream.read_some(_READ_BYTES, timeout_s=timeout_s)
            if not piece:
                raise UnreachableError("the peer closed the link")
            self._received += piece

    async def _write_all(self) -> None:
        while not self._closed:
            if not (self._queue or self._data or self._haves):
                self._wake = trio.Event()
                with trio.move_on_after(_KEEP_S) as idle:
                    await self._wake.wait()
                if idle.cancelled_caught:
                    self.send(Keep())
                continue
            if not (self._queue or self._data):
                self._wake = trio.Event()
                with trio.move_on_after(self._gather_s):
                    await self._wake_for_queue()
            await self._stream.write(self._batch())

    async def _wake_for_queue(self) -> None:
        while not (self._queue or self._data or self._closed):
            await self._wake.wait()
            self._wake = trio.Event()

    def _batch(self) -> bytes:
        """Queued frames as one write: each write costs an encryption and a wake-up over there."""
        for checkpoint, indexes in self._haves.items():
            for start in range(0, len(indexes), MAX_INDEXES):
                self._queue.append(Have(checkpoint, indexes[start : start + MAX_INDEXES]))
        self._haves = {}
        batch = bytearray()
        while self._queue and len(batch) < _MAX_WRITE_BYTES:
            batch += with_length(encode_frame(self._queue.popleft()))
        if self._data and len(batch) < _MAX_WRITE_BYTES:
            batch += with_length(encode_frame(self._data.popleft()))
        return bytes(batch)
