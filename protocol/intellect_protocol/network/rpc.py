"""Requests between peers: what both sides of `/intellect/rpc/1` put on the wire.

One stream per request. Each way: one frame (`wire.frame`, at most 1 MiB) with a `Request` or
`Response` in msgpack, then `body_size` bytes whose SHA-256 the frame declares. The request's payload
is itself msgpack of a message struct whose name is the request's type, kept as bytes because the
envelope signs exactly these bytes. The answer may come before the request's body has been sent:
then the body is not wanted.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import trio

from ..errors import DeadlineError, WireError
from ..wire import EMPTY_BODY_HASH, Envelope, sha256
from .limits import Limits, Timeouts
from .stream import UNIT_BYTES, Stream

RPC_PROTOCOL_ID = "/intellect/rpc/1"

# Codes that the layer itself answers with; handlers add their own by raising `RefusedError`.
BUSY = "busy"
INTERNAL = "internal"
MALFORMED = "malformed"
NOT_BOUND = "not_bound"
TOO_LARGE = "too_large"
UNKNOWN_REQUEST = "unknown_request"
UNSIGNED = "bad_signature"
REPLAYED = "replayed"
CLOCK = "clock"
BODY_HASH = "body_hash"
UNAVAILABLE = "unavailable"
UPGRADE_REQUIRED = "upgrade_required"
WRONG_RUN = "wrong_run"
WRONG_VERSION = "wrong_version"


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First frame of a stream, from the caller."""

    type: str
    payload: bytes
    envelope: Envelope | None
    body_size: int
    body_hash: bytes  # SHA-256; of nothing if `body_size` is 0


class Response(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer: `ok` with a payload, or an error code that never counts as success."""

    ok: bool
    code: str
    text: str
    retry_after_s: float | None
    payload: bytes
    body_size: int
    body_hash: bytes


@dataclass(frozen=True, slots=True)
class Body:
    """Bytes that travel behind a frame: in memory, or in a file that is never loaded whole."""

    size: int
    sha256: bytes
    data: bytes = b""
    path: Path | None = None

    def read(self) -> bytes:
        """All bytes; only for bodies known to be small."""
        return self.data if self.path is None else self.path.read_bytes()


EMPTY_BODY = Body(0, EMPTY_BODY_HASH)


async def make_body(content: bytes | Path | Body | None) -> Body:
    """Size and hash of what is to be sent.

    Raises:
        OSError: the file cannot be read.
    """
    if content is None:
        return EMPTY_BODY
    if isinstance(content, Body):
        return content
    if isinstance(content, bytes):
        return Body(len(content), sha256(content), content)
    return await trio.to_thread.run_sync(_file_body, content)


def _file_body(path: Path) -> Body:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        return Body(os.fstat(file.fileno()).st_size, digest, path=path)


async def send_body(stream: Stream, body: Body) -> None:
    """Send `body` in units of at most 4 MiB.

    Raises:
        UnreachableError, DeadlineError: the peer left or stalls.
        OSError: the file cannot be read.
    """
    if body.path is None:
        await stream.write(body.data)
        return
    async with await trio.open_file(body.path, "rb") as file:
        left = body.size
        while left > 0:
            piece = await file.read(min(UNIT_BYTES, left))
            if not piece:
                raise OSError(f"{body.path} shrank while it was being sent")
            await stream.write(piece)
            left -= len(piece)


async def receive_body(
    stream: Stream,
    size: int,
    expected_hash: bytes,
    *,
    limits: Limits,
    timeouts: Timeouts,
    spool_dir: Path | None = None,
    to: Path | None = None,
) -> Body:
    """Read a declared body and check its hash.

    Args:
        spool_dir: where bodies above `request_body_memory_bytes` go, as a file of their own.
        to: write to this path in any case; it appears only once size and hash are right.

    Raises:
        WireError: the stream ended early or the hash differs.
        DeadlineError: no progress, or slower than `min_body_bytes_per_s` on the whole.
        UnreachableError: the peer left.
        OSError: the disk is full.
    """
    folder = to.parent if to is not None else spool_dir
    in_memory = to is None and (folder is None or size <= limits.request_body_memory_bytes)
    allowed_s = timeouts.progress_s + size / timeouts.min_body_bytes_per_s
    with trio.move_on_after(allowed_s) as scope:
        if in_memory:
            data = await stream.read_exactly(size)
            if sha256(data) != expected_hash:
                raise WireError("the body does not have the declared hash")
            return Body(size, expected_hash, data)
        assert folder is not None
        return await _receive_file(stream, size, expected_hash, folder, to)
    assert scope.cancelled_caught
    raise DeadlineError(f"{size} bytes did not arrive within {allowed_s:.0f} s")


async def _receive_file(
    stream: Stream, size: int, expected_hash: bytes, folder: Path, to: Path | None
) -> Body:
    descriptor, draft = await trio.to_thread.run_sync(_make_draft, folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            digest = hashlib.sha256()
            left = size
            while left > 0:
                piece = await stream.read_some(min(UNIT_BYTES, left))
                if not piece:
                    raise WireError(f"the body ended {left} bytes early")
                left -= len(piece)
                await trio.to_thread.run_sync(_append, file, digest, piece)
        if digest.digest() != expected_hash:
            raise WireError("the body does not have the declared hash")
        if to is not None:
            os.replace(draft, to)
            draft = to
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return Body(size, expected_hash, path=draft)


def _make_draft(folder: Path) -> tuple[int, Path]:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(prefix="body-", dir=folder)
    return descriptor, Path(name)


def _append(file: BinaryIO, digest: hashlib._Hash, piece: bytes) -> None:
    file.write(piece)
    digest.update(piece)
