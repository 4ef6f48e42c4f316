"""Where a devnet keeps its things, and what it was made with.

`devnet.json` fixes options, ports and names when the devnet is made; `up` in the same directory
goes on with them, so that a restarted role listens where it did before.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import msgspec

from intellect_protocol.errors import ConfigError

VALIDATORS = 3


class DevnetPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a devnet consists of; fixed when it is made."""

    model: str  # "tiny", "smollm2" or a folder
    recipe: str  # the trainer's preset
    task: str
    nodes: int
    cheats: list[str]
    seed: int
    ports: dict[str, int]


class Layout:
    """Paths under a devnet's data directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plan_file = root / "devnet.json"
        self.run_file = root / "run.toml"
        self.deployment_file = root / "deployment.json"
        self.ready_marker = root / "ready"
        self.password_file = root / "keys" / "password"
        self.chain_dir = root / "chain"
        self.coordinator_dir = root / "coordinator"
        self.trainer_dir = root / "trainer"
        self.seeder_dir = root / "seeder"
        self.batches = root / "batches"
        self.policy_zero = root / "policy-zero"
        self.test_wallet = root / "keys" / "wallet-test.json"

    def key(self, name: str) -> Path:
        """Secret of an operator's role (coordinator, publisher, validator-N)."""
        return self.root / "keys" / f"{name}.key"

    def wallet(self, name: str) -> Path:
        """Keystore of a node's wallet."""
        return self.root / "keys" / f"wallet-{name}.json"

    def role_dir(self, name: str) -> Path:
        """Data directory of a node or a validator."""
        return self.root / name

    def log(self, name: str) -> Path:
        """Log file of a role."""
        return self.root / "logs" / f"{name}.log"

    def rpc_url(self, plan: DevnetPlan) -> str:
        """Address of the development chain."""
        return f"http://127.0.0.1:{plan.ports['chain']}"


def node_names(plan: DevnetPlan) -> list[tuple[str, str | None]]:
    """(name, kind of cheat or None) of every node."""
    honest: list[tuple[str, str | None]] = [(f"node-{number}", None) for number in range(1, plan.nodes + 1)]
    return honest + [(f"cheat-{number}", kind) for number, kind in enumerate(plan.cheats, 1)]


def validator_names() -> list[str]:
    """Names of the validators; the first one judges submissions."""
    return [f"validator-{number}" for number in range(1, VALIDATORS + 1)]


def role_names(plan: DevnetPlan) -> list[str]:
    """Every role that listens on a port."""
    return ["chain", "coordinator", "seeder", *validator_names(), *(name for name, _ in node_names(plan))]


def free_ports(count: int) -> list[int]:
    """Loopback TCP ports that are free now, below the range the kernel hands out by itself."""
    sockets: list[socket.socket] = []
    ports: list[int] = []
    candidate = 20_000 + int.from_bytes(os.urandom(2), "little") % 10_000
    try:
        while len(ports) < count:
            candidate += 1
            if candidate > 32_000:
                raise ConfigError("no free TCP ports on the loopback address")
            probe = socket.socket()
            try:
                probe.bind(("127.0.0.1", candidate))
            except OSError:
                probe.close()
                continue
            sockets.append(probe)
            ports.append(candidate)
    finally:
        for probe in sockets:
            probe.close()
    return ports


def load_plan(layout: Layout) -> DevnetPlan | None:
    """The plan of a devnet that was made before; None if there is none.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        return msgspec.json.decode(layout.plan_file.read_bytes(), type=DevnetPlan)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{layout.plan_file}: {error}") from error


def save_plan(layout: Layout, plan: DevnetPlan) -> None:
    """Write the plan, whole or not at all."""
    layout.root.mkdir(parents=True, exist_ok=True)
    temporary = layout.plan_file.with_suffix(".new")
    temporary.write_text(json.dumps(msgspec.to_builtins(plan), indent=2) + "\n")
    temporary.replace(layout.plan_file)
