"""Published work files: which ones stand on the ledger, and getting them from any peer that has them.

The ledger names each file by its hash, so it does not matter who serves it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ..errors import IntellectError, UnreachableError
from ..ledger.events import LedgerEvent, WorkCommitted, WorkVoided
from ..messages import GetWorkFile, GetWorkFileResult
from ..wire import sha256
from ..work_file import MAX_WORK_FILE_BYTES, WorkFile

if TYPE_CHECKING:
    from ..run import RunConfig
    from .host import Host

FetchWorkFile = Callable[[bytes], Awaitable[bytes | None]]
"""The file with this SHA-256, checked, or None if nobody gave it."""

_DIAL_S = 10.0
_FILE_S = 60.0


def standing_hashes(events: Sequence[LedgerEvent], run_id: bytes) -> list[bytes]:
    """Hashes of the run's work files of which at least one version was not voided, in ledger order."""
    voided = voided_work(events, run_id)
    return list(
        dict.fromkeys(
            event.data_hash
            for event in events
            if isinstance(event, WorkCommitted)
            and event.run_id == run_id
            and (event.version, event.revision) not in voided
        )
    )


def without_voided(file: WorkFile, events: Sequence[LedgerEvent]) -> WorkFile:
    """The work file without the versions whose commitment was voided."""
    voided = voided_work(events, file.run_id)
    kept = [work for work in file.versions if (work.version, work.revision) not in voided]
    return msgspec.structs.replace(file, versions=kept)


def voided_work(events: Sequence[LedgerEvent], run_id: bytes) -> set[tuple[int, int]]:
    """Versions and revisions of the run's commitments that were voided."""
    return {
        (event.version, event.revision)
        for event in events
        if isinstance(event, WorkVoided) and event.run_id == run_id
    }


@asynccontextmanager
async def open_work_files(run: RunConfig) -> AsyncIterator[FetchWorkFile]:
    """Fetch work files from the run's bootstrap peers, as a passer-by with a key that is thrown away.

    Raises:
        UnreachableError: no bootstrap peer answers.
    """
    from .passer_by import passer_by

    async with passer_by() as host:
        peers = await _connect(host, run)
        yield partial(_fetch, host, peers)


async def _connect(host: Host, run: RunConfig) -> list[bytes]:
    peers, problem = [], ""
    for address in run.revision.bootstrap:
        try:
            peers.append(await host.connect(address, timeout_s=_DIAL_S))
        except IntellectError as error:
            problem = str(error)
    if not peers:
        raise UnreachableError(f"no peer to get work files from: {problem}")
    return peers


async def _fetch(host: Host, peers: Sequence[bytes], digest: bytes) -> bytes | None:
    for peer_id in peers:
        try:
            _, content = await host.client.call(
                peer_id,
                GetWorkFile(digest),
                GetWorkFileResult,
                deadline_s=_FILE_S,
                max_body_bytes=MAX_WORK_FILE_BYTES,
            )
        except IntellectError:
            continue
        if sha256(content) == digest:
            return content
    return None
