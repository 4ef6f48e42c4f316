"""A host for one question: it listens nowhere and its key is thrown away."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ..keys import PeerKey
from .host import Host, HostOptions, open_host


@asynccontextmanager
async def passer_by() -> AsyncIterator[Host]:
    """A host that can dial and ask, and that nobody can find."""
    with tempfile.TemporaryDirectory(prefix="intellect-") as folder:
        options = HostOptions(
            peer_key=PeerKey.create(),
            data_dir=Path(folder),
            listen=[],
            dht_server=False,
            agent="intellect-node",
        )
        async with open_host(options) as host:
            yield host
