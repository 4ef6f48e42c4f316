"""A coordinator's intake in a process of its own, to be killed: prints a line per receipt it gave.

Arguments: the site's folder, the model's folder and, where units are drawn for audits, the terms in JSON.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import trio
from coordinator_site import NODE, Site

from intellect_protocol.run import AuditTerms

VERSIONS, UNITS = 5, 6


def content(version: int, index: int) -> bytes:
    """A file that differs for every unit, large enough for a kill to hit a half-written one."""
    return bytes([version, index]) * 200_000


async def main(folder: Path, model: Path, audit: AuditTerms | None) -> None:
    site = Site(folder, model, audit)
    await site.standing.open()
    await site.audits.open()
    for version in range(VERSIONS):
        site.heads.set(version)
        for index in range(UNITS):
            body = content(version, index)
            message = site.submission(body, index, version=version)
            receipt = await site.intake.submit(NODE.address, message, body)
            print(f"{version} {index} {receipt.signature.hex()}", flush=True)
    print("done", flush=True)


def run_until(folder: Path, model: Path, receipts: int, *arguments: str) -> list[str]:
    """Run the intake and kill -9 it after so many receipts; returns the lines it printed."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # This interpreter's own path: the packages under test may lie elsewhere than those installed.
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "intake_process", str(folder), str(model), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if len(lines) == receipts:
            process.kill()
    process.wait()
    process.stdout.close()
    return lines


if __name__ == "__main__":
    terms = msgspec.json.decode(sys.argv[3], type=AuditTerms) if len(sys.argv) > 3 else None
    trio.run(main, Path(sys.argv[1]), Path(sys.argv[2]), terms)
