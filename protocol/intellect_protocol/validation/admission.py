"""Checks 1 to 3: may this node submit this unit now? On plain inputs, before any file is opened.

The coordinator runs them when a request arrives; a validator repeats what its job lets it see (the work
signature). None of these findings costs a node anything but the work.
"""

from __future__ import annotations

import msgspec

from ..keys import address_bytes, recover_address, work_digest
from ..wire import Envelope
from .findings import Check, Finding, Kind

MAX_CLOCK_SKEW_MS = 120_000


class ExpectedEnvelope(msgspec.Struct, frozen=True):
    """What an envelope must say to be meant for us, here and now.

    Attributes:
        audience: our peer id. content_hash: SHA-256 over payload and body hash, as we computed it.
        now_ms: our clock, Unix milliseconds.
        known_nonce: whether this signer's nonce was seen before.
    """

    run_id: bytes
    chain_id: int
    audience: bytes
    message_type: str
    content_hash: bytes
    now_ms: int
    known_nonce: bool


class Standing(msgspec.Struct, frozen=True):
    """A node and its owner as the ledger has them.

    Attributes:
        stake, min_stake: of this node, in the token's smallest unit.
        bound_at_block: block of the node's binding and stake, None if it is not bound.
        recorded_at_block: block in which the version's checkpoint hash was recorded.
        units, unit_cap: units of this version accepted or open for the owner, and the run's cap.
    """

    stake: int
    min_stake: int
    unbonding: bool
    evicted: bool
    bound_at_block: int | None
    recorded_at_block: int
    units: int
    unit_cap: int


class WindowState(msgspec.Struct, frozen=True):
    """Where the run stands when a unit is precommitted.

    Attributes:
        head: newest version. async_level: how many versions back are still accepted.
        recorded_hash: the version's checkpoint hash on the ledger, None if none is recorded.
        next_index: the lowest unit index of this node and version that is neither submitted nor abandoned.
    """

    head: int
    async_level: int
    recorded_hash: bytes | None
    next_index: int


def check_envelope(envelope: Envelope, expected: ExpectedEnvelope) -> list[Finding]:
    """Check 1 on a request: run, chain, audience, type, content, clock, replay and signature."""
    skew_ms = envelope.issued_at_ms - expected.now_ms
    problems = [
        (envelope.run_id != expected.run_id, "wrong_run", "the request is for another run"),
        (envelope.chain_id != expected.chain_id, "wrong_chain", "the request is for another chain"),
        (envelope.audience != expected.audience, "wrong_audience", "the request is for another peer"),
        (envelope.message_type != expected.message_type, "wrong_type", "signed as another kind of request"),
        (envelope.content_hash != expected.content_hash, "wrong_content", "signed over other content"),
        (len(envelope.nonce) != 16, "bad_nonce", "a nonce has 16 bytes"),
        (expected.known_nonce, "replay", "the request was received before"),
        (
            recover_address(envelope.digest(), envelope.signature) is None,
            "bad_signature",
            "the request's signature is malformed",
        ),
    ]
    findings = [_invalid(Check.ENVELOPE, code, text) for wrong, code, text in problems if wrong]
    if abs(skew_ms) > MAX_CLOCK_SKEW_MS:
        text = f"the sender's clock is {skew_ms / 1000:+.0f} s off, at most {MAX_CLOCK_SKEW_MS // 1000} s"
        findings.append(
            Finding(Check.ENVELOPE, "clock", Kind.INVALID, text, None, abs(skew_ms), MAX_CLOCK_SKEW_MS)
        )
    return findings


def check_work_signature(
    run_id: bytes,
    version: int,
    checkpoint_hash: bytes,
    index: int,
    file_hash: bytes,
    size_bytes: int,
    signature: bytes,
    node: bytes,
) -> list[Finding]:
    """Check 1 on the work itself: the node key signed exactly this file for exactly this unit."""
    digest = work_digest(run_id, version, checkpoint_hash, index, file_hash, size_bytes)
    signer = recover_address(digest, signature)
    if signer is not None and address_bytes(signer) == node:
        return []
    return [
        _invalid(Check.ENVELOPE, "bad_work_signature", "the node key did not sign this file for this unit")
    ]


def check_standing(standing: Standing) -> list[Finding]:
    """Check 2: an active stake that was there before the checkpoint was recorded, within the owner's cap."""
    bound = standing.bound_at_block
    problems = [
        (bound is None, "not_bound", "the node key is not bound to a wallet"),
        (standing.evicted, "evicted", "the node was evicted from the run"),
        (standing.unbonding, "unbonding", "the node's stake is being withdrawn"),
        (
            standing.stake < standing.min_stake,
            "no_stake",
            f"stake of {standing.stake} is below the minimum of {standing.min_stake}",
        ),
        (
            bound is not None and bound >= standing.recorded_at_block,
            "bound_late",
            f"bound in block {bound}, not before the version was recorded in {standing.recorded_at_block}",
        ),
        (
            standing.units >= standing.unit_cap,
            "unit_cap",
            f"the owner has {standing.units} units of this version, the cap is {standing.unit_cap}",
        ),
    ]
    return [_invalid(Check.STANDING, code, text) for wrong, code, text in problems if wrong]


def check_window(version: int, checkpoint_hash: bytes, index: int, state: WindowState) -> list[Finding]:
    """Check 3: a version that is still open, the checkpoint that was recorded, and no gap in the indices."""
    oldest = state.head - state.async_level
    problems = [
        (version > state.head, "future_version", f"version {version} is ahead of the head, {state.head}"),
        (version < oldest, "stale_version", f"version {version} is older than {oldest}, the oldest accepted"),
        (
            checkpoint_hash != state.recorded_hash,
            "wrong_checkpoint",
            f"made with another checkpoint than the recorded version {version}",
        ),
        (
            index > state.next_index,
            "index_gap",
            f"unit {index} follows a gap: unit {state.next_index} is neither submitted nor abandoned",
        ),
        (index < state.next_index, "index_closed", f"unit {index} was submitted or abandoned before"),
    ]
    return [Finding(Check.WINDOW, code, Kind.STALE, text) for wrong, code, text in problems if wrong]


def _invalid(check: Check, code: str, text: str) -> Finding:
    return Finding(check, code, Kind.INVALID, text)
