"""The Kademlia DHT under our own protocol id, with bounded records and no stored values.

As it comes, the library joins the public IPFS network whatever prefix it is given, keeps provider
records for 48 hours and an unbounded number of keys, refuses a twenty-first provider however stale
the other twenty are, waits 10 s for a frozen peer, refreshes its routing table every 10 minutes,
and stores a megabyte for whoever asks.
"""

from __future__ import annotations

import time
from typing import Any

from libp2p.custom_types import TProtocol
from libp2p.kad_dht import common, kad_dht, peer_routing, provider_store, value_store
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.records.validator import NamespacedValidator

from .limits import Limits, Timeouts

KAD_PROTOCOL_ID = TProtocol("/intellect/kad/1.0.0")


class BoundedProviders(ProviderStore):  # type: ignore[misc]
    """Provider records with a bound on keys, where the newest record displaces the oldest."""

    def __init__(self, host: Any, routing: Any, limits: Limits) -> None:
        super().__init__(host=host, peer_routing=routing)
        self._limits = limits

    def add_provider(self, key: bytes, provider: Any) -> None:
        records = self.providers.get(key)
        if records is None and len(self.providers) >= self._limits.provider_keys:
            self.cleanup_expired()
            if len(self.providers) >= self._limits.provider_keys:
                return
        if records and len(records) >= common.BUCKET_SIZE and str(provider.peer_id) not in records:
            del records[min(records, key=lambda peer: records[peer].timestamp)]
        provider.addrs[:] = provider.addrs[: self._limits.addresses_per_peer]
        super().add_provider(key, provider)

    def forget(self, key: bytes, peer: Any) -> None:
        """Drop the record of a provider that turned out to be dead."""
        self.providers.get(key, {}).pop(str(peer), None)

    def age_s(self, key: bytes, peer: Any) -> float:
        """Seconds since the record was made here; infinite if there is none."""
        record = self.providers.get(key, {}).get(str(peer))
        return float("inf") if record is None else time.time() - record.timestamp


def make_dht(host: Any, limits: Limits, timeouts: Timeouts, *, server: bool) -> Any:
    """A DHT service for `host`; not yet running.

    The library keeps the protocol id and its periods in module constants, hence the assignments.
    """
    for module in (common, kad_dht, peer_routing, provider_store, value_store):
        module.PROTOCOL_ID = KAD_PROTOCOL_ID
    for module in (kad_dht, peer_routing, provider_store, value_store):
        module.QUERY_TIMEOUT = timeouts.query_s
    kad_dht.ROUTING_TABLE_REFRESH_INTERVAL = timeouts.refresh_interval_s
    provider_store.PROVIDER_RECORD_EXPIRATION_INTERVAL = timeouts.record_lifetime_s
    dht = KadDHT(
        host,
        DHTMode.SERVER if server else DHTMode.CLIENT,
        validator=NamespacedValidator({}, strict_validation=True),  # no namespace: no value is stored
        validator_changed=True,
        protocol_prefix=TProtocol("/intellect"),
        strict_validation=True,
    )
    dht.provider_store = BoundedProviders(host, dht.peer_routing, limits)
    return dht
