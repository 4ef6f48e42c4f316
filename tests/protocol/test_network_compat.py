"""Every correction of py-libp2p: the fault without it, in a process of its own, and none with it."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest
import trio
import trio.testing
from libp2p.peer.id import ID
from libp2p.stream_muxer.yamux.yamux import YAMUX_HEADER_FORMAT, Yamux

from intellect_protocol.errors import PreflightError
from intellect_protocol.keys import PeerKey
from intellect_protocol.network import compat
from intellect_protocol.network.limits import Limits, Timeouts
from intellect_protocol.network.muxer import BoundedYamux

_FAULTS = Path(__file__).with_name("network_faults.py")
_DEAD = "dead"


async def _outcome(fault: str, kind: str) -> str:
    """What the program printed last, or that it ended with a traceback."""
    with trio.fail_after(60):
        result = await trio.run_process(
            [sys.executable, str(_FAULTS), fault, kind],
            capture_stdout=True,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    return result.stdout.decode().split()[-1] if result.returncode == 0 else _DEAD


@pytest.mark.parametrize(
    ("fault", "plain", "guarded"),
    [
        ("inbound_slots", "refused", "served"),
        ("gossip_garbage", _DEAD, "served"),
        ("gossip_key", _DEAD, "served"),
        ("handler_error", _DEAD, "served"),
        ("idle_sockets", "refused", "served"),
        ("plaintext", "accepted", "refused"),
        ("dial_delay", "waiting", "connected"),
    ],
)
async def test_the_library_has_this_fault_and_we_have_not(fault: str, plain: str, guarded: str) -> None:
    outcomes: dict[str, str] = {}

    async def run(kind: str) -> None:
        outcomes[kind] = await _outcome(fault, kind)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, "plain")
        nursery.start_soon(run, "guarded")
    assert outcomes == {"plain": plain, "guarded": guarded}


class _Pipe:
    """A secured connection whose writes take their time and whose reads come from the test."""

    is_initiator = True

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = trio.Event()
        self._feed, self._fed = trio.open_memory_channel[bytes](1000)
        self._buffer = b""

    async def feed(self, data: bytes) -> None:
        await self._feed.send(data)

    async def write(self, data: bytes) -> None:
        half = len(data) // 2
        self.written += data[:half]
        await trio.sleep(0.01)
        self.written += data[half:]

    async def read(self, n: int | None = None) -> bytes:
        if not self._buffer:
            self._buffer = await self._fed.receive()
        piece, self._buffer = self._buffer[:n], self._buffer[n:] if n is not None else b""
        return piece

    async def close(self) -> None:
        self.closed.set()
        self._feed.close()


def _muxer(kind: str, pipe: _Pipe, **limits: int) -> Yamux:
    peer_id = ID(PeerKey.create().peer_id)
    if kind == "plain":

        async def on_close() -> None: ...

        return Yamux(pipe, peer_id, is_initiator=True, on_close=on_close)
    return BoundedYamux(pipe, peer_id, limits=Limits(**limits), timeouts=Timeouts())


@pytest.mark.parametrize(("kind", "whole"), [("plain", False), ("guarded", True)])
async def test_a_cancelled_write_leaves_no_half_frame(kind: str, whole: bool, autojump_clock) -> None:
    pipe = _Pipe()
    muxer = _muxer(kind, pipe)
    frames = [struct.pack(YAMUX_HEADER_FORMAT, 0, 0, 0, n, 100) + bytes([n]) * 100 for n in range(2)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(muxer.start)
        await muxer.event_started.wait()
        with trio.move_on_after(0.005):
            await muxer._write_frame(frames[0])
        await muxer._write_frame(frames[1])
        await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    assert (bytes(pipe.written) == frames[0] + frames[1]) is whole


@pytest.mark.parametrize(("kind", "ended"), [("plain", False), ("guarded", True)])
async def test_unread_bytes_of_a_peer_that_ignores_the_window_are_bounded(
    kind: str, ended: bool, autojump_clock
) -> None:
    pipe = _Pipe()
    muxer = _muxer(kind, pipe, unread_bytes_per_peer=1 << 20)
    syn = struct.pack(YAMUX_HEADER_FORMAT, 0, 1, 1, 2, 0)
    data = struct.pack(YAMUX_HEADER_FORMAT, 0, 0, 0, 2, 1 << 18) + b"x" * (1 << 18)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(muxer.start)
        await muxer.event_started.wait()
        await pipe.feed(syn)
        for _ in range(8):
            await pipe.feed(data)
        await trio.sleep(0.4)
        held = sum(len(buffer) for buffer in muxer.stream_buffers.values())
        assert pipe.closed.is_set() is ended
        assert (held > 1 << 20) is not ended
        nursery.cancel_scope.cancel()


async def test_a_peer_that_reads_nothing_is_disconnected(autojump_clock) -> None:
    class Stuck(_Pipe):
        async def write(self, data: bytes) -> None:
            await trio.sleep_forever()

    pipe = Stuck()
    muxer = _muxer("guarded", pipe)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(muxer.start)
        await muxer.event_started.wait()
        nursery.start_soon(muxer._write_frame, b"x" * 12)
        await pipe.closed.wait()
        nursery.cancel_scope.cancel()
    assert muxer.is_closed


def test_another_version_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.importlib.metadata, "version", lambda name: "0.8.2")
    with pytest.raises(PreflightError, match=r"0\.8\.1 is needed, 0\.8\.2 is installed"):
        compat.build(PeerKey.create(), Limits(), Timeouts(), [])
