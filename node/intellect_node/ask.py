"""Public questions to one peer, asked before or without being part of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from intellect_protocol.errors import ConfigError, InvalidDataError, RefusedError, UnreachableError

if TYPE_CHECKING:
    from intellect_protocol.run import RunConfig

_DIAL_S = 30.0  # a peer that answers after 20 s still works
_ANSWER_S = 15.0


async def ask_run(address: str) -> RunConfig:
    """Ask a peer for the run configuration, and check its signature.

    Args:
        address: multiaddress with /p2p/; the connection proves that it is that peer.

    Raises:
        UsageError: not an address.
        ConfigError: the answer is not a run configuration.
        UnreachableError: nobody answers.
    """
    from intellect_protocol.messages import GetRun, GetRunResult
    from intellect_protocol.network.passer_by import passer_by
    from intellect_protocol.run import parse_run_config

    async with passer_by() as host:
        peer_id = await host.connect(address, timeout_s=_DIAL_S)
        try:
            answer, _ = await host.client.call(peer_id, GetRun(), GetRunResult, deadline_s=_ANSWER_S)
        except RefusedError as error:
            raise UnreachableError(f"{address} gives no run configuration: {error}") from error
        except InvalidDataError as error:
            raise ConfigError(f"{address}: {error}") from error
    return parse_run_config(answer.config, source=address)


async def ask_clock(address: str) -> float:
    """A peer's clock, seconds since 1970.

    Raises:
        UnreachableError, RefusedError, InvalidDataError: no usable answer.
    """
    from intellect_protocol.messages import GetHead, GetHeadResult
    from intellect_protocol.network.passer_by import passer_by

    async with passer_by() as host:
        peer_id = await host.connect(address, timeout_s=_DIAL_S)
        answer, _ = await host.client.call(peer_id, GetHead(), GetHeadResult, deadline_s=_ANSWER_S)
        return answer.clock_ms / 1000
