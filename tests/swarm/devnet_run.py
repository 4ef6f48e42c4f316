"""A devnet as a person starts it, from outside: the command, its files, its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

POLL_S = 0.2


class DevnetRun:
    """`intellect-node devnet up` in a directory."""

    def __init__(self, root: Path, *arguments: str) -> None:
        self.root = root
        self.summary_file = root.with_name(f"{root.name}-summary.json")
        self.output = root.with_name(f"{root.name}-output.txt")
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "intellect_node", "devnet", "up", "--no-tui"),
                    *("--data-dir", str(root), "--json", str(self.summary_file), *arguments),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "COLUMNS": "120"},
            )

    def status(self, role: str) -> dict[str, Any]:
        """A role's status file."""
        try:
            content: dict[str, Any] = json.loads((self.root / role / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return content

    def roles(self) -> dict[str, dict[str, int]]:
        """Process id and restarts by role."""
        try:
            content: dict[str, dict[str, int]] = json.loads((self.root / "processes.json").read_text())
        except (OSError, ValueError):
            return {}
        return content

    def step(self) -> int:
        """The trainer's newest version."""
        return int(self.status("trainer").get("step") or 0)

    def wait_for(self, what: str, condition: Callable[[], bool], *, timeout_s: float) -> None:
        """Poll until `condition` holds; fails with the devnet's output if it does not."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended while waiting for {what}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_s:.0f} s:\n{self.tail()}"
            time.sleep(POLL_S)

    def kill(self, role: str) -> None:
        """kill -9 of a role; returns when it runs again."""
        before = self.roles()[role]
        os.kill(before["pid"], signal.SIGKILL)
        self.wait_for(
            f"restart of {role}", lambda: self.roles()[role]["restarts"] > before["restarts"], timeout_s=60
        )

    def acknowledged(self) -> set[tuple[str, str, str]]:
        """(node, unit, file hash) of all units that nodes hold a receipt for."""
        found = set()
        for folder in self.root.glob("node-*"):
            listed = subprocess.run(
                [
                    *(sys.executable, "-m", "intellect_node", "work", "list", "--json"),
                    *("--newest", "100000", "--data-dir", str(folder)),
                ],
                capture_output=True,
                check=True,
                timeout=60,
            )
            node = str(self.status(folder.name)["node"]).lower()
            for unit in json.loads(listed.stdout):
                if "received" in unit["times_ms"]:
                    found.add((node, unit["unit"], unit["file_hash"]))
        return found

    def submissions(self) -> dict[tuple[str, str, str], str]:
        """State of every submission in the coordinator's database, by (node, unit, file hash)."""
        listed = subprocess.run(
            [
                *(sys.executable, "-m", "intellect_coordinator", "submissions", "list", "--json"),
                *("--limit", "100000", "--data-dir", str(self.root / "coordinator")),
            ],
            capture_output=True,
            check=True,
            timeout=60,
        )
        return {
            (row["node"].lower(), f"{row['version']}/{row['index']}", row["file_hash"]): row["state"]
            for row in json.loads(listed.stdout)
        }

    def finish(self, *, timeout_s: float) -> dict[str, Any]:
        """Wait for the end; the summary."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:.0f} s:\n{self.tail()}") from None
        assert code == 0, self.tail()
        summary: dict[str, Any] = json.loads(self.summary_file.read_text())
        return summary

    def survivors(self) -> list[str]:
        """Processes that still name the directory on their command line."""
        found = []
        for process in psutil.process_iter(["pid", "cmdline"]):
            command = " ".join(process.info["cmdline"] or [])
            if str(self.root) in command and process.info["pid"] not in (self.process.pid, os.getpid()):
                found.append(command)
        return found

    def close(self) -> None:
        """End it, whatever state it is in."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def tail(self) -> str:
        """The end of the devnet's output and of every log."""
        texts = [self.output.read_text()[-3000:]]
        texts += [f"== {log.name}\n{log.read_text()[-600:]}" for log in sorted(self.root.glob("logs/*.log"))]
        return "\n".join(texts)
