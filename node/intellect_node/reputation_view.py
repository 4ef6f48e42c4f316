"""`reputation ADDRESS`: recomputed here from the ledger's events and the published work files.

Work files come from any peer that has them: the ledger names each by its hash, and every leaf in one is
checked against the verdict behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio

from intellect_protocol.errors import IntellectError, UsageError
from intellect_protocol.keys import address_bytes, checksum_address
from intellect_protocol.ledger.events import LedgerEvent, SetAppointed
from intellect_protocol.network.work_files import open_work_files, standing_hashes, without_voided
from intellect_protocol.reputation import Reputation, compute_reputation
from intellect_protocol.work_file import WorkFile, read_work_file

from .chain import open_ledger
from .options import print_json

if TYPE_CHECKING:
    from intellect_protocol.run import RunConfig

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
    async with open_work_files(run) as fetch:
        for digest in hashes:
            content = await fetch(digest)
            if content is None:
                missing.append(digest)
            else:
                checked = await trio.to_thread.run_sync(read_work_file, content, run.run_id, validators)
                files.append(without_voided(checked, events))
    return files, missing


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
