"""Settings of a chunk service, and what it needs of the host and of discovery."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .addresses import PeerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkConfig:
    """Limits and times of a chunk service; rates are bytes per second, 0 for no cap."""

    upload_bytes_per_s: int = 0
    download_bytes_per_s: int = 0
    upload_slots: int = 16
    slot_lease_s: float = 10.0
    requests_per_peer: int = 8
    downloads: int = 32  # at once, over all peers
    links: int = 64
    dials: int = 16  # at once
    dial_s: float = 10.0  # a saturated machine needs seconds for one handshake
    dial_pause_s: float = 2.0  # before a peer that did not answer is tried again
    progress_s: float = 3.0  # within which a donor must send 16 KiB
    stalled_s: float = 60.0  # without a new chunk, then `fetch` gives up
    find_interval_s: float = 2.0  # between searches for more peers
    provide_delay_s: float = 5.0  # a version that is still the newest after this gets a DHT record
    gather_s: float = 0.02  # how long announcements of chunks wait for more of their kind
    reveal_lease_s: float = 1.0  # an origin waits so long for a chunk it showed to turn up
    http_host: str = "0.0.0.0"
    http_port: int = 0
    http_address: str = ""  # IP address peers should use; empty: where they see the host


class ChunkHost(Protocol):
    """What the service needs of `network.host.Host`."""

    peer_id: bytes

    def set_stream_handler(self, protocol_id: str, handler: Callable[[Any], Awaitable[None]]) -> None:
        """Serve a protocol."""
        ...

    async def open_stream(self, peer_id: bytes, protocol_id: str, deadline_s: float) -> Any:
        """A `FrameStream` to a peer."""
        ...

    async def connect(self, address: str | PeerAddress, *, timeout_s: float | None = None) -> bytes:
        """Be connected to a peer."""
        ...

    def peers(self) -> Sequence[Any]:
        """The connected peers, with `peer_id` and `address` (multiaddress of the other end)."""
        ...

    def dialable(self, peer_id: bytes) -> PeerAddress | None:
        """Where a peer listens."""
        ...


class Providers(Protocol):
    """What the service needs of `network.discovery.Discovery`."""

    async def provide(self, key: bytes) -> bool:
        """Tell the DHT that we hold `key`."""
        ...

    def stop_providing(self, key: bytes) -> None:
        """Let the record run out."""
        ...

    async def find_providers(self, key: bytes, deadline_s: float) -> list[PeerAddress]:
        """Peers that hold `key`."""
        ...
