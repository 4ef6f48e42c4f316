"""Bytes on the wire: canonical msgpack, strict decoding, length-prefixed frames, signed envelopes.

Decoding is done in two steps so that no hostile shape reaches a typed struct: `msgpack` parses
with limits on every length, no extension types and a bounded depth; `msgspec` then checks the
shape. Encoding is canonical (struct field order, shortest integer forms), and `decode_canonical`
refuses bytes that do not re-encode to themselves, so a hash over bytes is a hash over meaning.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any, NoReturn, TypeVar

import msgpack
import msgspec

from .errors import WireError

MAX_FRAME_BYTES = 1 << 20
MAX_DEPTH = 16
MAX_ITEMS = 200_000
MAX_JSON_DEPTH = 500
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

T = TypeVar("T")


def encode(value: object) -> bytes:
    """Canonical msgpack of a struct or of plain values."""
    return msgspec.msgpack.encode(value)


def _no_extensions(code: int, data: bytes) -> NoReturn:
    raise WireError(f"extension type {code} is not allowed")


def _check_depth(value: object, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise WireError(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, (str, int, bytes)):
                raise WireError("map keys must be strings, integers or bytes")
            _check_depth(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_depth(item, depth + 1)


def decode(data: bytes, shape: type[T], *, max_bytes: int = MAX_FRAME_BYTES) -> T:
    """Decode untrusted `data` into `shape` (a msgspec struct type or a plain type).

    Raises:
        WireError: too long, not msgpack, too deep, trailing bytes or the wrong shape.
    """
    if len(data) > max_bytes:
        raise WireError(f"{len(data)} bytes exceed the limit of {max_bytes}")
    try:
        plain: Any = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            ext_hook=_no_extensions,
            max_str_len=max_bytes,
            max_bin_len=max_bytes,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
        _check_depth(plain)
        return msgspec.convert(plain, shape, strict=True)
    except WireError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"malformed message: {error}") from error


def decode_canonical(data: bytes, shape: type[T], *, max_bytes: int = MAX_FRAME_BYTES) -> T:
    """`decode`, and refuse bytes that are not the canonical encoding of what they say.

    Raises:
        WireError: as `decode`, or the encoding is not canonical.
    """
    value = decode(data, shape, max_bytes=max_bytes)
    if encode(value) != data:
        raise WireError("not the canonical encoding")
    return value


def decode_json(data: bytes, *, max_bytes: int, **hooks: Any) -> Any:
    """Plain values of untrusted JSON; `hooks` are those of `json.loads`.

    Nesting is bounded before the parser sees it: py_ecc, which comes with our libraries, raises the
    interpreter's recursion limit so far that deeply nested text would end the process. Brackets
    inside strings count too, which no document of ours comes near.

    Raises:
        WireError: too long, too deep, or not JSON.
    """
    if len(data) > max_bytes:
        raise WireError(f"{len(data)} bytes exceed the limit of {max_bytes}")
    depth = 0
    for bracket in data.translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_JSON_DEPTH:
            raise WireError(f"nested deeper than {MAX_JSON_DEPTH} levels")
    try:
        return json.loads(data, **hooks)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from error


def frame(payload: bytes, *, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Prefix `payload` with its length (u32, big-endian).

    Raises:
        WireError: longer than `max_bytes`.
    """
    if len(payload) > max_bytes:
        raise WireError(f"{len(payload)} bytes exceed the frame limit of {max_bytes}")
    return struct.pack(">I", len(payload)) + payload


def frame_length(prefix: bytes, *, max_bytes: int = MAX_FRAME_BYTES) -> int:
    """Length announced by a 4-byte frame prefix.

    Raises:
        WireError: not 4 bytes, or longer than `max_bytes`.
    """
    if len(prefix) != 4:
        raise WireError("connection closed inside a frame prefix")
    length: int = struct.unpack(">I", prefix)[0]
    if length > max_bytes:
        raise WireError(f"frame of {length} bytes exceeds the limit of {max_bytes}")
    return length


def u32(value: int) -> bytes:
    """Little-endian unsigned 32-bit integer."""
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    """Little-endian unsigned 64-bit integer."""
    return struct.pack("<Q", value)


def short(data: bytes) -> bytes:
    """`data` (at most 255 bytes) behind its length in one byte."""
    if len(data) > 255:
        raise WireError("field longer than 255 bytes")
    return bytes([len(data)]) + data


def sha256(*parts: bytes) -> bytes:
    """SHA-256 over the concatenation of `parts`."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request's signature by a node, validator, publisher or coordinator key.

    The signer is the subject of the request: no field of the payload may name another.
    """

    run_id: bytes
    chain_id: int
    audience: bytes  # peer id of the receiver
    message_type: str
    content_hash: bytes  # SHA-256(payload | SHA-256(body))
    issued_at_ms: int
    nonce: bytes  # 16 random bytes
    signature: bytes = b""  # 65 bytes r | s | v, low s

    def digest(self) -> bytes:
        """The 32 bytes that are signed, under the domain ``intellect/rpc/1``."""
        return sha256(
            b"intellect/rpc/1",
            self.run_id,
            u64(self.chain_id),
            short(self.audience),
            short(self.message_type.encode()),
            self.content_hash,
            u64(self.issued_at_ms),
            self.nonce,
        )


def content_hash(payload: bytes, body_hash: bytes) -> bytes:
    """What an envelope binds: SHA-256 over the payload followed by the body's SHA-256 (32 bytes)."""
    return sha256(payload, body_hash)


EMPTY_BODY_HASH = sha256(b"")
