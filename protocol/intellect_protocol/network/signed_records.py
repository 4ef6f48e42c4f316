"""The signed peer record that every gossip message carries, verified once instead of every time.

py-libp2p puts its sender's record into each pubsub message and verifies it twice per message on the way in;
among a dozen peers that was a seventh of a daemon's time. A record of the same bytes from the same peer is as
valid as it was a moment ago.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import libp2p.pubsub.gossipsub as gossipsub_module
import libp2p.pubsub.pubsub as pubsub_module
from libp2p.pubsub.utils import maybe_consume_signed_record

_REMEMBERED = 4096
_FRESH_S = 600.0  # the peer store keeps a record for 7,200 s after it was last consumed


class RecordMemory:
    """Which record each of our hosts last accepted from each peer."""

    def __init__(
        self,
        consume: Callable[[Any, Any, Any], bool] = maybe_consume_signed_record,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._consume = consume
        self._clock = clock
        self._accepted: OrderedDict[tuple[bytes, bytes], tuple[bytes, float]] = OrderedDict()

    def consume(self, message: Any, host: Any, peer_id: Any) -> bool:
        """Whether the message's record, if it has one, is valid and the peer's own."""
        record = bytes(message.senderRecord)
        key = (host.get_id().to_bytes(), peer_id.to_bytes())
        known, at = self._accepted.get(key, (b"", 0.0))
        now = self._clock()
        if record and record == known and now - at < _FRESH_S:
            return True
        valid = self._consume(message, host, peer_id)
        if valid and record:
            self._accepted[key] = (record, now)
            self._accepted.move_to_end(key)
            while len(self._accepted) > _REMEMBERED:
                self._accepted.popitem(last=False)
        return valid


def install() -> None:
    """Have py-libp2p's pubsub ask one memory for the whole process."""
    consume = RecordMemory().consume
    pubsub_module.maybe_consume_signed_record = consume
    gossipsub_module.maybe_consume_signed_record = consume
