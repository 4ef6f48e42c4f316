"""What a node says about itself: `status.json`, written every second, and the views made from it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import trio

from .identity import is_running

STATUS_FILE = "status.json"
_MAX_STATUS_BYTES = 1 << 20
_STALE_S = 10.0


class NodeStatus(msgspec.Struct, kw_only=True):
    """One node now. Amounts of stake are whole tokens, times Unix ms, `version` -1 where there is none."""

    role: str = "node"
    name: str = ""
    pid: int = 0
    run: str = ""
    run_id: str = ""
    state: str = "starting"
    waiting_for: str = ""
    registered: bool = False
    version: int = -1  # policy in the engine
    head: int = -1  # newest version known
    lag: int = 0  # versions behind the head
    units_submitted: int = 0
    units_accepted: int = 0
    units_rejected: int = 0
    units_waiting: int = 0  # made, no receipt yet
    reasons: dict[str, int] = msgspec.field(default_factory=dict)
    node: str = ""
    wallet: str = ""
    peer_id: str = ""
    stake: float = 0.0
    bytes_from_origin: int = 0
    bytes_from_peers: int = 0
    peers: int = 0
    tokens_per_s: float = 0.0
    device: str = ""
    dtype: str = ""
    last_event: str = ""
    last_credited_version: int | None = None
    coordinator_seen_ms: int | None = None  # the coordinator last answered then
    clock_skew_s: float | None = None  # our clock minus the coordinator's
    started_ms: int = 0
    written_ms: int = 0


def write_status(data_dir: Path, status: NodeStatus) -> None:
    """Replace the status file. A disk that refuses is no reason to stop working."""
    status.written_ms = time.time_ns() // 1_000_000
    part = data_dir / f".{STATUS_FILE}.part"
    with contextlib.suppress(OSError):
        part.write_bytes(msgspec.json.encode(status))
        os.replace(part, data_dir / STATUS_FILE)


def read_status(data_dir: Path) -> NodeStatus | None:
    """The last status written, or None if there is none that can be read."""
    try:
        with (data_dir / STATUS_FILE).open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_STATUS_BYTES), type=NodeStatus)
    except (OSError, msgspec.MsgspecError):
        return None


def describe(data_dir: Path, now_ms: int) -> tuple[dict[str, Any], bool]:
    """What `status` shows, and whether a node runs in the data directory and is alive."""
    running, status = is_running(data_dir), read_status(data_dir)
    if status is None:
        return {
            "state": "running" if running else "never started here",
            "data directory": str(data_dir),
        }, running
    age_s = max(0.0, (now_ms - status.written_ms) / 1000)
    if not running:
        state = f"stopped {_ago(age_s)}"
    elif age_s > _STALE_S:
        state = f"hanging: no status for {age_s:.0f} s (process {status.pid})"
    else:
        state = status.state
    seen = status.coordinator_seen_ms
    shown = {
        "state": state,
        "waiting for": status.waiting_for if running else "",
        "run": f"{status.run} ({status.run_id[:16]})",
        "policy": _policy(status),
        "units": (
            f"{status.units_submitted} submitted, {status.units_accepted} accepted, "
            f"{status.units_rejected} refused, {status.units_waiting} waiting to be sent"
        ),
        "refusals": ", ".join(f"{code} {count}" for code, count in sorted(status.reasons.items())),
        "speed": f"{status.tokens_per_s:,.0f} tokens/s on {status.device or 'no device yet'}",
        "weights from": f"origin {status.bytes_from_origin:,} B, peers {status.bytes_from_peers:,} B",
        "coordinator": "never answered" if seen is None else f"answered {_ago((now_ms - seen) / 1000)}",
        "stake": f"{status.stake:,g} tokens",
        "node": status.node,
        "wallet": status.wallet,
        "last event": status.last_event,
    }
    return {key: value for key, value in shown.items() if value}, running


def _policy(status: NodeStatus) -> str:
    if status.version < 0:
        return f"none yet (head is {status.head})" if status.head >= 0 else "none yet"
    behind = f", {status.lag} behind the head" if status.lag else ", the head"
    return f"version {status.version}{behind}"


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


class Speed:
    """Tokens per second over the last minute."""

    def __init__(self, window_s: float = 60.0) -> None:
        self._window_s = window_s
        self._made: list[tuple[float, int]] = []
        self._since = trio.current_time()

    def add(self, tokens: int) -> None:
        """So many tokens were finished now."""
        self._made.append((trio.current_time(), tokens))

    def per_s(self) -> float:
        """The rate; 0.0 before anything was made."""
        now = trio.current_time()
        self._made = [(at, tokens) for at, tokens in self._made if at > now - self._window_s]
        span_s = min(self._window_s, now - self._since)
        return sum(tokens for _, tokens in self._made) / span_s if span_s > 0 else 0.0
