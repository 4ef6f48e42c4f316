"""The ledger that a run names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from intellect_protocol.ledger.client import Ledger
    from intellect_protocol.run import RunConfig


def open_ledger(run: RunConfig, state_dir: Path | None = None) -> Ledger:
    """The ledger of a run; the caller closes it.

    Args:
        state_dir: where signed transactions are kept until mined; None reads only.

    Raises:
        ConfigError: the run's RPC addresses or contracts are malformed.
    """
    from intellect_protocol.ledger.client import Ledger
    from intellect_protocol.ledger.deployment import Deployment

    terms = run.terms.ledger
    return Ledger(
        run.revision.rpc_urls, Deployment(terms.chain_id, dict(terms.contracts), block=0), state_dir
    )
