"""A development chain in a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import urllib3

_PROGRAM = """
import sys
from pathlib import Path
from intellect_coordinator.devchain import run_devchain
run_devchain(Path(sys.argv[1]), int(sys.argv[2]))
"""


class DevchainProcess:
    """Started when made; `url` is where it answers."""

    def __init__(self, data_dir: Path, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(data_dir), str(port)], stderr=subprocess.PIPE, text=True
        )
        self.banner: list[str] = []
        self.url = ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.banner.append(line.rstrip())
            if found := re.search(r"ready at (http://127\.0\.0\.1:(\d+))$", line.rstrip()):
                self.url, self.port = found[1], int(found[2])
                return
        raise AssertionError(f"the chain ended with {self.process.wait()}: {self.banner}")

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(timeout=20)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def post(self, body: bytes, **headers: str) -> tuple[int, bytes]:
        """Status and body of the answer to a raw request."""
        with urllib3.PoolManager(retries=False) as pool:
            response = pool.request(
                "POST", self.url, body=body, headers={"Content-Type": "application/json", **headers}
            )
            return response.status, response.data
