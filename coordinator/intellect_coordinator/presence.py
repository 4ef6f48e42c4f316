"""Which nodes were heard of lately. For display and notices only; bounded, and forgotten at restart."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from intellect_protocol.messages import Heartbeat

_MAX_NODES = 4096
_MAX_COUNTERS = 32
_MAX_TEXT = 64


class NodePresence(msgspec.Struct, frozen=True):
    """What a node said last."""

    state: str
    version: int
    counters: dict[str, float]
    seen_ms: int


class Presence:
    """The last heartbeat of each node."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[str, NodePresence] = OrderedDict()

    def heard(self, node: str, beat: Heartbeat, now_ms: int) -> None:
        """Take note of a heartbeat."""
        counters = {name[:_MAX_TEXT]: beat.counters[name] for name in list(beat.counters)[:_MAX_COUNTERS]}
        self._nodes[node] = NodePresence(beat.state[:_MAX_TEXT], beat.version, counters, now_ms)
        self._nodes.move_to_end(node)
        while len(self._nodes) > _MAX_NODES:
            self._nodes.popitem(last=False)

    def view(self) -> dict[str, Any]:
        """All nodes by lower-case address, for status files."""
        return {node.lower(): msgspec.to_builtins(entry) for node, entry in self._nodes.items()}
