"""A peer's signed record is verified once; a forged, foreign or old one is verified as ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import libp2p.pubsub.pubsub as pubsub_module
import pytest
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.envelope import seal_record
from libp2p.peer.id import ID
from libp2p.peer.peer_record import PeerRecord
from libp2p.peer.peerstore import PeerStore
from libp2p.pubsub.pb.rpc_pb2 import RPC
from libp2p.pubsub.utils import maybe_consume_signed_record
from multiaddr import Multiaddr

from intellect_protocol.network import signed_records
from intellect_protocol.network.signed_records import RecordMemory

ADDRESS = Multiaddr("/ip4/127.0.0.1/tcp/4001")


class Peer:
    """A key pair and its signed record."""

    def __init__(self) -> None:
        self.keys = create_new_key_pair()
        self.id = ID.from_pubkey(self.keys.public_key)

    def message(self, sequence: int = 1) -> RPC:
        record = PeerRecord(self.id, [ADDRESS], sequence)
        return RPC(senderRecord=seal_record(record, self.keys.private_key).marshal_envelope())


@pytest.fixture
def verified() -> list[ID]:
    return []


@pytest.fixture
def memory(verified: list[ID]) -> RecordMemory:
    def consume(message: Any, host: Any, peer_id: ID) -> bool:
        verified.append(peer_id)
        return maybe_consume_signed_record(message, host, peer_id)

    memory = RecordMemory(consume, clock=lambda: memory.now)  # type: ignore[attr-defined]
    memory.now = 0.0  # type: ignore[attr-defined]
    return memory


@pytest.fixture
def host() -> SimpleNamespace:
    store, own = PeerStore(), Peer().id
    return SimpleNamespace(get_id=lambda: own, get_peerstore=lambda: store)


def test_the_same_record_is_verified_once_and_a_newer_one_again(memory, verified, host) -> None:
    peer = Peer()
    message = peer.message()
    assert all(memory.consume(message, host, peer.id) for _ in range(5))
    assert verified == [peer.id]
    assert memory.consume(peer.message(sequence=2), host, peer.id)
    assert len(verified) == 2
    assert host.get_peerstore().addrs(peer.id) == [ADDRESS]


def test_a_good_record_opens_no_door_for_another_peer_or_a_forged_one(memory, host) -> None:
    peer, other = Peer(), Peer()
    message = peer.message()
    assert memory.consume(message, host, peer.id)
    assert not memory.consume(message, host, other.id)
    forged = bytearray(message.senderRecord)
    forged[-1] ^= 1
    for _ in range(2):
        assert not memory.consume(RPC(senderRecord=bytes(forged)), host, peer.id)


def test_a_record_is_verified_again_long_before_the_peer_store_forgets_it(memory, verified, host) -> None:
    peer = Peer()
    message = peer.message()
    for memory.now in (0.0, 599.0, 601.0):
        assert memory.consume(message, host, peer.id)
    assert len(verified) == 2


def test_pubsub_uses_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pubsub_module, "maybe_consume_signed_record", maybe_consume_signed_record)
    signed_records.install()
    assert isinstance(pubsub_module.maybe_consume_signed_record.__self__, RecordMemory)
