"""Frames of the control stream `/intellect/chunks/1` between two peers.

Both sides send `Hello` first. Then either says which versions it downloads (`Want`) and is told
what the other offers (`Bitfield`, later `Have`). `Ask` asks for an upload slot: the answer is a
`Ticket` for the HTTP data plane or `Busy`. `Request`, `Data` and `Refuse` carry chunks on the
stream itself where the data plane cannot be reached. `Peers` tells of others in the same version.

Bitfields: bit i of byte i // 8, least significant first, is chunk i; trailing zero bytes may be
left out. `c` is the checkpoint hash C, 32 bytes.
"""

from __future__ import annotations

import ipaddress
from typing import cast

import msgspec

from ..checkpoint import HASH_BYTES
from ..errors import WireError
from ..wire import decode, encode
from .chunk_tickets import MAX_TOKEN_CHARS

PROTOCOL = "/intellect/chunks/1"
MAX_FRAME_BYTES = 384 << 10
DATA_BYTES = 256 << 10  # of a chunk in one Data frame: other frames get their turn in between
MAX_BITFIELD_BYTES = 32 << 10
MAX_INDEXES = 4096
MAX_PEERS = 16


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t"):
    pass


class Hello(_Frame, frozen=True, tag="hello"):
    """First frame of each side; an origin is the run's seeder or coordinator."""

    run_id: bytes
    origin: bool


class Want(_Frame, frozen=True, tag="want"):
    """I download version `c` and have the chunks of `bits`: tell me what you offer, from now on."""

    c: bytes
    bits: bytes


class Bitfield(_Frame, frozen=True, tag="bitfield"):
    """What I offer of version `c`, replacing what I said before."""

    c: bytes
    bits: bytes


class Have(_Frame, frozen=True, tag="have"):
    """I have, or offer, these chunks too."""

    c: bytes
    indexes: list[int]


class Done(_Frame, frozen=True, tag="done"):
    """I do not download version `c` any more; `complete` if I have all of it."""

    c: bytes
    complete: bool


class Peers(_Frame, frozen=True, tag="peers"):
    """Full multiaddresses of others that download or hold version `c`."""

    c: bytes
    addresses: list[str]


class Ask(_Frame, frozen=True, tag="ask"):
    """May I download from you?"""


class Ticket(_Frame, frozen=True, tag="ticket"):
    """Yes, for `lifetime_s`: over HTTP at `address` (empty: where you see me) and `port`.

    Port 0: there is no data plane; ask on this stream.
    """

    address: str
    port: int
    token: str
    lifetime_s: float


class Busy(_Frame, frozen=True, tag="busy"):
    """Not now: ask again after `retry_after_s`."""

    retry_after_s: float


class Request(_Frame, frozen=True, tag="request"):
    """Send me chunk `index` on this stream."""

    c: bytes
    index: int


class Data(_Frame, frozen=True, tag="data"):
    """Bytes of a requested chunk from `offset`; pieces come in order."""

    c: bytes
    index: int
    offset: int
    data: bytes


class Refuse(_Frame, frozen=True, tag="refuse"):
    """A `Request` that is not served; `gone` if the chunk is not here."""

    c: bytes
    index: int
    gone: bool


class Keep(_Frame, frozen=True, tag="keep"):
    """I am still here."""


Frame = Hello | Want | Bitfield | Have | Done | Peers | Ask | Ticket | Busy | Request | Data | Refuse | Keep


def encode_frame(frame: Frame) -> bytes:
    """Canonical msgpack."""
    return encode(frame)


def decode_frame(payload: bytes) -> Frame:
    """Decode an untrusted frame and check every field against its limits.

    Raises:
        WireError: malformed or out of limits.
    """
    value = cast(Frame, decode(payload, cast(type[Hello], Frame), max_bytes=MAX_FRAME_BYTES))
    problem = _problem(value)
    if problem:
        raise WireError(f"{type(value).__name__} frame: {problem}")
    return value


def _problem(frame: Frame) -> str:
    checkpoint = getattr(frame, "c", None)
    if checkpoint is not None and len(checkpoint) != HASH_BYTES:
        return "not a checkpoint hash"
    match frame:
        case Hello() if len(frame.run_id) != HASH_BYTES:
            return "not a run id"
        case Want() | Bitfield() if len(frame.bits) > MAX_BITFIELD_BYTES:
            return "bitfield too long"
        case Have() if len(frame.indexes) > MAX_INDEXES or any(map(_bad_index, frame.indexes)):
            return "bad indexes"
        case Peers() if len(frame.addresses) > MAX_PEERS or any(len(text) > 512 for text in frame.addresses):
            return "too many or too long addresses"
        case Request() | Refuse() if _bad_index(frame.index):
            return "bad index"
        case Data() if _bad_index(frame.index) or len(frame.data) > DATA_BYTES or frame.offset < 0:
            return "bad piece"
        case Busy() if not 0.0 <= frame.retry_after_s <= 3600.0:
            return "bad time"
        case Ticket():
            return _ticket_problem(frame)
    return ""


def _ticket_problem(ticket: Ticket) -> str:
    if not 0 <= ticket.port < 1 << 16 or not 0.0 < ticket.lifetime_s <= 3600.0:
        return "bad port or time"
    if len(ticket.token) > MAX_TOKEN_CHARS or not ticket.token.isascii() or not ticket.token.isprintable():
        return "bad token"
    if ticket.address:
        try:
            ipaddress.ip_address(ticket.address)
        except ValueError:
            return "the address is not an IP address"
    return ""


def _bad_index(index: int) -> bool:
    return not 0 <= index < MAX_BITFIELD_BYTES * 8


def pack_bits(mask: int) -> bytes:
    """A bit mask as bitfield bytes."""
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def unpack_bits(bits: bytes) -> int:
    """Bitfield bytes as a bit mask."""
    return int.from_bytes(bits, "little")
