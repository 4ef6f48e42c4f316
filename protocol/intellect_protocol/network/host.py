"""The host: connections to peers, streams over them, and the services that live on both.

`open_host` is the only way in. It yields a `Host` whose parts are ready:

    async with open_host(HostOptions(peer_key=key, data_dir=path, bootstrap=[...], ...)) as host:
        host.server.register(GetHead, answer_head)              # rpc
        head, _ = await host.client.call(peer, GetHead(), GetHeadResult, deadline_s=5)
        await host.discovery.provide(manifest_hash)              # DHT
        async for message in host.gossip.subscribe(topic, is_valid): ...
        stream = await host.open_stream(peer, "/intellect/chunks/1", deadline_s=5)

Process layout: networking must answer while the engine computes, so no forward pass may share its
event loop. Our programs hold no torch at all: engines and proof checks are child processes of their
own. The host therefore runs in the daemon's trio loop, where it shares its cancel scopes and its
shutdown; a separate network process would add a second hop to every message and a supervisor, and
would protect the loop from nothing that is in it.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
from libp2p.abc import INotifee
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from ..errors import DeadlineError, PreflightError, RefusedError, UnreachableError
from ..keys import PeerKey, Signer, peer_id_text
from . import compat
from .addresses import PeerAddress, from_library, parse_address
from .limits import Limits, Timeouts
from .peers import Peer, PeerRow, PeerTable
from .stream import Stream

if TYPE_CHECKING:
    from .binding import Bindings
    from .discovery import Discovery
    from .gossip import Gossip
    from .rpc_client import RpcClient
    from .rpc_server import RpcServer

StreamHandler = Callable[[Stream], Awaitable[None]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Everything a host needs to know; nothing is read from elsewhere."""

    peer_key: PeerKey
    data_dir: Path  # peer cache and spooled bodies
    listen: list[str] = field(default_factory=lambda: ["/ip4/0.0.0.0/tcp/0"])
    announce: list[str] = field(default_factory=list)  # instead of the addresses of this machine
    bootstrap: list[str] = field(default_factory=list)  # full multiaddresses
    run_id: bytes = b""  # 32 bytes; empty: a newcomer that will ask for the run configuration
    chain_id: int = 0
    registry: str = ""  # address of the contract that bindings name
    signer: Signer | None = None  # the key that signs this host's requests
    role: str = "client"
    agent: str = "intellect"
    verify_node: Callable[[str, bytes], Awaitable[bool]] | None = None  # asks the ledger
    dht_server: bool = True
    require_bootstrap: bool = True  # fail to open when no known peer answers
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    wall_clock: Callable[[], float] = time.time
    rng: random.Random = field(default_factory=random.SystemRandom)


class Host(INotifee):  # type: ignore[misc]
    """A peer of the network; made by `open_host`."""

    server: RpcServer
    client: RpcClient
    discovery: Discovery
    gossip: Gossip
    bindings: Bindings

    def __init__(self, options: HostOptions) -> None:
        self.options = options
        self.limits = options.limits
        self.timeouts = options.timeouts
        self.peer_id = options.peer_key.peer_id
        self.table = PeerTable(options.limits, options.timeouts, trio.current_time)
        self.swarm, self.basic = compat.build(
            options.peer_key,
            options.limits,
            options.timeouts,
            [Multiaddr(text) for text in options.announce],
        )
        self.swarm.is_barred = lambda peer: self.table.barred_for(peer.to_bytes()) > 0.0
        self.basic.on_fault = self.fault
        self.swarm.register_notifee(self)
        self.nursery: trio.Nursery  # background work of the host and its parts

    # --- addresses ---------------------------------------------------------------------------

    def addresses(self) -> list[str]:
        """Our full multiaddresses with /p2p/, best first."""
        return [str(address) for address in self.basic.get_addrs()]

    def observed_addresses(self) -> list[str]:
        """Addresses at which several peers say they see us."""
        manager = self.basic._observed_addr_manager
        return [str(address) for address in manager.addrs()] if manager is not None else []

    # --- connections --------------------------------------------------------------------------

    async def connect(self, address: str | PeerAddress, *, timeout_s: float | None = None) -> bytes:
        """Be connected to a peer; returns its peer id.

        The given addresses are fresh word: they replace what was known and lift the pause that
        follows a failed dial.

        Raises:
            UsageError: not an address.
            RefusedError: the peer is barred here (`retry_after_s` says for how long).
            UnreachableError: nobody answered within `timeout_s` (default: `dial_s`).
        """
        where = parse_address(address) if isinstance(address, str) else address
        if where.peer_id == self.peer_id:
            raise UnreachableError("that address is our own")
        self._check_barred(where.peer_id)
        if self.is_connected(where.peer_id):
            return where.peer_id
        self.learn(where)
        addresses = [Multiaddr(text) for text in where.addresses]
        deadline_s = self.timeouts.dial_s if timeout_s is None else timeout_s
        try:
            await self.swarm.dial_addresses(ID(where.peer_id), addresses, deadline_s)
        except (BaseLibp2pError, OSError) as error:
            raise UnreachableError(f"{where.full()[0]} does not answer") from error
        return where.peer_id

    def learn(self, where: PeerAddress) -> None:
        """Take note of a peer's addresses from fresh word, in place of older ones."""
        peer = ID(where.peer_id)
        self.swarm.unblock_peer(peer)
        self.basic.peerstore.clear_addrs(peer)
        self.basic.peerstore.add_addrs(peer, [Multiaddr(text) for text in where.addresses], 3600)

    def is_connected(self, peer_id: bytes) -> bool:
        """Whether there is a live connection to the peer."""
        return any(not c.is_closed for c in self.swarm.get_connections(ID(peer_id)))

    def _check_barred(self, peer_id: bytes) -> None:
        pause_s = self.table.barred_for(peer_id)
        if pause_s > 0.0:
            raise RefusedError("barred", f"peer {peer_id_text(peer_id)} misbehaved", pause_s)

    async def disconnect(self, peer_id: bytes, reason: str, *, pause: bool = True) -> None:
        """Close every connection to a peer; with `pause`, refuse it for a growing time. Never raises."""
        if pause:
            self.table.bar(peer_id, reason)
        logger.debug("disconnecting %s: %s", peer_id_text(peer_id), reason)
        with trio.CancelScope(deadline=trio.current_time() + self.timeouts.close_s, shield=True):
            async with trio.open_nursery() as nursery:
                for connection in self.swarm.get_connections(ID(peer_id)):
                    nursery.start_soon(connection.close)

    def fault(self, peer: ID, reason: str, weight: float = 1.0) -> None:
        """A peer broke a rule; enough of that disconnects it."""
        peer_id = peer.to_bytes()
        if self.table.blame(peer_id, reason, weight):
            self.spawn(self.disconnect_barred, peer_id, reason)

    async def disconnect_barred(self, peer_id: bytes, reason: str) -> None:
        """`disconnect` of a peer that the table has barred already."""
        await self.disconnect(peer_id, reason, pause=False)

    def spawn(self, work: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run `work` in the host's nursery, unless the host is closing."""
        if not self.nursery.cancel_scope.cancel_called:
            self.nursery.start_soon(work, *args)

    # --- streams ------------------------------------------------------------------------------

    def set_stream_handler(self, protocol_id: str, handler: StreamHandler) -> None:
        """Serve a protocol. An exception of the handler ends its stream and nothing else."""

        async def serve(raw: Any) -> None:
            stream = Stream(raw, protocol_id, progress_s=self.timeouts.progress_s)
            try:
                await handler(stream)
            finally:
                await stream.reset()

        self.basic.set_stream_handler(protocol_id, serve)

    async def open_stream(self, peer_id: bytes, protocol_id: str, deadline_s: float) -> Stream:
        """A new stream to a peer, dialling it at its known addresses if need be.

        Raises:
            RefusedError: the peer is barred here.
            UnreachableError: it does not answer or does not speak the protocol.
            DeadlineError: not within `deadline_s`.
        """
        self._check_barred(peer_id)
        with trio.move_on_after(deadline_s) as scope:
            try:
                raw = await self.basic.new_stream(ID(peer_id), [protocol_id])
            except (BaseLibp2pError, OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise UnreachableError(
                    f"peer {peer_id_text(peer_id)} does not answer on {protocol_id}"
                ) from error
            return Stream(raw, protocol_id, progress_s=self.timeouts.progress_s)
        assert scope.cancelled_caught
        raise DeadlineError(f"peer {peer_id_text(peer_id)} did not answer within {deadline_s:g} s")

    # --- the peer table ------------------------------------------------------------------------

    def peers(self) -> list[PeerRow]:
        """The connected peers."""
        return [self._row(peer) for peer in self.table]

    def _row(self, peer: Peer) -> PeerRow:
        connections = self.swarm.get_connections(ID(peer.peer_id))
        address = str(connections[0].get_transport_addresses()[0]) if connections else ""
        return PeerRow(
            peer_id=peer.peer_id,
            address=address,
            agent=peer.agent,
            role=peer.role,
            protocol=peer.protocol,
            node=peer.node,
            score=peer.score,
            bytes_in=sum(c.muxed_conn.bytes_in for c in connections),
            bytes_out=sum(c.muxed_conn.bytes_out for c in connections),
            latency_s=peer.latency_s,
            connected_s=trio.current_time() - peer.since,
            inbound=peer.inbound,
        )

    async def connected(self, network: Any, conn: Any) -> None:
        """Called by the swarm for each new connection."""
        peer = conn.muxed_conn.peer_id
        peer_id = peer.to_bytes()
        if self.table.barred_for(peer_id) > 0.0:
            self.spawn(self.disconnect_barred, peer_id, "came back too early")
            return
        self.swarm.unblock_peer(peer)
        if conn.is_closed:
            return  # gone already, and `disconnected` may have been told before
        self.table.joined(peer_id, inbound=not conn.muxed_conn.is_initiator)
        if len(self.table) > self.limits.connections:
            spare = self.table.least_useful(exempt=peer_id)
            victim = spare.peer_id if spare is not None else peer_id
            self.spawn(self.disconnect_barred, victim, "too many connections")

    async def disconnected(self, network: Any, conn: Any) -> None:
        """Called by the swarm when a connection is gone."""
        peer_id = conn.muxed_conn.peer_id.to_bytes()
        if not self.is_connected(peer_id):
            self.table.left(peer_id)

    def forget_gone(self) -> None:
        """Drop entries of peers without a connection that nobody reported as closed."""
        for peer in self.table:
            if not self.is_connected(peer.peer_id):
                self.table.left(peer.peer_id)

    async def opened_stream(self, network: Any, stream: Any) -> None: ...

    async def closed_stream(self, network: Any, stream: Any) -> None: ...

    async def listen(self, network: Any, multiaddr: Any) -> None: ...

    async def listen_close(self, network: Any, multiaddr: Any) -> None: ...

    # --- life cycle ------------------------------------------------------------------------------

    def dialable(self, peer_id: bytes) -> PeerAddress | None:
        """What is known of a peer's listening addresses."""
        addresses = self.swarm.known_addresses(ID(peer_id))
        return from_library(ID(peer_id), addresses, self.limits.addresses_per_peer)

    async def close(self) -> None:
        """Disconnect all peers in parallel, then close the library's host. Never raises."""
        with trio.CancelScope(deadline=trio.current_time() + self.timeouts.close_s, shield=True):
            await self.discovery.save_peers()
            async with trio.open_nursery() as nursery:
                for peer in self.table:
                    nursery.start_soon(self.disconnect_barred, peer.peer_id, "closing")
            await self.basic.close()


@asynccontextmanager
async def open_host(options: HostOptions) -> AsyncIterator[Host]:
    """A running host; leaving the block closes it within `close_s` and a little.

    Raises:
        PreflightError: cannot listen (port in use), or another py-libp2p is installed.
        UnreachableError: neither bootstrap nor cached peers answer (`require_bootstrap`).
        UsageError: a malformed address.
    """
    try:
        async with _open(options) as host:
            yield host
    except BaseExceptionGroup as group:
        raise _only_cause(group) from None


def _only_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one real error inside nested groups, else the group: callers know our errors, not groups."""
    rest = group.split(trio.Cancelled)[1]
    error: BaseException = group if rest is None else rest
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def _open(options: HostOptions) -> AsyncIterator[Host]:
    # The parts know the host; importing them here keeps the module graph free of cycles.
    from .binding import Bindings
    from .discovery import Discovery
    from .gossip import Gossip
    from .rpc_client import RpcClient
    from .rpc_server import RpcServer

    host = Host(options)
    host.gossip = Gossip(host)
    host.discovery = Discovery(host)
    host.server = RpcServer(host)
    host.client = RpcClient(host)
    host.bindings = Bindings(host)
    listen = [Multiaddr(text) for text in options.listen]
    # Gossip first: its notifee blocks new connections until it runs.
    async with host.gossip.running(), host.basic.run(listen):
        if listen and len(host.swarm.listeners) < len(listen):
            raise PreflightError(f"cannot listen on {', '.join(options.listen)}: the port is in use")
        async with background_trio_service(host.discovery.dht), trio.open_nursery() as nursery:
            host.nursery = nursery
            try:
                await host.discovery.join(required=options.require_bootstrap)
                nursery.start_soon(host.discovery.run)
                yield host
            finally:
                nursery.cancel_scope.cancel()
                await host.close()
