"""Everything between the command line and the daemon: run, data directory, keys, registration.

`prepared_node` is the one way to become a node; the daemon adds nothing to who the node is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from intellect_protocol.errors import UnreachableError

from .ask import ask_run
from .chain import open_ledger
from .config import NodeConfig, find_run, open_data_dir, parse_tokens, require_run
from .doctor import Severity, cheap_checks
from .identity import Identity, open_identity, open_wallet, register

if TYPE_CHECKING:
    from intellect_protocol.run import RunConfig


@dataclass(frozen=True)
class PreparedNode:
    """A node that may start work.

    `entitled_since`: the block since which it is bound and staked; it may work for policies recorded in
    later ones. `stake`: the wallet's active stake, 10^-18 tokens. `tell` shows one line to the operator.
    """

    settings: NodeConfig
    run: RunConfig
    data_dir: Path
    identity: Identity
    entitled_since: int
    stake: int
    tell: Callable[[str], None]


@asynccontextmanager
async def prepared_node(settings: NodeConfig, tell: Callable[[str], None]) -> AsyncIterator[PreparedNode]:
    """Find the run, check the machine, open the keys, stake and bind where that is not done yet.

    Raises:
        ConfigError: no run, or settings that contradict each other.
        PreflightError: the machine cannot do the job, or another node runs in the data directory.
        UnreachableError: coordinator or chain do not answer.
        WalletError, BindingError: wallet, password or node key.
        SlashedError: the wallet is barred.
    """
    stake = None if settings.stake is None else parse_tokens(settings.stake)
    wallet = await trio.to_thread.run_sync(open_wallet, settings.wallet, settings.password_file)
    run = await obtain_run(settings, tell)
    data_dir = open_data_dir(settings, run)
    for finding in await trio.to_thread.run_sync(cheap_checks, settings, run, data_dir):
        if finding.severity is Severity.ERROR:
            raise finding.error()
        if finding.severity is Severity.WARNING:
            tell(f"warning: {finding.text}; {finding.remedy}")
    identity = open_identity(data_dir, wallet, tell)
    try:
        since, active = await _register(run, data_dir, identity, stake, tell)
        yield PreparedNode(settings, run, data_dir, identity, since, active, tell)
    finally:
        identity.lock.release()


async def _register(
    run: RunConfig, data_dir: Path, identity: Identity, stake: int | None, tell: Callable[[str], None]
) -> tuple[int, int]:
    # The swarm opens the same folder of unmined transactions later: this one is closed first.
    ledger = open_ledger(run, data_dir / "ledger")
    try:
        await ledger.check()
        since = await register(ledger, identity, stake, tell)
        return since, (await ledger.account(identity.wallet.address)).active
    finally:
        ledger.close()


async def obtain_run(settings: NodeConfig, tell: Callable[[str], None]) -> RunConfig:
    """The run configuration: from a file or URL, or from the coordinator named in the settings.

    Where the coordinator does not answer and the data directory knows the run already, that is used.

    Raises:
        ConfigError: there is none, or it is malformed.
        UnreachableError: coordinator or URL do not answer.
    """
    if settings.coordinator is None:
        return await trio.to_thread.run_sync(require_run, settings)
    known = await trio.to_thread.run_sync(_known_run, settings)
    try:
        return await ask_run(settings.coordinator)
    except UnreachableError as error:
        if known is None:
            raise
        tell(f"{error}; going on with the run configuration in {settings.data_dir}")
        return known


def _known_run(settings: NodeConfig) -> RunConfig | None:
    from msgspec.structs import replace

    return None if settings.data_dir is None else find_run(replace(settings, coordinator=None))
