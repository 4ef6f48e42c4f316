"""The state of a devnet, read from the roles' status files for display and for the final summary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MAX_STATUS_BYTES = 4 << 20


@dataclass(frozen=True)
class NodeRow:
    """One node as the view shows it."""

    name: str
    cheat: str | None
    address: str
    state: str
    version: int
    accepted: int
    rejected: int
    stake: float | None  # in whole tokens
    bytes_from_origin: int
    bytes_from_peers: int
    slashed: bool


@dataclass(frozen=True)
class Snapshot:
    """Everything the view and the summary need at one moment."""

    run_name: str
    version: int = 0
    step: int = 0
    seconds: float = 0.0
    idle_share: float = 0.0
    versions_published: int = 0
    reward_history: Sequence[float] = ()
    heldout: Sequence[tuple[int, float]] = ()
    finished: bool = False
    accepted: int = 0
    rejected: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    fraud_nodes: Sequence[str] = ()  # addresses, one per verdict
    slashed_nodes: frozenset[str] = frozenset()
    events: Sequence[tuple[int, str]] = ()  # (Unix ms, words)
    nodes: Sequence[NodeRow] = ()
    validator_bytes: tuple[int, int] = (0, 0)  # from the origin, from peers

    @property
    def bytes_from_origin(self) -> int:
        """Weight bytes that nodes and validators received from the seeder or the coordinator."""
        return self.validator_bytes[0] + sum(node.bytes_from_origin for node in self.nodes)

    @property
    def bytes_from_peers(self) -> int:
        """Weight bytes that nodes and validators received from each other."""
        return self.validator_bytes[1] + sum(node.bytes_from_peers for node in self.nodes)


def read_status(data_dir: Path) -> dict[str, Any]:
    """A role's status file; {} where there is none yet or it is being replaced."""
    try:
        with (data_dir / "status.json").open("rb") as file:
            content = json.loads(file.read(_MAX_STATUS_BYTES))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def take_snapshot(
    run_name: str,
    node_dirs: Mapping[str, tuple[Path, str | None]],
    validator_dirs: Sequence[Path],
    coordinator_dir: Path,
    trainer_dir: Path,
) -> Snapshot:
    """Read all status files.

    Args:
        node_dirs: by name, the node's data directory and its kind of cheat (None: honest).
    """
    trainer = read_status(trainer_dir)
    coordinator = read_status(coordinator_dir)
    seized = {
        str(case["node"]).lower(): float(case.get("seized") or 0.0)
        for case in coordinator.get("cases", [])
        if case.get("status") == "upheld"
    }
    validators = [read_status(path) for path in validator_dirs]
    return Snapshot(
        run_name=run_name,
        version=int(trainer.get("version", 0)),
        step=int(trainer.get("step", 0)),
        seconds=float(trainer.get("seconds_since_first_step") or 0.0),
        idle_share=float(trainer.get("idle_share") or 0.0),
        versions_published=int(trainer.get("versions_published") or 0),
        reward_history=[float(value) for value in trainer.get("reward_history", [])],
        heldout=[(int(entry["step"]), float(entry["score"])) for entry in trainer.get("heldout", [])],
        finished=bool(trainer.get("finished", False)),
        accepted=int(coordinator.get("accepted", 0)),
        rejected=int(coordinator.get("rejected", 0)),
        reasons={str(code): int(count) for code, count in coordinator.get("reasons", {}).items()},
        fraud_nodes=[str(verdict["node"]).lower() for verdict in coordinator.get("fraud_verdicts", [])],
        slashed_nodes=frozenset(seized),
        events=[(int(event["time_ms"]), str(event["text"])) for event in coordinator.get("events", [])],
        nodes=[
            _node_row(name, cheat, read_status(path), seized) for name, (path, cheat) in node_dirs.items()
        ],
        validator_bytes=(
            sum(int(v.get("bytes_from_origin", 0)) for v in validators),
            sum(int(v.get("bytes_from_peers", 0)) for v in validators),
        ),
    )


def _node_row(
    name: str, cheat: str | None, status: Mapping[str, Any], seized: Mapping[str, float]
) -> NodeRow:
    address = str(status.get("node", "")).lower()
    stake = status.get("stake")
    if stake is not None:  # a slashed node has ended and does not correct its last word
        stake = float(stake) - seized.get(address, 0.0)
    return NodeRow(
        name=f"{name} ({cheat})" if cheat else name,
        cheat=cheat,
        address=address,
        state="slashed" if address in seized else str(status.get("state", "starting")),
        version=int(status.get("version", -1)),
        accepted=int(status.get("units_accepted", 0)),
        rejected=int(status.get("units_rejected", 0)),
        stake=stake,
        bytes_from_origin=int(status.get("bytes_from_origin", 0)),
        bytes_from_peers=int(status.get("bytes_from_peers", 0)),
        slashed=address in seized,
    )
