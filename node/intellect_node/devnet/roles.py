"""The command line of every role of a devnet."""

from __future__ import annotations

from collections.abc import Sequence

from .layout import DevnetPlan, Layout, validator_names
from .processes import Program
from .setup import STAKE_TOKENS, coordinator_address

# Two cores make all rollouts. A node makes as many units of a version as a step can use together with the
# others, then one more now and then: what lies beyond would only slow the trainer down. By recipe.
MAX_UNITS_AHEAD = {"tiny": 2, "smollm2": 4}
AHEAD_PAUSE_S = {"tiny": 2.0, "smollm2": 20.0}


def coordinator_program(layout: Layout, plan: DevnetPlan) -> Program:
    """Coordinator: intake, jobs, batches, slashing, dashboard."""
    return Program(
        "coordinator",
        [
            "-m",
            "intellect_coordinator",
            "serve",
            "--run",
            str(layout.run_file),
            "--data-dir",
            str(layout.coordinator_dir),
            "--batches",
            str(layout.batches),
            "--key",
            str(layout.key("coordinator")),
            "--listen",
            _listen(plan, "coordinator"),
            "--web-port",
            str(plan.ports["web"]),
        ],
        layout.log("coordinator"),
    )


def validator_programs(layout: Layout, plan: DevnetPlan) -> list[Program]:
    """Validators: the first judges submissions; all replay evidence and sign work roots."""
    names = validator_names()
    return [
        Program(
            name,
            [
                "-m",
                "intellect_coordinator",
                "validate",
                "--run",
                str(layout.run_file),
                "--data-dir",
                str(layout.role_dir(name)),
                "--key",
                str(layout.key(name)),
                "--listen",
                _listen(plan, name),
                "--judge" if name == names[0] else "--no-judge",
            ],
            layout.log(name),
        )
        for name in names
    ]


def trainer_program(layout: Layout, plan: DevnetPlan, steps: int, minutes: float) -> Program:
    """Trainer: reads accepted batches, writes checkpoints."""
    return Program(
        "trainer",
        [
            "-m",
            "intellect_trainer",
            "run",
            "--run",
            str(layout.run_file),
            "--recipe",
            plan.recipe,
            "--data-dir",
            str(layout.trainer_dir),
            "--batches",
            str(layout.batches),
            "--checkpoint",
            str(layout.policy_zero),
            "--key",
            str(layout.key("publisher")),
            "--seed",
            str(plan.seed),
            "--steps",
            str(steps),
            "--minutes",
            str(minutes),
        ],
        layout.log("trainer"),
    )


def seeder_program(layout: Layout, plan: DevnetPlan) -> Program:
    """Seeder: records checkpoints on the ledger, announces and serves them."""
    return Program(
        "seeder",
        [
            "-m",
            "intellect_trainer",
            "seed",
            "--run",
            str(layout.run_file),
            "--data-dir",
            str(layout.seeder_dir),
            "--checkpoints",
            str(layout.trainer_dir / "checkpoints"),
            "--key",
            str(layout.key("publisher")),
            "--listen",
            _listen(plan, "seeder"),
        ],
        layout.log("seeder"),
    )


def node_program(layout: Layout, plan: DevnetPlan, name: str, cheat: str | None) -> Program:
    """A node: `intellect-node join`, or the same daemon with one dishonest part."""
    program: Sequence[str] = ["-m", "intellect_node", "join"]
    if cheat is not None:
        program = ["-m", "intellect_node.devnet.cheat_node", cheat]
    return Program(
        name,
        [
            *program,
            "--wallet",
            str(layout.wallet(name)),
            "--password-file",
            str(layout.password_file),
            "--coordinator",
            coordinator_address(layout, plan),
            "--data-dir",
            str(layout.role_dir(name)),
            "--listen",
            _listen(plan, name),
            "--stake",
            str(STAKE_TOKENS),
            "--name",
            name,
            "--pause-when-ahead",
            "--max-units-ahead",
            str(MAX_UNITS_AHEAD[plan.recipe]),
            "--ahead-pause-s",
            str(AHEAD_PAUSE_S[plan.recipe]),
        ],
        layout.log(name),
    )


def _listen(plan: DevnetPlan, role: str) -> str:
    return f"/ip4/127.0.0.1/tcp/{plan.ports[role]}"
