"""A coordinator's intake in a process of its own, to be killed: prints a line per receipt it gave."""

from __future__ import annotations

import sys
from pathlib import Path

import trio
from coordinator_site import NODE, Site

VERSIONS, UNITS = 5, 6


def content(version: int, index: int) -> bytes:
    """A file that differs for every unit, large enough for a kill to hit a half-written one."""
    return bytes([version, index]) * 200_000


async def main(folder: Path, model: Path) -> None:
    site = Site(folder, model)
    await site.standing.open()
    for version in range(VERSIONS):
        site.heads.set(version)
        for index in range(UNITS):
            body = content(version, index)
            message = site.submission(body, index, version=version)
            receipt = await site.intake.submit(NODE.address, message, body)
            print(f"{version} {index} {receipt.signature.hex()}", flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), Path(sys.argv[2]))
