"""What is known about each peer: who it is, how it behaves, and for how long it is barred.

Everything about a connected peer is forgotten when it leaves, but for the pause of a misbehaving
one: that grows with each offence and lives in a bounded table until it has run out.
"""

from __future__ import annotations

import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UsageError, WireError
from ..keys import peer_id_text
from ..wire import decode_json
from .addresses import PeerAddress, parse_address
from .limits import Limits, Timeouts, TokenBucket

_MAX_CACHE_BYTES = 256 * 1024
_BAR_BELOW = -10.0
_BEST_SCORE = 10.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Peer:
    """A connected peer."""

    peer_id: bytes
    inbound: bool
    since: float  # trio clock
    bucket: TokenBucket
    score: float = 0.0
    in_flight: int = 0  # requests being served
    role: str = ""
    agent: str = ""
    protocol: int = 0
    node: str = ""  # node key, once both keys and the ledger vouch for the binding
    greeted: bool = False
    latency_s: float | None = None
    missed_pings: int = 0
    tags: set[str] = field(default_factory=set)  # why it is worth keeping, e.g. "run"


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One line of the peer table."""

    peer_id: bytes
    address: str
    agent: str
    role: str
    protocol: int
    node: str
    score: float
    bytes_in: int
    bytes_out: int
    latency_s: float | None
    connected_s: float
    inbound: bool


@dataclass(slots=True)
class _Bar:
    until: float
    strikes: int


class PeerTable:
    """Connected peers, their scores, and the peers that are barred for now."""

    def __init__(self, limits: Limits, timeouts: Timeouts, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._timeouts = timeouts
        self._clock = clock
        self._peers: dict[bytes, Peer] = {}
        self._bars: OrderedDict[bytes, _Bar] = OrderedDict()

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, peer_id: bytes) -> Peer | None:
        """The connected peer, or None."""
        return self._peers.get(peer_id)

    def joined(self, peer_id: bytes, *, inbound: bool) -> Peer:
        """The entry of a peer that has a connection now."""
        peer = self._peers.get(peer_id)
        if peer is None:
            bucket = TokenBucket(self._limits.requests_per_s, self._limits.request_burst, self._clock)
            peer = self._peers[peer_id] = Peer(peer_id, inbound, self._clock(), bucket)
        return peer

    def left(self, peer_id: bytes) -> None:
        """Forget a peer that has no connection any more."""
        self._peers.pop(peer_id, None)

    def praise(self, peer_id: bytes, weight: float = 0.1) -> None:
        """A peer was useful."""
        peer = self._peers.get(peer_id)
        if peer is not None:
            peer.score = min(_BEST_SCORE, peer.score + weight)

    def blame(self, peer_id: bytes, reason: str, weight: float = 1.0) -> bool:
        """A peer misbehaved; True if it is to be disconnected and was barred."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return False
        peer.score -= weight
        logger.debug("peer %s: %s (score %.1f)", peer_id_text(peer_id), reason, peer.score)
        if peer.score > _BAR_BELOW:
            return False
        self.bar(peer_id, reason)
        return True

    def bar(self, peer_id: bytes, reason: str) -> float:
        """Refuse a peer for a pause that doubles with each offence; returns it in seconds."""
        bar = self._bars.pop(peer_id, None) or _Bar(0.0, 0)
        pause = min(self._timeouts.barred_max_s, self._timeouts.barred_s * 2.0**bar.strikes)
        bar.strikes += 1
        bar.until = self._clock() + pause
        self._bars[peer_id] = bar
        while len(self._bars) > self._limits.barred_peers:
            self._bars.popitem(last=False)
        logger.info("peer %s is barred for %.0f s: %s", peer_id_text(peer_id), pause, reason)
        return pause

    def barred_for(self, peer_id: bytes) -> float:
        """Seconds until a peer may come back; 0.0 if it may now."""
        bar = self._bars.get(peer_id)
        if bar is None:
            return 0.0
        left = bar.until - self._clock()
        if left <= -self._timeouts.barred_max_s:
            del self._bars[peer_id]  # long behaved: its offences are forgotten too
        return max(0.0, left)

    def least_useful(self, exempt: bytes) -> Peer | None:
        """Whom to drop for a newcomer: an unbound inbound peer, worst score and oldest first.

        None if all are worth keeping or came less than `grace_s` ago: then the newcomer goes, or
        two that redial at once would keep pushing each other out.
        """
        latest = self._clock() - self._timeouts.grace_s
        spare = [
            peer
            for peer in self._peers.values()
            if peer.inbound and not (peer.node or peer.tags or peer.in_flight)
            if peer.since <= latest and peer.peer_id != exempt
        ]
        return min(spare, key=lambda peer: (peer.score, peer.since), default=None)


def load_cached_peers(path: Path, limit: int) -> list[PeerAddress]:
    """Peers of the last run; a missing or damaged file is an empty list."""
    try:
        with path.open("rb") as file:
            texts = decode_json(file.read(_MAX_CACHE_BYTES), max_bytes=_MAX_CACHE_BYTES)
        if not isinstance(texts, list):
            raise ValueError("not a list")
        return [parse_address(text) for text in texts[:limit] if isinstance(text, str)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, WireError, UsageError) as error:
        logger.warning("%s is not usable as a peer cache: %s", path, error)
        return []


def save_cached_peers(path: Path, peers: list[PeerAddress]) -> None:
    """Replace the file atomically.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps([address for peer in peers for address in peer.full()[:1]]))
    os.replace(draft, path)
