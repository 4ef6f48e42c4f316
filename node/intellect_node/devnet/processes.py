"""Child processes of a devnet: started in order, restarted when they die, gone when we are.

Every role runs as its own operating-system process with its own log file. A process that ends
although it should run is started again with growing pauses, as a service manager would do; one that
ends with an exit code that says "do not come back" (refused or slashed, usage, wallet) stays down.
Children are in sessions of their own, so that Ctrl-C in the terminal reaches only us, and the
kernel ends them if we are killed (PR_SET_PDEATHSIG; set from the main thread, because the signal
follows the life of the *thread* that forked).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio

from intellect_protocol.errors import (
    EXIT_KEY,
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_UPGRADE,
    EXIT_USAGE,
    PreflightError,
)

_FINAL_EXITS = {EXIT_OK, EXIT_USAGE, EXIT_KEY, EXIT_REFUSED, EXIT_UPGRADE}
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2
_LONGEST_PAUSE_S = 10.0
STOP_GRACE_S = 7.0


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True)
class Program:
    """How to start one role."""

    name: str
    argv: Sequence[str]  # without the interpreter: "-m", module, arguments
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Running:
    """One role while it runs."""

    program: Program
    process: subprocess.Popen[bytes]
    started_at: float
    restarts: int = 0
    final_exit: int | None = None


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of every child: one thread per process, no look-ups on a model hub."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        **extra,
    }


def start(program: Program) -> subprocess.Popen[bytes]:
    """Start a role; its output goes to the end of its log file."""
    program.log.parent.mkdir(parents=True, exist_ok=True)
    with program.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *program.argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=child_environment(program.environment),
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def run_once(program: Program, *, timeout_s: float) -> None:
    """Run a program that ends by itself.

    Raises:
        PreflightError: it failed or took too long; the text carries the end of its log.
    """
    process = start(program)
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise PreflightError(
            f"{program.name} did not end within {timeout_s:.0f} s; see {program.log}"
        ) from None
    except BaseException:
        process.kill()
        process.wait()
        raise
    if code != EXIT_OK:
        raise PreflightError(f"{program.name} failed ({describe_exit(code)}): {last_line(program.log)}")


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def last_line(log: Path) -> str:
    """The last line that a role wrote, for error texts."""
    try:
        lines = log.read_bytes()[-4096:].decode(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else f"see {log}"


class ProcessGroup:
    """The devnet's roles; `watch` restarts what dies, `stop` ends everything.

    Args:
        record: JSON file with the process id and the number of restarts of every role, for people
            and tests that want to kill one.
    """

    def __init__(self, tell: Callable[[str], None], record: Path) -> None:
        self._tell = tell
        self._record = record
        self._running: dict[str, Running] = {}

    def start(self, program: Program) -> None:
        """Start a role and keep it running."""
        self._running[program.name] = Running(program, start(program), time.monotonic())
        self._write_record()

    def _write_record(self) -> None:
        roles = {name: {"pid": r.process.pid, "restarts": r.restarts} for name, r in self._running.items()}
        draft = self._record.with_suffix(".new")
        draft.write_text(json.dumps(roles, indent=1) + "\n")
        draft.replace(self._record)

    def exit_code(self, name: str) -> int | None:
        """The exit code of a role that ended for good; None while it runs or will be restarted."""
        return self._running[name].final_exit

    async def watch(self) -> None:
        """Restart roles that die, until cancelled."""
        pauses: dict[str, float] = {}
        due: dict[str, float] = {}
        while True:
            now = time.monotonic()
            for name, running in self._running.items():
                code = running.process.poll()
                if code is None or running.final_exit is not None:
                    continue
                if name in due:
                    if now >= due[name]:
                        del due[name]
                        running.process = start(running.program)
                        running.started_at = now
                        running.restarts += 1
                        self._write_record()
                    continue
                if code in _FINAL_EXITS:
                    running.final_exit = code
                    self._tell(f"{name} ended: {last_line(running.program.log)}")
                    continue
                lived_s = now - running.started_at
                pauses[name] = 0.5 if lived_s > 30 else min(2 * pauses.get(name, 0.25), _LONGEST_PAUSE_S)
                due[name] = now + pauses[name]
                self._tell(f"{name} died ({describe_exit(code)}); starting it again")
            await trio.sleep(_POLL_S)

    def stop(self) -> None:
        """End every role: SIGTERM, then SIGKILL for those that remain after `STOP_GRACE_S`."""
        alive = [r.process for r in self._running.values() if r.process.poll() is None]
        for process in alive:
            process.terminate()
        deadline = time.monotonic() + STOP_GRACE_S
        for process in alive:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
