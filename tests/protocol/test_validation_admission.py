"""Checks 1 to 3 on plain inputs: every reason for which a unit is turned away before its file is opened."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from intellect_protocol.keys import LocalSigner, work_digest
from intellect_protocol.validation.admission import (
    ExpectedEnvelope,
    Standing,
    WindowState,
    check_envelope,
    check_standing,
    check_window,
    check_work_signature,
)
from intellect_protocol.validation.findings import Kind
from intellect_protocol.wire import Envelope

NODE = LocalSigner(b"\x44" * 32)
NOW_MS = 1_700_000_000_000


def signed_envelope(**changes: Any) -> Envelope:
    fields: dict[str, Any] = {
        "run_id": b"r" * 32,
        "chain_id": 31337,
        "audience": b"peer",
        "message_type": "Submit",
        "content_hash": b"c" * 32,
        "issued_at_ms": NOW_MS,
        "nonce": b"n" * 16,
        **changes,
    }
    envelope = Envelope(**fields)
    return msgspec.structs.replace(envelope, signature=NODE.sign_digest(envelope.digest()))


EXPECTED = ExpectedEnvelope(
    run_id=b"r" * 32,
    chain_id=31337,
    audience=b"peer",
    message_type="Submit",
    content_hash=b"c" * 32,
    now_ms=NOW_MS,
    known_nonce=False,
)


def test_a_request_that_is_meant_for_us_here_and_now_passes() -> None:
    assert check_envelope(signed_envelope(), EXPECTED) == []


@pytest.mark.parametrize("skew_ms", [-120_000, 120_000])
def test_a_clock_may_be_two_minutes_off(skew_ms: int) -> None:
    assert check_envelope(signed_envelope(issued_at_ms=NOW_MS + skew_ms), EXPECTED) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"run_id": b"s" * 32}, "wrong_run"),
        ({"chain_id": 1}, "wrong_chain"),
        ({"audience": b"other"}, "wrong_audience"),
        ({"message_type": "Abandon"}, "wrong_type"),
        ({"content_hash": b"d" * 32}, "wrong_content"),
        ({"nonce": b"short"}, "bad_nonce"),
        ({"issued_at_ms": NOW_MS - 120_001}, "clock"),
        ({"issued_at_ms": NOW_MS + 120_001}, "clock"),
    ],
)
def test_an_envelope_that_says_something_else_is_invalid(changes: dict[str, Any], code: str) -> None:
    findings = check_envelope(signed_envelope(**changes), EXPECTED)
    assert [(finding.code, finding.kind) for finding in findings] == [(code, Kind.INVALID)]


def test_a_request_is_accepted_once() -> None:
    expected = msgspec.structs.replace(EXPECTED, known_nonce=True)
    assert [finding.code for finding in check_envelope(signed_envelope(), expected)] == ["replay"]


@pytest.mark.parametrize("signature", [b"", b"\x00" * 65, b"\xff" * 65])
def test_a_malformed_signature_is_invalid(signature: bytes) -> None:
    envelope = msgspec.structs.replace(signed_envelope(), signature=signature)
    assert [finding.code for finding in check_envelope(envelope, EXPECTED)] == ["bad_signature"]


WORK: dict[str, Any] = {
    "run_id": b"r" * 32,
    "version": 7,
    "checkpoint_hash": b"c" * 32,
    "index": 4,
    "file_hash": b"f" * 32,
    "size_bytes": 1000,
}


def test_the_work_signature_covers_every_field_of_the_unit() -> None:
    signature = NODE.sign_digest(work_digest(**WORK))
    assert check_work_signature(**WORK, signature=signature, node=NODE.address_bytes) == []
    others = {
        "run_id": b"s" * 32,
        "version": 8,
        "checkpoint_hash": b"d" * 32,
        "index": 5,
        "file_hash": b"g" * 32,
        "size_bytes": 1001,
    }
    for name, value in others.items():
        changed = {**WORK, name: value}
        findings = check_work_signature(**changed, signature=signature, node=NODE.address_bytes)
        assert [finding.code for finding in findings] == ["bad_work_signature"], name
    assert check_work_signature(**WORK, signature=signature, node=b"\x01" * 20)


STANDING = Standing(
    stake=100,
    min_stake=100,
    unbonding=False,
    evicted=False,
    bound_at_block=9,
    recorded_at_block=10,
    units=3,
    unit_cap=4,
)


def test_a_staked_node_below_its_owners_cap_may_work() -> None:
    assert check_standing(STANDING) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"stake": 99}, "no_stake"),
        ({"unbonding": True}, "unbonding"),
        ({"evicted": True}, "evicted"),
        ({"bound_at_block": None}, "not_bound"),
        ({"bound_at_block": 10}, "bound_late"),
        ({"units": 4}, "unit_cap"),
    ],
)
def test_a_node_without_standing_is_turned_away(changes: dict[str, Any], code: str) -> None:
    findings = check_standing(msgspec.structs.replace(STANDING, **changes))
    assert [(finding.code, finding.kind) for finding in findings] == [(code, Kind.INVALID)]


WINDOW = WindowState(head=10, async_level=2, recorded_hash=b"c" * 32, next_index=3)


@pytest.mark.parametrize("version", [8, 9, 10])
def test_versions_within_the_async_level_are_open(version: int) -> None:
    assert check_window(version, b"c" * 32, 3, WINDOW) == []


@pytest.mark.parametrize(
    ("version", "checkpoint_hash", "index", "code"),
    [
        (7, b"c" * 32, 3, "stale_version"),
        (11, b"c" * 32, 3, "future_version"),
        (10, b"d" * 32, 3, "wrong_checkpoint"),
        (10, b"c" * 32, 4, "index_gap"),
        (10, b"c" * 32, 2, "index_closed"),
    ],
)
def test_a_unit_outside_the_window_is_stale(
    version: int, checkpoint_hash: bytes, index: int, code: str
) -> None:
    findings = check_window(version, checkpoint_hash, index, WINDOW)
    assert [(finding.code, finding.kind) for finding in findings] == [(code, Kind.STALE)]


def test_all_problems_of_a_request_are_listed() -> None:
    envelope = signed_envelope(run_id=b"s" * 32, chain_id=1, issued_at_ms=0)
    codes = {finding.code for finding in check_envelope(envelope, EXPECTED)}
    assert codes == {"wrong_run", "wrong_chain", "clock"}
