"""The whole swarm, as `make demo` runs it: three honest nodes, one cheat, and kill -9 of every role."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from devnet_run import DevnetRun

STEPS = 36
KILLED = ("coordinator", "trainer", "node-1", "chain", "validator-1", "seeder")
STEP_TIMEOUT_S = 180.0
RUN_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Finished:
    """What is known once the swarm has ended."""

    root: Path
    summary: dict[str, Any]
    acknowledged: set[tuple[str, str, str]]  # before each kill
    submissions: dict[tuple[str, str, str], str]
    restarts: dict[str, int]
    survivors: list[str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    devnet = DevnetRun(
        tmp_path_factory.mktemp("swarm") / "devnet", "--steps", str(STEPS), "--minutes", "12", "--seed", "0"
    )
    try:
        devnet.wait_for("first steps", lambda: devnet.step() >= 3, timeout_s=STEP_TIMEOUT_S)
        acknowledged = set()
        for role in KILLED:
            acknowledged |= devnet.acknowledged()
            devnet.kill(role)
            step = devnet.step()
            devnet.wait_for(
                f"a step after {role} died", lambda step=step: devnet.step() > step, timeout_s=STEP_TIMEOUT_S
            )
        summary = devnet.finish(timeout_s=RUN_TIMEOUT_S)
        restarts = {name: role["restarts"] for name, role in devnet.roles().items()}
        yield Finished(devnet.root, summary, acknowledged, devnet.submissions(), restarts, devnet.survivors())
    finally:
        devnet.close()


def test_every_killed_role_came_back_and_training_went_on(finished: Finished) -> None:
    assert all(finished.restarts[role] >= 1 for role in KILLED)
    assert finished.summary["steps"] == STEPS
    assert finished.summary["versions_published"] >= STEPS


def test_nothing_acknowledged_was_lost(finished: Finished) -> None:
    assert finished.acknowledged
    lost = finished.acknowledged - set(finished.submissions)
    assert not lost
    assert "inconclusive" not in {finished.submissions[unit] for unit in finished.acknowledged}


def test_the_policy_learns(finished: Finished) -> None:
    summary = finished.summary
    assert summary["reward_last"] > summary["reward_first"] + 0.1
    assert summary["heldout_after"] > summary["heldout_before"] + 0.03


def test_the_cheat_is_refused_and_loses_its_stake(finished: Finished) -> None:
    summary = finished.summary
    assert summary["cheats_slashed"] == 1
    assert summary["stake_before"]["cheat-1"] == 1000
    assert summary["stake_after"]["cheat-1"] == 0
    assert any(code.startswith("sampling_") for code in summary["reasons"])


def test_no_honest_node_is_refused_for_fraud_or_loses_anything(finished: Finished) -> None:
    summary = finished.summary
    assert summary["honest_fraud_verdicts"] == 0
    honest = [name for name in summary["stake_before"] if name.startswith("node-")]
    assert len(honest) == 3
    assert all(summary["stake_after"][name] == summary["stake_before"][name] for name in honest)


def test_most_weight_bytes_come_from_other_nodes(finished: Finished) -> None:
    summary = finished.summary
    assert summary["bytes_from_peers"] >= summary["bytes_from_origin"] > 0


def test_no_process_outlives_the_devnet(finished: Finished) -> None:
    assert not finished.survivors


def test_up_again_goes_on_and_ctrl_c_ends_everything(finished: Finished) -> None:
    devnet = DevnetRun(finished.root, "--steps", "0", "--minutes", "0")
    try:
        devnet.wait_for("a further step", lambda: devnet.step() > STEPS, timeout_s=2 * STEP_TIMEOUT_S)
        devnet.process.send_signal(signal.SIGINT)
        started = time.monotonic()
        assert devnet.process.wait(30) == 130
        assert time.monotonic() - started < 10  # promised to the person who pressed it
        assert not devnet.survivors()
    finally:
        devnet.close()


def test_an_evidence_bundle_gives_the_same_verdict_elsewhere(finished: Finished, tmp_path: Path) -> None:
    status = json.loads((finished.root / "coordinator" / "status.json").read_text())
    case = next(case for case in status["cases"] if case["status"] == "upheld")
    bundle = next((finished.root / "coordinator").rglob(case["evidence"]))
    weights = next(finished.root.glob(f"*/policies/v{case['version']:08d}"), None)
    if weights is None:
        assert case["version"] == 0  # older ones may have made room; version 0 is where it began
        weights = finished.root / "policy-zero"
    audit = subprocess.run(
        [
            *(sys.executable, "-m", "intellect_coordinator", "audit", str(bundle), "--weights", str(weights)),
            *("--data-dir", str(tmp_path / "audit"), "--json"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert audit.returncode == 0, audit.stderr
    report = json.loads(audit.stdout)
    assert report["same"] is True
