"""Gossip: announcements that spread by themselves, and are never more than a hint.

GossipSub (libp2p specification, v1.1/v1.2) over the topics of one run. Before a message is
forwarded it must be signed by its origin peer, fit the size limit, not be a repetition, and pass
the subscriber's validator. A validator that raises counts as a refusal.

Settings that differ from the library's, and why: heartbeat 1 s (120 s would leave a mesh unrepaired
for minutes), sequence numbers from `time_ns` (from seconds, a restart with the same key repeats
numbers that peers have seen, and loses its messages), and a higher rate per forwarder (10 per
second counts the messages of everybody behind it).
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import libp2p.pubsub.pubsub as pubsub_module
import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pubsub import Pubsub
from libp2p.tools.anyio_service import background_trio_service

from ..errors import UsageError, WireError
from ..wire import sha256
from . import signed_records
from .compat import VANISHED

if TYPE_CHECKING:
    from .host import Host

_PROTOCOLS = [TProtocol("/meshsub/1.2.0"), TProtocol("/meshsub/1.1.0")]
_REMEMBERED = 8192
_QUEUE = 256

Validator = Callable[[bytes], bool]

logger = logging.getLogger(__name__)


def checkpoints_topic(run_id: bytes) -> str:
    """Where the publisher announces versions."""
    return f"/intellect/1/{run_id.hex()}/checkpoints"


def verdicts_topic(run_id: bytes) -> str:
    """Where the coordinator tells what became of submissions."""
    return f"/intellect/1/{run_id.hex()}/verdicts"


class GuardedPubsub(Pubsub):  # type: ignore[misc]
    """Pubsub that drops what it cannot read instead of ending."""

    on_fault: Callable[[ID, str], None] = staticmethod(lambda peer_id, reason: None)

    async def continuously_read_stream(self, stream: Any) -> None:
        try:
            await super().continuously_read_stream(stream)
        except Exception as error:
            peer_id = stream.muxed_conn.peer_id
            logger.debug("gossip stream of %s failed: %r", peer_id, error)
            if not isinstance(error, VANISHED):
                self.on_fault(peer_id, "malformed gossip")
            await stream.reset()
            self._handle_dead_peer(peer_id)

    async def push_msg(self, msg_forwarder: ID, msg: Any) -> None:
        await _guarded(super().push_msg(msg_forwarder, msg), lambda: self._blame(msg_forwarder))

    def _blame(self, peer_id: ID) -> None:
        if peer_id != self.my_id:
            self.on_fault(peer_id, "malformed gossip message")


class GuardedGossipSub(GossipSub):  # type: ignore[misc]
    """GossipSub that drops control messages it cannot read, and keeps its heart beating."""

    on_fault: Callable[[ID, str], None] = staticmethod(lambda peer_id, reason: None)

    async def handle_rpc(self, rpc: Any, sender_peer_id: ID) -> None:
        await _guarded(
            super().handle_rpc(rpc, sender_peer_id),
            lambda: self.on_fault(sender_peer_id, "malformed gossip control message"),
        )

    async def on_peer_subscribed(self, peer_id: ID, topic: str) -> None:
        await _guarded(super().on_peer_subscribed(peer_id, topic), lambda: None)

    async def flush_pending_messages(self, peer_id: ID) -> None:
        await _guarded(super().flush_pending_messages(peer_id), lambda: None)


async def _guarded(work: Awaitable[None], blame: Callable[[], None]) -> None:
    try:
        await work
    except Exception as error:
        logger.debug("gossip: %r", error)
        blame()


class Gossip:
    """Publish and subscribe on the topics of a run."""

    def __init__(self, host: Host) -> None:
        self._host = host
        limits = host.limits
        self._router = GuardedGossipSub(
            protocols=_PROTOCOLS,
            degree=6,  # D, D_low and D_high of the GossipSub v1.1 specification
            degree_low=4,
            degree_high=12,
            heartbeat_interval=1,
            adaptive_gossip_enabled=False,  # would slow the heartbeat down again
            eclipse_protection_enabled=False,  # grafts around the mesh limits when peers share an address
            max_messages_per_topic_per_second=limits.gossip_per_s,
        )
        run_id = host.options.run_id
        self.topics = (
            frozenset({checkpoints_topic(run_id), verdicts_topic(run_id)}) if run_id else frozenset()
        )
        pubsub_module.SUBSCRIPTION_CHANNEL_SIZE = _QUEUE  # 32 in the library
        signed_records.install()
        self._pubsub = GuardedPubsub(
            host.basic,
            self._router,
            strict_signing=True,
            seen_ttl=600,
            max_inbound_rpc_size=4 * limits.gossip_message_bytes,
            allowed_topics=self.topics,
        )
        self._pubsub.counter = time.time_ns()
        self._pubsub.on_fault = self._router.on_fault = host.fault
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._subscribed: set[str] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the services; the host's own life cycle."""
        async with background_trio_service(self._router), background_trio_service(self._pubsub):
            await self._pubsub.wait_until_ready()
            yield

    def peers(self, topic: str) -> set[bytes]:
        """Peers known to subscribe to `topic`."""
        return {peer.to_bytes() for peer in self._pubsub.peer_topics.get(topic, ())}

    async def publish(self, topic: str, message: bytes) -> None:
        """Spread `message`; reaching anybody is not promised.

        Raises:
            WireError: larger than the limit of a gossip message.
            UsageError: not a topic of this run.
        """
        self._check_topic(topic)
        if len(message) > self._host.limits.gossip_message_bytes:
            raise WireError(f"a gossip message of {len(message)} bytes is too large")
        await self._pubsub.publish(topic, message)

    async def subscribe(self, topic: str, validator: Validator) -> AsyncIterator[bytes]:
        """Messages of others on `topic`, each content once; those in a full queue are dropped.

        Args:
            validator: whether the bytes are a valid message of this topic. Runs before forwarding,
                so it must be quick and do no I/O; raising counts as False.

        Raises:
            UsageError: not a topic of this run, or subscribed to already.
        """
        self._check_topic(topic)
        if topic in self._subscribed:
            raise UsageError(f"subscribed to already: {topic!r}")

        def accept(forwarder: Any, message: Any) -> bool:
            return self._accept(validator, forwarder, message)

        self._subscribed.add(topic)
        self._pubsub.set_topic_validator(topic, accept, False)
        subscription = await self._pubsub.subscribe(topic)
        try:
            while True:
                message = await subscription.get()
                if message.from_id != self._host.peer_id:
                    yield bytes(message.data)
        finally:
            with trio.CancelScope(deadline=trio.current_time() + 1.0, shield=True):
                await subscription.unsubscribe()
            self._pubsub.remove_topic_validator(topic)
            self._subscribed.discard(topic)

    def _accept(self, validator: Validator, forwarder: Any, message: Any) -> bool:
        data = bytes(message.data)
        if forwarder == self._pubsub.my_id:
            return True
        if len(data) > self._host.limits.gossip_message_bytes or len(message.topicIDs) != 1:
            self._host.fault(forwarder, "oversize or multi-topic gossip message")
            return False
        key = sha256(message.topicIDs[0].encode(), data)
        if key in self._seen:
            return False
        try:
            valid = validator(data)
        except Exception as error:
            logger.debug("validator of %s: %r", message.topicIDs[0], error)
            valid = False
        if not valid:
            self._host.fault(forwarder, "invalid gossip message")
            return False
        self._seen[key] = None
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return True

    def _check_topic(self, topic: str) -> None:
        if topic not in self.topics:
            raise UsageError(f"not a topic of this run: {topic!r}")
