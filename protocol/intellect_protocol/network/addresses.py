"""Multiaddresses: parsing untrusted text, and which of our own to advertise."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import base58
import psutil
from libp2p.peer.id import ID
from multiaddr import Multiaddr
from multiaddr.exceptions import MultiaddrError

from ..errors import BindingError, UsageError
from ..keys import peer_id_text, peer_public_key

_MAX_TEXT = 512


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a peer may be reached."""

    peer_id: bytes
    addresses: tuple[str, ...]  # without /p2p/

    def full(self) -> list[str]:
        """The addresses with /p2p/ at the end."""
        return [f"{address}/p2p/{peer_id_text(self.peer_id)}" for address in self.addresses]


def parse_address(text: str) -> PeerAddress:
    """A full multiaddress such as ``/ip4/192.0.2.1/tcp/4001/p2p/12D3Koo...``.

    Raises:
        UsageError: not one, not over TCP, or without an Ed25519 peer id.
    """
    try:
        if len(text) > _MAX_TEXT:
            raise ValueError("too long")
        head, separator, tail = text.rpartition("/p2p/")
        peer_id = base58.b58decode(tail)
        peer_public_key(peer_id)
        if not separator or not is_dialable(Multiaddr(head)):
            raise ValueError("not a TCP address")
    except (ValueError, MultiaddrError, BindingError) as error:
        raise UsageError(
            f"not a peer address (/ip4/HOST/tcp/PORT/p2p/PEER_ID): {text[:_MAX_TEXT]!r}"
        ) from error
    return PeerAddress(peer_id, (head,))


def is_dialable(address: Any) -> bool:
    """Whether an address is plain TCP over IP or a DNS name, with a port."""
    names = [protocol.name for protocol in address.protocols()]
    if len(names) not in (2, 3) or names[1] != "tcp" or names[0] not in ("ip4", "ip6", "dns", "dns4", "dns6"):
        return False
    return len(names) == 2 or names[2] == "p2p"


def from_library(peer_id: ID, addresses: Iterable[Any], limit: int) -> PeerAddress | None:
    """A `PeerAddress` of the library's values; None if nothing in it can be dialled."""
    raw = peer_id.to_bytes()
    try:
        peer_public_key(raw)
    except BindingError:
        return None
    texts: list[str] = []
    for address in addresses:
        if is_dialable(address):
            text = str(address).partition("/p2p/")[0]
            if text not in texts:
                texts.append(text)
    return PeerAddress(raw, tuple(texts[:limit])) if texts else None


def expand(addresses: Iterable[Any]) -> list[Any]:
    """Listening addresses with 0.0.0.0 and :: replaced by the addresses of this machine."""
    result: list[Any] = []
    for address in addresses:
        text = str(address)
        for wildcard, version in (("/ip4/0.0.0.0/", 4), ("/ip6/::/", 6)):
            if text.startswith(wildcard):
                rest = text[len(wildcard) :]
                result += [Multiaddr(f"/ip{version}/{host}/{rest}") for host in _interfaces(version)]
                break
        else:
            result.append(address)
    return result


def _interfaces(version: int) -> list[str]:
    found: list[str] = []
    for addresses in psutil.net_if_addrs().values():
        for entry in addresses:
            try:
                host = ipaddress.ip_address(entry.address.partition("%")[0])
            except ValueError:
                continue
            if host.version == version and not host.is_link_local:
                found.append(str(host))
    return sorted(found, key=lambda host: ipaddress.ip_address(host).is_loopback)
