"""How a duty goes on in the background: repeated, patient at the start, or as a child process."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Awaitable, Callable

import trio

from intellect_protocol.errors import IntellectError, UnreachableError

_POLL_S = 1.0
_STARTUP_CHAIN_S = 120.0

logger = logging.getLogger(__name__)


async def repeat(what: str, step: Callable[[], Awaitable[None]]) -> None:
    """Do `step` each second; its failures are said once each and do not end anything."""
    last = ""
    while True:
        try:
            await step()
            last = ""
        except (IntellectError, OSError) as error:
            if str(error) != last:
                last = str(error)
                logger.warning("%s: %s", what, error)
        await trio.sleep(_POLL_S)


async def patiently(step: Callable[[], Awaitable[None]]) -> None:
    """Repeat a first step while the chain is still coming up."""
    deadline = trio.current_time() + _STARTUP_CHAIN_S
    while True:
        try:
            return await step()
        except UnreachableError:
            if trio.current_time() > deadline:
                raise
            await trio.sleep(_POLL_S)


async def run_child(arguments: list[str]) -> int:
    """Run this program as a child whose standard input stays open as long as we live; its exit status."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "intellect_coordinator", *arguments], stdin=subprocess.PIPE
    )
    try:
        return await process.wait()
    finally:
        process.kill()  # it only reads: there is nothing to finish
        with trio.CancelScope(shield=True):
            await process.wait()
            if process.stdin is not None:
                await process.stdin.aclose()
