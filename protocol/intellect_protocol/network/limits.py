"""Limits and time-outs of the network, and the token bucket that enforces rates.

Both are small complete values that are passed in: no module has a default of its own, so every
time-out really reaches the dialer and a test can shrink them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds on what other peers may make this host hold or do."""

    connections: int = 64
    connections_per_address: int = 64  # NAT and loopback put many honest peers behind one address
    pending_upgrades: int = 128  # inbound sockets before the end of their handshake
    pending_upgrades_per_address: int = 64
    dials: int = 16  # at once
    addresses_per_peer: int = 4  # tried per dial
    streams_per_connection: int = 256  # inbound, at once
    requests_per_peer: int = 8  # at once
    requests_per_s: float = 20.0  # per peer
    request_burst: int = 40  # per peer
    unread_bytes_per_peer: int = 32 << 20
    request_body_memory_bytes: int = 1 << 20  # larger bodies are spooled to a file
    spooled_bytes: int = 4 << 30  # of all request bodies at once
    provider_keys: int = 10_000  # foreign records held for the DHT
    gossip_message_bytes: int = 64 << 10
    gossip_per_s: float = 200.0  # per forwarding peer and topic
    nonces: int = 400_000  # above connections * requests_per_s * 240 s
    barred_peers: int = 4096
    cached_peers: int = 64  # written to disk for the next start
    run_peers: int = 16  # peers of the run this host keeps a connection to


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds. `*_interval_s` are periods, all others are deadlines."""

    dial_s: float = 5.0
    bootstrap_dial_s: float = 30.0  # a bootstrap that answers after 20 s still works
    bootstrap_attempts: int = 5
    bootstrap_pause_s: float = 1.0  # doubles after each attempt
    upgrade_s: float = 5.0  # inbound handshake
    negotiate_s: float = 5.0  # protocol of a stream
    query_s: float = 3.0  # one DHT message
    ping_s: float = 5.0
    ping_interval_s: float = 10.0
    failed_dial_pause_s: float = 10.0  # before a peer whose addresses all failed is dialled again
    stalled_write_s: float = 10.0  # a peer that reads nothing for this long is disconnected
    progress_s: float = 10.0  # between two pieces of a body
    min_body_bytes_per_s: float = 64 << 10  # slower senders are cut off
    request_s: float = 10.0  # to send the first frame of a request
    handler_s: float = 60.0
    hello_s: float = 5.0
    close_s: float = 4.0
    grace_s: float = 10.0  # before a stranger has to make room for a newcomer
    refresh_interval_s: float = 60.0  # routing table, rendezvous, peer cache
    alone_interval_s: float = 5.0  # checks whether there is any connection left
    reprovide_interval_s: float = 600.0
    record_lifetime_s: float = 3600.0  # of provider records
    barred_s: float = 30.0  # first pause of a misbehaving peer; doubles each time
    barred_max_s: float = 3600.0


class TokenBucket:
    """Allows `rate_per_s` on average and `burst` at once."""

    def __init__(self, rate_per_s: float, burst: float, clock: Callable[[], float]) -> None:
        self._rate = rate_per_s
        self._burst = burst
        self._clock = clock
        self._tokens = burst
        self._updated = clock()

    def take(self) -> float:
        """Take one token: 0.0 if there was one, else the seconds until there will be."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._updated) * self._rate)
        self._updated = now
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / self._rate
