"""Finding peers: bootstrap, the DHT, and staying connected to the run.

A run meets under SHA-256("intellect/run/1" | run id); holders of a checkpoint under its hash. What
the DHT says is hearsay, so `find_providers` races several peers for it, drops duplicates, ourselves
and the dead, and asks again until its deadline; `provide` is believed only when another peer
repeats it. A node that is alone goes back to its bootstrap peers by itself.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.ping import ID as PING_PROTOCOL_ID
from libp2p.peer.id import ID

from ..errors import RefusedError, UnreachableError
from ..keys import peer_id_text
from ..wire import sha256
from .addresses import PeerAddress, from_library, parse_address
from .kad import make_dht
from .peers import load_cached_peers, save_cached_peers

if TYPE_CHECKING:
    from .host import Host

_ASKED_AT_ONCE = 10  # alpha of the libp2p Kademlia specification
_PROVIDE_ATTEMPTS = 3
_MISSED_PINGS = 2

logger = logging.getLogger(__name__)


def rendezvous_key(run_id: bytes) -> bytes:
    """The DHT key under which the peers of a run provide themselves: 32 bytes."""
    return sha256(b"intellect/run/1", run_id)


class Discovery:
    """The DHT and the connections that it leads to."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._times = host.timeouts
        self.dht = make_dht(host.basic, host.limits, host.timeouts, server=host.options.dht_server)
        self._cache = host.options.data_dir / "peers.json"
        self._known = self._known_peers()
        self._provided: set[bytes] = set()

    # --- joining ----------------------------------------------------------------------------------

    def _known_peers(self) -> list[PeerAddress]:
        """Bootstrap addresses, then the peers of the last run."""
        known = [parse_address(text) for text in self._host.options.bootstrap]
        known += load_cached_peers(self._cache, self._host.limits.cached_peers)
        unique = {(where.peer_id, where.addresses): where for where in known}
        return [where for where in unique.values() if where.peer_id != self._host.peer_id]

    async def save_peers(self) -> None:
        """Remember connected peers for the next start; a full disk is only logged."""
        best = sorted(self._host.table, key=lambda peer: -peer.score)
        found = [where for peer in best if (where := self._host.dialable(peer.peer_id)) is not None]
        if not found:
            return
        found = found[: self._host.limits.cached_peers]
        try:
            await trio.to_thread.run_sync(save_cached_peers, self._cache, found)
        except OSError as error:
            logger.warning("cannot write %s: %s", self._cache, error)

    async def join(self, *, required: bool) -> None:
        """Connect to at least one known peer; with nobody known this is the first peer.

        Raises:
            UnreachableError: `required`, and nobody answered in `bootstrap_attempts` rounds.
        """
        if not self._known:
            return
        pause_s = self._times.bootstrap_pause_s
        for attempt in range(self._times.bootstrap_attempts):
            if await self._dial_known():
                await self.refresh()
                return
            if not required:
                return
            if attempt + 1 < self._times.bootstrap_attempts:
                await trio.sleep(pause_s)
                pause_s *= 2
        names = ", ".join(where.full()[0] for where in self._known[:3])
        raise UnreachableError(f"no known peer answers ({len(self._known)} tried): {names}")

    async def _dial_known(self) -> bool:
        """Dial all known peers; True as soon as one answers, while the others go on."""
        answered = trio.Event()

        async def attempt(where: PeerAddress) -> None:
            try:
                await self._host.connect(where, timeout_s=self._times.bootstrap_dial_s)
                answered.set()
            except (UnreachableError, RefusedError) as error:
                logger.debug("%s", error)

        async def all_attempts() -> None:
            async with trio.open_nursery() as nursery:
                for where in self._known:
                    nursery.start_soon(attempt, where)
            ended.set()

        ended = trio.Event()
        self._host.spawn(all_attempts)
        async with trio.open_nursery() as nursery:

            async def until(event: trio.Event) -> None:
                await event.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(until, answered)
            nursery.start_soon(until, ended)
        return answered.is_set()

    # --- periodic work ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep connections, routing table and records fresh until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._every, self._times.refresh_interval_s, self._maintain)
            nursery.start_soon(self._every, self._times.alone_interval_s, self._rejoin_if_alone)
            nursery.start_soon(self._every, self._times.ping_interval_s, self.ping_peers)
            nursery.start_soon(self._every, self._times.reprovide_interval_s, self._reprovide)

    async def _every(self, interval_s: float, work: Any) -> None:
        while True:
            try:
                await work()
            except (BaseLibp2pError, UnreachableError, RefusedError) as error:
                logger.debug("discovery: %r", error)
            await trio.sleep(interval_s * self._host.options.rng.uniform(0.75, 1.25))

    async def _maintain(self) -> None:
        await self.refresh()
        run_id = self._host.options.run_id
        if run_id:
            key = rendezvous_key(run_id)
            if key not in self._provided:
                await self.provide(key)
            await self._keep_run_peers(key)
        await self.save_peers()

    async def refresh(self) -> None:
        """Fill the routing table from the peers at hand."""
        with trio.move_on_after(4 * self._times.query_s):
            for peer in self._host.table:
                await self.dht.add_peer(ID(peer.peer_id))
            await self.dht.peer_routing.refresh_routing_table()

    async def _keep_run_peers(self, key: bytes) -> None:
        """Dial peers of the run until there are `run_peers` of them."""
        have = {peer.peer_id for peer in self._host.table if "run" in peer.tags}
        missing = self._host.limits.run_peers - len(have)
        if missing <= 0:
            return
        for where in await self.find_providers(key, 3 * self._times.query_s, want=missing + len(have)):
            peer = self._host.table.get(where.peer_id)
            if peer is not None:
                peer.tags.add("run")

    async def _rejoin_if_alone(self) -> None:
        if len(self._host.table) == 0 and self._known and await self._dial_known():
            await self._maintain()

    async def ping_peers(self) -> None:
        """Ping every connected peer; one that misses two in a row is disconnected."""
        self._host.forget_gone()
        async with trio.open_nursery() as nursery:
            for peer in self._host.table:
                nursery.start_soon(self._ping, peer.peer_id)

    async def _ping(self, peer_id: bytes) -> None:
        peer = self._host.table.get(peer_id)
        if peer is None:
            return
        sent = self._host.options.rng.randbytes(32)
        start = trio.current_time()
        alive = False
        with trio.move_on_after(self._times.ping_s):
            try:
                stream = await self._host.open_stream(peer_id, PING_PROTOCOL_ID, self._times.ping_s)
                try:
                    await stream.write(sent)
                    alive = await stream.read_exactly(32) == sent
                finally:
                    await stream.reset()
            except Exception as error:
                logger.debug("ping of %s: %r", peer_id_text(peer_id), error)
        if alive:
            peer.latency_s = trio.current_time() - start
            peer.missed_pings = 0
            return
        peer.missed_pings += 1
        if peer.missed_pings >= _MISSED_PINGS:
            self.dht.routing_table.remove_peer(ID(peer_id))
            await self._host.disconnect(peer_id, "does not answer pings", pause=False)

    # --- records ----------------------------------------------------------------------------------

    async def provide(self, key: bytes) -> bool:
        """Tell the DHT that we hold `key` (at most 80 bytes), and keep telling it.

        Returns whether another peer repeats the record when asked; if not (alone, or rate-limited
        by the receivers), it is tried again in the background.
        """
        self._provided.add(key)
        for attempt in range(_PROVIDE_ATTEMPTS):
            if attempt:
                await trio.sleep(self._host.options.rng.uniform(0.5, 1.5) * self._times.query_s)
            await self.dht.provider_store.provide(key)
            if await self._is_repeated(key):
                return True
        return False

    def stop_providing(self, key: bytes) -> None:
        """Let our record of `key` run out."""
        self._provided.discard(key)
        self.dht.provider_store.providing_keys.discard(key)
        self.dht.provider_store.forget(key, ID(self._host.peer_id))

    async def _is_repeated(self, key: bytes) -> bool:
        own = ID(self._host.peer_id)
        found = False

        async def ask(peer: ID) -> None:
            nonlocal found
            providers, _ = await self._ask(peer, key)
            if any(provider.peer_id == own for provider in providers):
                found = True
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for peer in await self._closest(key):
                nursery.start_soon(ask, peer)
        return found

    async def _reprovide(self) -> None:
        for key in sorted(self._provided):
            # Receivers accept 10 records per peer and 10 s and drop the rest silently.
            await trio.sleep(self._host.options.rng.uniform(0.5, 2.0))
            if key in self._provided:
                await self.provide(key)

    async def find_providers(
        self, key: bytes, deadline_s: float, *, want: int = 8, alive: bool = True
    ) -> list[PeerAddress]:
        """Peers that hold `key`, without duplicates and ourselves.

        Args:
            deadline_s: asks again until then if nobody was found; then returns what there is.
            want: enough to return at once.
            alive: connect to each first and drop those that do not answer.
        """
        found: dict[bytes, PeerAddress] = {}
        with trio.move_on_after(deadline_s):
            while not found:
                await self._search(key, want, alive, found)
                if not found:
                    await trio.sleep(self._times.query_s / 6)
        return list(found.values())[:want]

    async def _search(self, key: bytes, want: int, alive: bool, found: dict[bytes, PeerAddress]) -> None:
        """One iterative look-up (Kademlia, Maymounkov and Mazières 2002), answers taken as they come."""
        asked: set[ID] = {ID(self._host.peer_id)}
        seen: set[bytes] = {self._host.peer_id}
        slots = trio.Semaphore(_ASKED_AT_ONCE)

        async def consider(where: PeerAddress) -> None:
            if alive and not await self._is_alive(key, where):
                return
            found[where.peer_id] = where
            if len(found) >= want:
                nursery.cancel_scope.cancel()

        def take(providers: list[Any]) -> None:
            for provider in providers:
                where = from_library(provider.peer_id, provider.addrs, self._host.limits.addresses_per_peer)
                if where is not None and where.peer_id not in seen:
                    seen.add(where.peer_id)
                    nursery.start_soon(consider, where)

        async def ask(peer: ID) -> None:
            async with slots:
                providers, closer = await self._ask(peer, key)
            take(providers)
            for other in closer:
                if other not in asked and len(asked) < 10 * _ASKED_AT_ONCE:
                    asked.add(other)
                    nursery.start_soon(ask, other)

        async with trio.open_nursery() as nursery:
            take(self.dht.provider_store.get_providers(key))
            for peer in await self._closest(key):
                if peer not in asked:
                    asked.add(peer)
                    nursery.start_soon(ask, peer)

    async def _is_alive(self, key: bytes, where: PeerAddress) -> bool:
        try:
            await self._host.connect(where)
        except (UnreachableError, RefusedError):
            self.dht.provider_store.forget(key, ID(where.peer_id))
            return False
        return True

    async def _closest(self, key: bytes) -> list[ID]:
        with trio.move_on_after(3 * self._times.query_s):
            return list(await self.dht.peer_routing.find_closest_peers_network(key))
        return list(self.dht.routing_table.find_local_closest_peers(key, _ASKED_AT_ONCE))

    async def _ask(self, peer: ID, key: bytes) -> tuple[list[Any], list[ID]]:
        """One GET_PROVIDERS query: ([PeerInfo], closer peers); nothing if it fails or takes too long."""
        with trio.move_on_after(self._times.query_s):
            providers, closer = await self.dht.provider_store._get_providers_from_peer_with_closers(peer, key)
            return list(providers), list(closer)
        return [], []
