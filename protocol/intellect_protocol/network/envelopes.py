"""Signed requests: making envelopes, and refusing forged, misdirected, stale and replayed ones.

A nonce is kept for longer than an envelope may be old, so a replay is either too old or remembered.
The table holds more than all connections together may send in that time at their allowed rate; were
it full, new requests would be put off, and none would be forgotten.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable

from msgspec.structs import replace

from ..errors import RefusedError
from ..keys import Signer, recover_address
from ..wire import Envelope, content_hash, sha256
from .rpc import BUSY, CLOCK, REPLAYED, UNSIGNED, Request

MAX_CLOCK_DIFFERENCE_MS = 120_000


def seal(
    signer: Signer,
    *,
    run_id: bytes,
    chain_id: int,
    audience: bytes,
    message_type: str,
    payload: bytes,
    body_hash: bytes,
    now_ms: int,
) -> Envelope:
    """A signed envelope for one request to one peer."""
    bare = Envelope(
        run_id=run_id,
        chain_id=chain_id,
        audience=audience,
        message_type=message_type,
        content_hash=content_hash(payload, body_hash),
        issued_at_ms=now_ms,
        nonce=secrets.token_bytes(16),
    )
    return replace(bare, signature=signer.sign_digest(bare.digest()))


class EnvelopeChecker:
    """Recovers the signer of requests to this peer, each of them once."""

    def __init__(
        self, run_id: bytes, chain_id: int, audience: bytes, max_nonces: int, wall_clock: Callable[[], float]
    ) -> None:
        self._run_id = run_id
        self._chain_id = chain_id
        self._audience = audience
        self._max_nonces = max_nonces
        self._wall_clock = wall_clock
        self._nonces: OrderedDict[bytes, int] = OrderedDict()  # -> expiry in ms

    def signer_of(self, request: Request) -> str:
        """The address that signed `request`.

        Raises:
            RefusedError: no envelope or not for this request, peer, run or chain
                (``bad_signature``); too old or from the future (``clock``); seen (``replayed``).
        """
        envelope = request.envelope
        if envelope is None:
            raise RefusedError(UNSIGNED, f"{request.type} must be signed")
        for ok, text in (
            (envelope.run_id == self._run_id, "signed for another run"),
            (envelope.chain_id == self._chain_id, "signed for another chain"),
            (envelope.audience == self._audience, "signed for another receiver"),
            (envelope.message_type == request.type, "signed as another request"),
            (len(envelope.nonce) == 16, "the nonce must have 16 bytes"),
            (0 <= envelope.issued_at_ms < 1 << 63, "the time is out of range"),
            (
                envelope.content_hash == content_hash(request.payload, request.body_hash),
                "signed for other content",
            ),
        ):
            if not ok:
                raise RefusedError(UNSIGNED, text)
        now_ms = int(self._wall_clock() * 1000)
        difference_ms = envelope.issued_at_ms - now_ms
        if abs(difference_ms) > MAX_CLOCK_DIFFERENCE_MS:
            raise RefusedError(
                CLOCK, f"the request's clock differs by {difference_ms / 1000:.0f} s from ours"
            )
        signer = recover_address(envelope.digest(), envelope.signature)
        if signer is None:
            raise RefusedError(UNSIGNED, "the signature is malformed")
        self._remember(signer, envelope, now_ms)
        return signer

    def _remember(self, signer: str, envelope: Envelope, now_ms: int) -> None:
        while self._nonces and next(iter(self._nonces.values())) < now_ms:
            self._nonces.popitem(last=False)
        key = sha256(signer.encode(), envelope.nonce)[:16]
        if key in self._nonces:
            raise RefusedError(REPLAYED, "this request was made before; sign it anew")
        if len(self._nonces) >= self._max_nonces:
            raise RefusedError(BUSY, "too many signed requests", MAX_CLOCK_DIFFERENCE_MS / 1000)
        # Twice the accepted difference: an envelope from the future is accepted until then.
        self._nonces[key] = now_ms + 2 * MAX_CLOCK_DIFFERENCE_MS
