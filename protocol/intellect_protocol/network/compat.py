"""py-libp2p 0.8.1, made fit for strangers: subclasses with small corrections, one reason each.

The library gives us Noise, yamux, identify, Kademlia and GossipSub that other implementations
understand. As it comes, one message of a stranger can end the process. Each class here, in `muxer`
and in `gossip` corrects faults of the class it extends; `tests/protocol/test_network_compat.py`
shows every one of them on the unchanged class. Another version of the library needs another look:
`check_version` refuses it.

What is corrected:

1. Inbound TCP stops after 250 cumulative connections, because the accepting task waits for the end
   of the swarm and holds its slot (`GuardedSwarm`: it waits for the end of its own connection).
2. Garbage on a GossipSub stream, or a valid message with a garbage key, raises through the service
   and ends the process (`GuardedPubsub`, `GuardedGossipSub`).
3. So does any exception of a stream handler (`GuardedHost`).
4. The default host also offers TLS, secio and plaintext, mplex, and other transports (`build`:
   Noise, yamux and TCP alone).
5. Each dial waits out a 250 ms head start, tries one TCP address only, and refuses the peer for a
   minute afterwards (`GuardedSwarm.dial_peer`: all addresses raced, a pause that fresh word lifts).
6. Idle sockets fill the accept slots and block newcomers (`GuardedSwarm`: short upgrades, slots per
   address, and the oldest pending socket of an address makes room for a newer one).
7. A write that is cancelled half way corrupts the connection for everybody, and closing waits for
   a peer that does not read (`BoundedYamux`: one task writes; it gives up on a stalled peer).
8. A sender may ignore the receive window (`BoundedYamux`: unread bytes per connection are bounded).
9. Listening sockets set SO_REUSEPORT, so two programs on one port silently share its connections.
10. A reconnecting peer is not identified again, so its new address is never learnt (`GuardedHost`).
"""

from __future__ import annotations

import importlib.metadata
import logging
import socket
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import libp2p.transport.tcp.tcp as tcp_module
import trio
from libp2p.crypto.ed25519 import Ed25519PrivateKey
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.host.exceptions import StreamFailure
from libp2p.io.exceptions import IOException
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore, PeerStoreError
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL_ID
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from ..errors import PreflightError, UnreachableError
from ..keys import PeerKey
from .addresses import expand
from .limits import Limits, Timeouts
from .muxer import BoundedMuxers

LIBP2P_VERSION = "0.8.1"

# What a stream raises when the peer leaves or stalls: no fault of form.
VANISHED = (
    IOException,
    SwarmException,
    StreamFailure,
    UnreachableError,
    OSError,
    trio.TooSlowError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)

# Room above the connection cap, so that a newcomer is heard before somebody less useful leaves.
_HEADROOM = 8

logger = logging.getLogger(__name__)


def check_version() -> None:
    """Refuse a py-libp2p for which these corrections were not written.

    Raises:
        PreflightError: another version is installed.
    """
    found = importlib.metadata.version("libp2p")
    if found != LIBP2P_VERSION:
        raise PreflightError(f"libp2p {LIBP2P_VERSION} is needed, {found} is installed")


class GuardedSwarm(Swarm):  # type: ignore[misc]
    """A swarm whose accept slots come back, with raced dials and a gate for barred peers."""

    def __init__(self, *args: Any, limits: Limits, timeouts: Timeouts, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._timeouts = timeouts
        self._pending: OrderedDict[trio.CancelScope, str] = OrderedDict()
        self._failed_until: OrderedDict[ID, float] = OrderedDict()
        self.auto_connector.maybe_connect = _do_not_connect  # `discovery` decides whom to dial
        self.is_barred: Callable[[ID], bool] = lambda peer_id: False

    def unblock_peer(self, peer_id: ID) -> None:
        super().unblock_peer(peer_id)
        self._failed_until.pop(peer_id, None)

    async def _handle_inbound_connection(self, read_write_closer: Any, maddr: Any) -> None:
        remote = read_write_closer.get_remote_address()
        address = remote[0] if remote else ""
        muxed = None
        with trio.CancelScope() as scope:
            if self._admit(scope, address):
                try:
                    muxed = await self.upgrade_inbound_raw_conn(
                        RawConnection(read_write_closer, False), maddr
                    )
                finally:
                    self._pending.pop(scope, None)
        if muxed is None:
            await read_write_closer.close()
            return
        await muxed.event_closed.wait()

    def _admit(self, scope: trio.CancelScope, address: str) -> bool:
        """Take a slot for an upgrade; an idle socket of the same address makes room."""
        established = sum(1 for c in self.get_connections() if self._address_of(c) == address)
        if established >= self._limits.connections_per_address:
            return False
        same = [other for other, theirs in self._pending.items() if theirs == address]
        if len(same) >= self._limits.pending_upgrades_per_address:
            del self._pending[same[0]]
            same[0].cancel()
        elif len(self._pending) >= self._limits.pending_upgrades:
            oldest, _ = self._pending.popitem(last=False)
            oldest.cancel()
        self._pending[scope] = address
        return True

    @staticmethod
    def _address_of(connection: Any) -> str:
        remote = connection.muxed_conn.get_remote_address()
        return remote[0] if remote else ""

    async def dial_peer(self, peer_id: ID) -> list[Any]:
        """Connections to a peer: those there are, else one over the first address that answers."""
        return await self.dial_addresses(peer_id, None, self._timeouts.dial_s)

    async def dial_addresses(self, peer_id: ID, addresses: list[Any] | None, timeout_s: float) -> list[Any]:
        """`dial_peer` over given addresses (None: those in the peer store) within a time-out.

        Raises:
            SwarmException: barred, no addresses, all failed, or failed too recently.
        """
        live = self._live(peer_id)
        if live:
            return live
        if peer_id == self.self_id:
            raise SwarmException("cannot dial ourselves")
        if self.is_barred(peer_id):
            raise SwarmException(f"peer {peer_id} is barred")
        ongoing = self._ongoing_dials.get(peer_id)
        if ongoing is not None:
            await ongoing.wait()
            live = self._live(peer_id)
            if live:
                return live
        if addresses is None and self._failed_until.get(peer_id, 0.0) > trio.current_time():
            raise SwarmException(f"peer {peer_id} did not answer a moment ago")
        done = self._ongoing_dials[peer_id] = trio.Event()
        try:
            return await self._race(peer_id, addresses or self.known_addresses(peer_id), timeout_s)
        finally:
            done.set()
            self._ongoing_dials.pop(peer_id, None)

    def _live(self, peer_id: ID) -> list[Any]:
        return [c for c in self.get_connections(peer_id) if not c.is_closed]

    def known_addresses(self, peer_id: ID) -> list[Any]:
        try:
            return list(self.peerstore.addrs(peer_id))
        except PeerStoreError:
            return []

    async def _race(self, peer_id: ID, addresses: list[Any], timeout_s: float) -> list[Any]:
        usable = [a for a in addresses if self.transport_manager.transport_for_dialing(a) is not None]
        usable.sort(key=lambda a: "/ip4/127." in str(a) or "/ip6/::1" in str(a))
        usable = usable[: self._limits.addresses_per_peer]
        won: list[Any] = []

        async def attempt(address: Any) -> None:
            try:
                async with self._global_dial_limiter:
                    won.append(await self.dial_addr(address, peer_id))
                nursery.cancel_scope.cancel()
            except Exception as error:
                logger.debug("dialling %s failed: %s", address, error)

        with trio.move_on_after(timeout_s):
            async with trio.open_nursery() as nursery:
                for address in usable:
                    nursery.start_soon(attempt, address)
        if not won:
            self._failed_until[peer_id] = trio.current_time() + self._timeouts.failed_dial_pause_s
            self._failed_until.move_to_end(peer_id)
            while len(self._failed_until) > self._limits.barred_peers:
                self._failed_until.popitem(last=False)
            raise SwarmException(f"no address of peer {peer_id} answered ({len(usable)} tried)")
        for extra in won[1:]:
            await extra.close()
        self.unblock_peer(peer_id)
        return won[:1]


class GuardedHost(BasicHost):  # type: ignore[misc]
    """A host that no stream can end, that advertises what it listens on, and identifies peers anew."""

    def __init__(self, *args: Any, limits: Limits, announce: list[Any], **kwargs: Any) -> None:
        self._limits = limits
        self._announce = announce
        self._inbound: dict[Any, int] = {}
        self.on_fault: Callable[[ID, str], None] = lambda peer_id, reason: None
        super().__init__(*args, **kwargs)

    def get_addrs(self) -> list[Any]:
        """Announced or listening addresses; what others say they see of us is hearsay."""
        own = Multiaddr(f"/p2p/{self.get_id()}")
        return [a.encapsulate(own) for a in self._announce or expand(self.get_transport_addrs())]

    async def _swarm_stream_handler(self, net_stream: Any) -> None:
        connection = net_stream.muxed_conn
        held = self._inbound.get(connection, 0)
        if held >= self._limits.streams_per_connection:
            await net_stream.reset()
            return
        self._inbound[connection] = held + 1
        try:
            await super()._swarm_stream_handler(net_stream)
        except Exception as error:
            logger.debug("stream of %s failed: %r", connection.peer_id, error)
            if not isinstance(error, VANISHED):
                self.on_fault(connection.peer_id, f"malformed bytes on {net_stream.get_protocol()}")
            await net_stream.reset()
        finally:
            if self._inbound[connection] == 1:
                del self._inbound[connection]
            else:
                self._inbound[connection] -= 1

    def _on_notifee_disconnected(self, conn: Any) -> None:
        super()._on_notifee_disconnected(conn)
        peer_id = conn.muxed_conn.peer_id
        if self.peerstore.has_peer(peer_id):
            self.peerstore.clear_protocol_data(peer_id)


async def _do_not_connect() -> None:
    """In place of a connector that dials strangers up to half the connection cap."""


def _set_reuse_address(sock: Any) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def key_pair(peer_key: PeerKey) -> Any:
    """The library's form of our peer key."""
    private = Ed25519PrivateKey.from_bytes(peer_key.secret())
    return KeyPair(private, private.get_public_key())


def build(
    peer_key: PeerKey, limits: Limits, timeouts: Timeouts, announce: list[Any]
) -> tuple[GuardedSwarm, GuardedHost]:
    """A host with Noise, yamux and TCP and nothing else; not yet running.

    Args:
        announce: addresses to advertise instead of those of this machine.

    Raises:
        PreflightError: another version of py-libp2p is installed.
    """
    check_version()
    # A stranger can make the library log an error per packet; what matters is logged here.
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    tcp_module._set_reuse_flags = _set_reuse_address
    keys = key_pair(peer_key)
    peer_id = ID.from_pubkey(keys.public_key)
    noise = NoiseTransport(keys, noise_privkey=create_x25519_key_pair().private_key)
    upgrader = TransportUpgrader(
        {NOISE_PROTOCOL_ID: noise}, {TProtocol(YAMUX_PROTOCOL_ID): Yamux}, int(timeouts.negotiate_s)
    )
    upgrader.muxer_multistream = BoundedMuxers(limits, timeouts)
    cap = limits.connections + _HEADROOM
    config = ConnectionConfig(
        max_connections=cap,
        min_connections=0,
        low_watermark=0,
        high_watermark=cap,
        max_connections_per_peer=2,
        dial_timeout=timeouts.dial_s,
        inbound_upgrade_timeout=timeouts.upgrade_s,
        outbound_upgrade_timeout=timeouts.bootstrap_dial_s,  # dials end by their own deadline
        inbound_stream_protocol_negotiation_timeout=timeouts.negotiate_s,
        outbound_stream_protocol_negotiation_timeout=timeouts.negotiate_s,
    )
    config.max_concurrent_dials = limits.dials
    peerstore = PeerStore()
    peerstore.add_key_pair(peer_id, keys)
    swarm = GuardedSwarm(
        peer_id,
        peerstore,
        upgrader,
        [tcp_module.TCP()],
        RetryConfig(max_retries=0),
        config,
        limits=limits,
        timeouts=timeouts,
    )
    host = GuardedHost(swarm, limits=limits, announce=announce, negotiate_timeout=int(timeouts.negotiate_s))
    return swarm, host
