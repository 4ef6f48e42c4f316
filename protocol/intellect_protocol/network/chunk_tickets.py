"""Tickets: who may fetch chunks over HTTP from a data plane, and until when.

libp2p authenticates the peer; the ticket carries that fact to the HTTP server in the other process.
Issuer and checker share a key that never leaves the machine, and the clock that expiry refers to.

Token: base64url(u64 expires_at_ms | u8 length | peer id | HMAC-SHA256), the MAC being over
``intellect/chunk-ticket/1`` | run id | u64 expires_at_ms | u8 length | peer id.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import struct

from ..wire import short, u64

_DOMAIN = b"intellect/chunk-ticket/1"
_MAC_BYTES = 32
MAX_TOKEN_CHARS = 512


def issue_ticket(key: bytes, run_id: bytes, peer_id: bytes, expires_at_ms: int) -> str:
    """A token that lets `peer_id` fetch chunks of the run until `expires_at_ms`."""
    claim = u64(expires_at_ms) + short(peer_id)
    return base64.urlsafe_b64encode(claim + _mac(key, run_id, claim)).decode()


def check_ticket(key: bytes, run_id: bytes, token: str, now_ms: int) -> bytes | None:
    """Peer id that a valid token names; None if it is malformed, forged or expired."""
    if len(token) > MAX_TOKEN_CHARS:
        return None
    try:
        raw = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        return None
    if base64.urlsafe_b64encode(raw).decode() != token:
        return None  # a second spelling of the same bytes
    claim, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
    if len(claim) < 9 or len(claim) != 9 + claim[8]:
        return None
    if not hmac.compare_digest(mac, _mac(key, run_id, claim)):
        return None
    expires_at_ms: int = struct.unpack("<Q", claim[:8])[0]
    return claim[9:] if now_ms < expires_at_ms else None


def _mac(key: bytes, run_id: bytes, claim: bytes) -> bytes:
    return hmac.digest(key, _DOMAIN + run_id + claim, "sha256")
