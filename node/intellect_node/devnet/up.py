"""`devnet up`: the life of a devnet from set-up to summary."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from rich.console import Console
from rich.live import Live

from intellect_protocol.errors import ConfigError, IntellectError, PreflightError
from intellect_protocol.run import load_run_config

from ..config import set_default_run
from . import roles, setup
from .layout import (
    DevnetPlan,
    Layout,
    free_ports,
    load_plan,
    node_names,
    role_names,
    save_plan,
    validator_names,
)
from .processes import ProcessGroup
from .snapshot import Snapshot, read_status, take_snapshot
from .summary import summarize, summary_table
from .view import EventLog, plain_line, render

_REFRESH_S = 0.5
_PLAIN_EVERY_S = 10.0
_REGISTER_TIMEOUT_S = 120.0
# Long enough to see a model learn on two cores.
_STEPS = {"tiny": 80, "smollm2": 40}
_MINUTES = {"tiny": 5.0, "smollm2": 15.0}
_CASE_GRACE_S = 60.0  # after training: time for an open case to reach its verdict


@dataclass(frozen=True)
class UpOptions:
    """What `devnet up` was asked to do; None: the devnet's own or the model's default."""

    data_dir: Path
    nodes: int | None
    cheats: tuple[str, ...] | None
    model: str | None
    task: str | None
    steps: int | None
    minutes: float | None
    seed: int | None
    json_file: Path | None
    tui: bool
    set_default: bool


class Devnet:
    """One devnet and what is known of it."""

    def __init__(self, layout: Layout, plan: DevnetPlan, options: UpOptions, events: EventLog) -> None:
        self.layout = layout
        self.plan = plan
        self.options = options
        self.events = events
        self.group = ProcessGroup(events.tell, layout.root / "processes.json")
        self.interrupted = False
        self._told_events: set[tuple[int, str]] = set()

    def snapshot(self) -> Snapshot:
        """The roles' status files, read now; new coordinator events are told."""
        snapshot = take_snapshot(
            f"intellect-node devnet, {self.plan.model} on {self.plan.task}",
            {name: (self.layout.role_dir(name), cheat) for name, cheat in node_names(self.plan)},
            [self.layout.role_dir(name) for name in validator_names()],
            self.layout.coordinator_dir,
            self.layout.trainer_dir,
        )
        for time_ms, text in snapshot.events:
            if (time_ms, text) not in self._told_events:
                self._told_events.add((time_ms, text))
                self.events.tell(text, time_ms / 1000)
        return snapshot

    async def start(self) -> None:
        """Set up what is missing and start every role.

        Raises:
            PreflightError: a part of the set-up failed or a node did not register in time.
        """
        tell = self.events.tell
        self.group.start(setup.chain_program(self.layout, self.plan))
        await setup.prepare(self.layout, self.plan, tell)
        if self.options.set_default:
            path = set_default_run(load_run_config(self.layout.run_file))
            tell(f"a bare `intellect-node join --wallet FILE` joins this devnet ({path})")
        tell(f"starting {len(role_names(self.plan)) + 1} processes")
        self.group.start(roles.coordinator_program(self.layout, self.plan))
        await setup.wait_for_port(self.layout, self.plan, "coordinator")
        # The trainer warms up and measures version 0 while the nodes register.
        self.group.start(roles.trainer_program(self.layout, self.plan, *self._trainer_limits()))
        for name, cheat in node_names(self.plan):
            self.group.start(roles.node_program(self.layout, self.plan, name, cheat))
        for program in roles.validator_programs(self.layout, self.plan):
            self.group.start(program)
        await self._wait_until_registered()
        # Only nodes that staked before a version was recorded may work on it: the seeder comes last.
        self.group.start(roles.seeder_program(self.layout, self.plan))

    def _trainer_limits(self) -> tuple[int, float]:
        """Version and minutes of training at which the trainer stops; 0: never.

        The trainer counts over restarts, the person who types `up` again counts from now.
        """
        options, recipe = self.options, self.plan.recipe
        steps = _STEPS[recipe] if options.steps is None else options.steps
        minutes = _MINUTES[recipe] if options.minutes is None else options.minutes
        so_far = read_status(self.layout.trainer_dir)
        steps_so_far = int(so_far.get("step") or 0)
        minutes_so_far = float(so_far.get("seconds_since_first_step") or 0.0) / 60
        return (steps_so_far + steps if steps else 0, minutes_so_far + minutes if minutes else 0.0)

    async def _wait_until_registered(self) -> None:
        deadline = time.monotonic() + _REGISTER_TIMEOUT_S
        waiting = {name for name, _ in node_names(self.plan)}
        while waiting:
            for name in sorted(waiting):
                status = read_status(self.layout.role_dir(name))
                if status.get("registered") or self.group.exit_code(name) is not None:
                    waiting.discard(name)
            if time.monotonic() > deadline:
                raise PreflightError(f"{', '.join(sorted(waiting))} did not register; see the logs")
            await trio.sleep(0.2)
        self.events.tell("all nodes have staked and bound their keys")

    async def follow(self, show: Callable[[Snapshot], None]) -> Snapshot:
        """Show progress until training has ended and open cases are decided."""
        grace_ends: float | None = None
        while True:
            snapshot = self.snapshot()
            show(snapshot)
            if snapshot.finished or self.group.exit_code("trainer") is not None:
                grace_ends = grace_ends or time.monotonic() + _CASE_GRACE_S
                if not self._case_pending(snapshot) or time.monotonic() > grace_ends:
                    return snapshot
            await trio.sleep(_REFRESH_S)

    def _case_pending(self, snapshot: Snapshot) -> bool:
        """Whether a node found guilty of fraud still has its stake."""
        return bool(set(snapshot.fraud_nodes) - snapshot.slashed_nodes)

    async def finish(self, snapshot: Snapshot, stake_before: dict[str, float]) -> dict[str, Any]:
        """The summary, with stakes as the ledger has them."""
        nodes = node_names(self.plan)
        address = {
            name: str(read_status(self.layout.role_dir(name)).get("node", "")).lower() for name, _ in nodes
        }
        return summarize(
            snapshot,
            frozenset(address[name] for name, cheat in nodes if cheat is None),
            frozenset(address[name] for name, cheat in nodes if cheat is not None),
            stake_before,
            await setup.stakes(self.layout, self.plan),
        )


def make_plan(options: UpOptions, layout: Layout) -> DevnetPlan:
    """The plan in the data directory, or a new one.

    Raises:
        ConfigError: options contradict the devnet that is already there.
    """
    plan = load_plan(layout)
    if plan is None:
        model = options.model or "tiny"
        recipe = model if model in ("tiny", "smollm2") else "smollm2"
        plan = DevnetPlan(
            model=model,
            recipe=recipe,
            task=options.task or ("sort_digits" if recipe == "tiny" else "arithmetic"),
            nodes=3 if options.nodes is None else options.nodes,
            cheats=list(options.cheats if options.cheats is not None else ("best-of-n",)),
            seed=options.seed or 0,
            ports={},
        )
        roles_needed = [*role_names(plan), "web"]
        ports = dict(zip(roles_needed, free_ports(len(roles_needed)), strict=True))
        plan = DevnetPlan(
            **{field: getattr(plan, field) for field in plan.__struct_fields__} | {"ports": ports}
        )
        save_plan(layout, plan)
        return plan
    asked = {
        "model": options.model,
        "task": options.task,
        "nodes": options.nodes,
        "seed": options.seed,
        "cheats": list(options.cheats) if options.cheats is not None else None,
    }
    for name, value in asked.items():
        if value is not None and value != getattr(plan, name):
            raise ConfigError(
                f"{layout.root} holds a devnet with {name} = {getattr(plan, name)!r}, not {value!r}; "
                f"use another --data-dir"
            )
    return plan


async def up(options: UpOptions) -> int:
    """Run a devnet; returns the exit code."""
    layout = Layout(options.data_dir)
    plan = make_plan(options, layout)
    console = Console()
    live = options.tui and console.is_terminal
    events = EventLog(None if live else console)
    devnet = Devnet(layout, plan, options, events)
    summary: dict[str, Any] = {}

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(devnet.group.watch)
            nursery.start_soon(_stop_on_signal, devnet, nursery.cancel_scope)
            await devnet.start()
            _tell_how_to_join(devnet)
            stake_before = await setup.stakes(layout, plan)
            with _display(devnet, console, live) as show:
                snapshot = await devnet.follow(show)
            summary.update(await devnet.finish(snapshot, stake_before))
            nursery.cancel_scope.cancel()

    try:
        await run()
    except* IntellectError as group:
        raise group.exceptions[0] from None
    finally:
        await trio.to_thread.run_sync(devnet.group.stop)
    if devnet.interrupted:
        console.print(f"stopped; `intellect-node devnet up --data-dir {layout.root}` goes on from here")
        return 130
    console.print(summary_table(summary))
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(summary, indent=2) + "\n")
    return 0


async def _stop_on_signal(devnet: Devnet, scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            devnet.interrupted = True
            devnet.events.tell("stopping")
            scope.cancel()
            return


def _tell_how_to_join(devnet: Devnet) -> None:
    layout, plan = devnet.layout, devnet.plan
    devnet.events.tell(f"dashboard: http://127.0.0.1:{plan.ports['web']}/")
    devnet.events.tell(
        "join from another terminal: intellect-node join "
        f"--wallet {layout.test_wallet} --password-file {layout.password_file} "
        f"--coordinator {setup.coordinator_address(layout, plan)}"
    )


@contextmanager
def _display(devnet: Devnet, console: Console, live: bool) -> Iterator[Callable[[Snapshot], None]]:
    """The live view where there is a terminal, one line every few seconds where there is none."""
    if live:
        with Live(console=console, auto_refresh=False) as view:
            yield lambda snapshot: view.update(render(snapshot, devnet.events), refresh=True)
        return
    last_s = -_PLAIN_EVERY_S

    def print_line(snapshot: Snapshot) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _PLAIN_EVERY_S:
            last_s = time.monotonic()
            devnet.events.tell(plain_line(snapshot))

    yield print_line
