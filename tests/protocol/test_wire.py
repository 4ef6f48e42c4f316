"""Strict decoding of untrusted bytes."""

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intellect_protocol import wire
from intellect_protocol.errors import WireError
from intellect_protocol.messages import Announcement, WorkStatus


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    x: int
    y: bytes


@given(st.integers(-(2**63), 2**64 - 1), st.binary(max_size=300))
def test_canonical_encoding_round_trips(x: int, y: bytes) -> None:
    assert wire.decode_canonical(wire.encode(Point(x, y)), Point) == Point(x, y)


@given(st.binary(max_size=400))
def test_arbitrary_bytes_raise_only_wire_errors(data: bytes) -> None:
    for shape in (Point, Announcement, WorkStatus):
        try:
            wire.decode(data, shape)
        except WireError:
            continue


def test_every_other_encoding_of_a_value_is_refused() -> None:
    longer_integer = msgpack.packb({"x": 1, "y": b""}).replace(b"\x01", b"\xcd\x00\x01")
    reordered = msgpack.packb({"y": b"", "x": 1})
    for data in (longer_integer, reordered):
        assert wire.decode(data, Point) == Point(1, b"")
        with pytest.raises(WireError, match="canonical"):
            wire.decode_canonical(data, Point)


@pytest.mark.parametrize(
    "data",
    [
        msgpack.packb({"x": 1}),
        msgpack.packb({"x": 1, "y": b"", "z": 0}),
        msgpack.packb({"x": "1", "y": b""}),
        msgpack.packb({"x": 1, "y": b""}) + b"\x00",
        msgpack.packb({"x": msgpack.ExtType(4, b"code"), "y": b""}),
        b"\x91" * 4000,
        b"\xdd\xff\xff\xff\xff",
        b"",
    ],
    ids=["missing", "unknown", "type", "trailing", "extension", "deep", "huge array", "empty"],
)
def test_bytes_of_another_shape_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode(data, Point)


def test_frames_announce_their_length_and_have_a_limit() -> None:
    framed = wire.frame(b"abc")
    assert wire.frame_length(framed[:4]) == 3
    assert framed[4:] == b"abc"
    with pytest.raises(WireError):
        wire.frame(b"abc", max_bytes=2)
    with pytest.raises(WireError):
        wire.frame_length(b"\xff\xff\xff\xff")
    with pytest.raises(WireError):
        wire.frame_length(b"\x00\x00")


def test_an_envelope_signs_every_field() -> None:
    envelope = wire.Envelope(b"r" * 32, 1, b"peer", "Submit", b"h" * 32, 5, b"n" * 16)
    changed = [
        msgspec.structs.replace(envelope, **change)
        for change in (
            {"run_id": b"s" * 32},
            {"chain_id": 2},
            {"audience": b"pier"},
            {"message_type": "Abandon"},
            {"content_hash": b"i" * 32},
            {"issued_at_ms": 6},
            {"nonce": b"m" * 16},
        )
    ]
    assert len({envelope.digest(), *(other.digest() for other in changed)}) == len(changed) + 1


def test_deeply_nested_json_is_an_error_and_not_the_end_of_the_process() -> None:
    import sys

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000_000)  # as py_ecc does, when the ledger's libraries are loaded
    try:
        for opening in (b"[", b'{"a":'):
            with pytest.raises(WireError, match="nested"):
                wire.decode_json(opening * 100_000, max_bytes=1 << 20)
    finally:
        sys.setrecursionlimit(limit)
    assert wire.decode_json(b'{"a": [1, "x"]}', max_bytes=100) == {"a": [1, "x"]}
    for data in (b"", b"{", b"\xff", b"[1] 2"):
        with pytest.raises(WireError):
            wire.decode_json(data, max_bytes=100)
