"""Swarm runs that take too long for every change: a real model, and kill -9 over and over."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from devnet_run import DevnetRun

pytestmark = pytest.mark.long

KILLS = 30
STEP_TIMEOUT_S = 300.0


def test_smollm2_learns_sums_in_the_swarm(tmp_path: Path) -> None:
    devnet = DevnetRun(tmp_path / "devnet", "--model", "smollm2", "--minutes", "10", "--seed", "3")
    try:
        summary = devnet.finish(timeout_s=1500)
    finally:
        devnet.close()
    assert summary["heldout_after"] >= summary["heldout_before"] + 0.15
    assert summary["cheats_slashed"] == 1
    assert summary["honest_fraud_verdicts"] == 0
    assert summary["bytes_from_peers"] >= summary["bytes_from_origin"] > 0


def test_roles_killed_over_and_over_lose_nothing_acknowledged(tmp_path: Path) -> None:
    devnet = DevnetRun(tmp_path / "devnet", "--steps", "0", "--minutes", "0", "--seed", "4")
    chance = random.Random(4)
    acknowledged: set[tuple[str, str, str]] = set()
    try:
        devnet.wait_for("first steps", lambda: devnet.step() >= 2, timeout_s=STEP_TIMEOUT_S)
        for _ in range(KILLS):
            role = chance.choice(sorted(set(devnet.roles()) - {"cheat-1"}))
            step = devnet.step()
            devnet.kill(role)
            devnet.wait_for(
                f"a step after {role} died", lambda step=step: devnet.step() > step, timeout_s=STEP_TIMEOUT_S
            )
            acknowledged |= devnet.acknowledged()
        kept = devnet.submissions()
        verdicts = devnet.status("coordinator")["fraud_verdicts"]
        honest = {str(devnet.status(folder.name)["node"]).lower() for folder in devnet.root.glob("node-*")}
    finally:
        devnet.close()
    assert acknowledged
    assert not acknowledged - set(kept)
    assert not [verdict for verdict in verdicts if verdict["node"].lower() in honest]
    assert not devnet.survivors()
