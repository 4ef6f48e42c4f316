"""`reputation ADDRESS`: recomputed here from the ledger's events and the published work files.

Work files come from any peer that has them: the ledger names each by its hash, and every leaf in one is
checked against the verdict behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import trio

from intellect_protocol.errors import IntellectError, UnreachableError, UsageError
from intellect_protocol.keys import address_bytes, checksum_address
from intellect_protocol.ledger.events import LedgerEvent, SetAppointed, WorkCommitted, WorkVoided
from intellect_protocol.messages import GetWorkFile, GetWorkFileResult
from intellect_protocol.reputation import Reputation, compute_reputation
from intellect_protocol.wire import sha256
from intellect_protocol.work_file import MAX_WORK_FILE_BYTES, WorkFile, read_work_file

from .ask import passer_by
from .chain import open_ledger
from .options import print_json

if TYPE_CHECKING:
    from intellect_protocol.network.host import Host
    from intellect_protocol.run import RunConfig

_DIAL_S = 10.0
_FILE_S = 60.0
_BARS = "▁▂▃▄▅▆▇█"
_BARS_SHOWN = 60


async def show_reputation(run: RunConfig, address: str, as_json: bool) -> None:
    """Print the reputation of a wallet, or of the wallet of a node key.

    Raises:
        UsageError: not an address.
        UnreachableError: the chain, or every peer with work files, does not answer.
    """
    try:
        wanted = checksum_address(address_bytes(address))
    except IntellectError:
        raise UsageError(f"not an address: {address[:64]!r}") from None
    ledger = open_ledger(run)
    try:
        binding = await ledger.node(wanted)
        owner = wanted if binding is None else binding.owner
        events = await ledger.events(0, (await ledger.block()).number)
    finally:
        ledger.close()
    files, missing = await _work_files(run, events)
    reputation = compute_reputation(owner, events, files)
    if as_json:
        print_json({"reputation": reputation, "missing_work_files": [digest.hex() for digest in missing]})
        return
    for line in table(reputation):
        print(line)
    if missing:
        print(f"{len(missing)} published work files could not be had: the numbers leave them out")


async def _work_files(run: RunConfig, events: Sequence[LedgerEvent]) -> tuple[list[WorkFile], list[bytes]]:
    """The work files that stand on the ledger, and the hashes of those nobody gave us."""
    hashes = standing_hashes(events, run.run_id)
    if not hashes:
        return [], []
    validators = {member for event in events if isinstance(event, SetAppointed) for member in event.members}
    files, missing = [], []
    async with passer_by() as host:
        peers = await _connect(host, run)
        for digest in hashes:
            content = await _fetch(host, peers, digest)
            if content is None:
                missing.append(digest)
            else:
                checked = await trio.to_thread.run_sync(read_work_file, content, run.run_id, validators)
                files.append(without_voided(checked, events))
    return files, missing


def standing_hashes(events: Sequence[LedgerEvent], run_id: bytes) -> list[bytes]:
    """Hashes of the run's work files of which at least one version was not voided, in ledger order."""
    voided = _voided(events, run_id)
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
    voided = _voided(events, file.run_id)
    kept = [work for work in file.versions if (work.version, work.revision) not in voided]
    return msgspec.structs.replace(file, versions=kept)


def _voided(events: Sequence[LedgerEvent], run_id: bytes) -> set[tuple[int, int]]:
    return {
        (event.version, event.revision)
        for event in events
        if isinstance(event, WorkVoided) and event.run_id == run_id
    }


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


def table(reputation: Reputation) -> list[str]:
    """Lines that show a reputation: numbers, a bar per version, and the events behind them."""
    since = "never bound a node" if reputation.first_block is None else f"block {reputation.first_block}"
    barred = " (barred: a fraud was upheld)" if reputation.barred else ""
    lines = [
        f"wallet     {reputation.owner}",
        f"score      {reputation.score:g} of 100{barred}",
        f"units      {reputation.accepted} accepted, {reputation.rejected} refused, "
        f"{reputation.abandoned} abandoned",
        f"stake      {reputation.stake / 10**18:,g} tokens",
        f"cases      {reputation.cases_upheld} upheld",
        f"since      {since}",
        f"nodes      {', '.join(reputation.nodes) or 'none'}",
    ]
    if reputation.versions:
        recent = reputation.versions[-_BARS_SHOWN:]
        bars = sparkline([credit.accepted for credit in recent])
        lines.append(f"accepted   {bars} (policies {recent[0].version} to {recent[-1].version})")
    lines += [f"  block {event.block:>8}  {event.text}" for event in reputation.events]
    return lines


def sparkline(values: Sequence[float]) -> str:
    """One bar per value, as high as its share of the largest."""
    top = max(values, default=0) or 1
    return "".join(_BARS[round(value / top * (len(_BARS) - 1))] for value in values)
