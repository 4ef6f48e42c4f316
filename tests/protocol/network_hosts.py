"""Hosts on loopback for the network tests, and patience without fixed sleeps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import trio
from network_peer import PATIENT, RUN_ID

from intellect_protocol.keys import PeerKey
from intellect_protocol.network.host import Host, HostOptions, open_host
from intellect_protocol.network.limits import Timeouts

CHAIN_ID = 31337
REGISTRY = "0x" + "22" * 20


def loopback_host(
    data_dir: Path, *, peer_key: PeerKey | None = None, **options: Any
) -> AbstractAsyncContextManager[Host]:
    """A host of the test run that listens on a free port of 127.0.0.1."""
    values: dict[str, Any] = {
        "listen": ["/ip4/127.0.0.1/tcp/0"],
        "run_id": RUN_ID,
        "chain_id": CHAIN_ID,
        "registry": REGISTRY,
        "timeouts": Timeouts(**PATIENT),
        **options,
    }
    return open_host(HostOptions(peer_key=peer_key or PeerKey.create(), data_dir=data_dir, **values))


async def until(condition: Callable[[], bool | Awaitable[bool]], *, deadline_s: float = 60.0) -> None:
    """Poll until `condition` holds.

    Raises:
        trio.TooSlowError: it did not within `deadline_s`.
    """
    with trio.fail_after(deadline_s):
        while True:
            value = condition()
            if value if isinstance(value, bool) else await value:
                return
            await trio.sleep(0.02)
