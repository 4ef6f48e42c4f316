"""A role's whole connection to the run: host, RPC, ledger, head of the run, weights.

Every role opens exactly one `Swarm` with `open_swarm` and registers its own handlers on
`swarm.server`; leaving the block ends all services.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import trio

from .. import __version__
from ..errors import IntellectError, UnreachableError, UpgradeRequiredError, WireError
from ..keys import PeerKey, Signer, recover_address
from ..ledger.client import Ledger
from ..ledger.deployment import Deployment
from ..messages import GetRun, GetRunResult, VerdictNotice
from ..run import RunConfig
from ..wire import decode_canonical, encode
from .chunk_config import ChunkConfig
from .gossip import verdicts_topic
from .head import HeadTracker
from .host import Host, HostOptions, open_host
from .limits import Limits, Timeouts
from .policy import PolicyWeights
from .rpc_client import RpcClient
from .rpc_server import Call, Reply, RpcServer

R = TypeVar("R")
_VALIDATORS_FRESH_S = 30.0
_COORDINATOR_RETRY_S = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SwarmOptions:
    """What a role brings to the swarm."""

    role: str  # "node" | "coordinator" | "validator" | "seeder" | "client"
    data_dir: Path
    config: RunConfig
    peer_key: PeerKey
    signer: Signer | None  # the key that signs this role's requests
    listen: list[str] = field(default_factory=lambda: ["/ip4/0.0.0.0/tcp/0"])
    weights: bool = False  # fetch and serve checkpoints
    data_port: int = 0  # of the chunk server; 0: any free one
    require_bootstrap: bool = True
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)


class Swarm:
    """One role in one run; made by `open_swarm`."""

    def __init__(
        self, options: SwarmOptions, host: Host, ledger: Ledger, policies: PolicyWeights | None
    ) -> None:
        self.options = options
        self.config = options.config
        self.host = host
        self.ledger = ledger
        self.policies = policies
        self.heads = HeadTracker(host, ledger, options.config, policies.store if policies else None)
        if policies is not None:
            policies.heads = self.heads
        host.server.register(GetRun, self._answer_run)

    @property
    def server(self) -> RpcServer:
        """Register handlers here before peers need them."""
        return self.host.server

    @property
    def client(self) -> RpcClient:
        """Requests to any peer."""
        return self.host.client

    async def _answer_run(self, call: Call[GetRun]) -> Reply:
        return Reply(GetRunResult(config=self.config.to_toml().encode()))

    # --- the coordinator -----------------------------------------------------------------------

    def coordinator(self) -> bytes | None:
        """Peer id of the connected peer that proved to hold the run's coordinator key."""
        address = self.config.terms.keys.coordinator
        for peer in self.host.peers():
            if peer.node == address:
                return peer.peer_id
        return None

    async def call_coordinator(
        self,
        message: msgspec.Struct,
        result_type: type[R],
        *,
        body: bytes | Path | None = None,
        deadline_s: float = 15.0,
        max_body_bytes: int = 0,
    ) -> tuple[R, bytes]:
        """One signed request to the coordinator, (re)connecting to it if need be.

        Raises:
            RefusedError: it refused.
            UnreachableError: it did not answer within `deadline_s`.
            UpgradeRequiredError: a bootstrap peer of the run speaks a newer protocol version.
        """
        deadline = trio.current_time() + deadline_s
        while (peer_id := self.coordinator()) is None:
            left_s = deadline - trio.current_time()
            if left_s <= 0:
                raise UnreachableError("the coordinator does not answer")
            with trio.move_on_after(left_s):
                await self._dial_bootstrap()
                await trio.sleep(_COORDINATOR_RETRY_S)
        return await self.client.call(
            peer_id,
            message,
            result_type,
            signer=self.options.signer,
            body=body,
            deadline_s=max(0.1, deadline - trio.current_time()),
            max_body_bytes=max_body_bytes,
        )

    async def _dial_bootstrap(self) -> None:
        for address in self.config.revision.bootstrap:
            try:
                peer_id = await self.host.connect(address)
                await self.host.bindings.hello(peer_id)
            except UpgradeRequiredError:
                raise
            except IntellectError as error:
                logger.debug("coordinator: %s", error)

    # --- verdicts --------------------------------------------------------------------------------

    async def publish_verdict(self, notice: VerdictNotice) -> None:
        """Gossip the coordinator's word on a submission."""
        await self.host.gossip.publish(verdicts_topic(self.config.run_id), encode(notice))

    async def verdicts(self) -> AsyncGenerator[VerdictNotice, None]:
        """Verdicts that the coordinator signed, as they are gossiped; some may be missed."""
        topic = verdicts_topic(self.config.run_id)
        async for message in self.host.gossip.subscribe(topic, self._is_verdict):
            yield decode_canonical(message, VerdictNotice)

    def _is_verdict(self, message: bytes) -> bool:
        try:
            notice = decode_canonical(message, VerdictNotice)
        except WireError:
            return False
        return notice.run_id == self.config.run_id and (
            recover_address(notice.digest(), notice.signature) == self.config.terms.keys.coordinator
        )


class _NodeDirectory:
    """Whether a key may speak for a peer: the registry's word, or a seat among the run's own keys."""

    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._config = config
        self._ledger = ledger
        self._validators: frozenset[str] = frozenset()
        self._read_at = -_VALIDATORS_FRESH_S

    async def verify(self, node: str, peer_id: bytes) -> bool:
        """Raises UnreachableError or LedgerError where the chain does not answer."""
        keys = self._config.terms.keys
        if node in (keys.coordinator, keys.publisher):
            return True
        if time.monotonic() - self._read_at > _VALIDATORS_FRESH_S:
            self._validators = frozenset((await self._ledger.validator_set()).members)
            self._read_at = time.monotonic()
        if node in self._validators:
            return True
        binding = await self._ledger.node(node)
        return binding is not None and binding.peer_id == peer_id


@asynccontextmanager
async def open_swarm(options: SwarmOptions) -> AsyncIterator[Swarm]:
    """Join the run; leaving the block closes everything.

    Raises:
        UnreachableError: no known peer answers (`require_bootstrap`).
        ConfigError: the ledger of the run is not the one its terms name.
        PreflightError: the port is in use.
    """
    config = options.config
    terms = config.terms.ledger
    deployment = Deployment(chain_id=terms.chain_id, contracts=dict(terms.contracts), block=0)
    ledger = Ledger(config.revision.rpc_urls, deployment, options.data_dir / "ledger")
    try:
        async with open_host(
            HostOptions(
                peer_key=options.peer_key,
                data_dir=options.data_dir,
                listen=options.listen,
                bootstrap=list(config.revision.bootstrap),
                run_id=config.run_id,
                chain_id=terms.chain_id,
                registry=terms.contracts["NodeRegistry"],
                signer=options.signer,
                role=options.role,
                agent=f"intellect-node/{__version__}",
                verify_node=_NodeDirectory(config, ledger).verify,
                require_bootstrap=options.require_bootstrap,
                limits=options.limits,
                timeouts=options.timeouts,
            )
        ) as host:
            policies = None
            if options.weights:
                policies = PolicyWeights(
                    host,
                    options.data_dir,
                    config,
                    origin=options.role in ("seeder", "coordinator"),
                    chunk_config=ChunkConfig(http_port=options.data_port),
                )
            swarm = Swarm(options, host, ledger, policies)
            serving = policies.running() if policies is not None else nullcontext()
            async with serving, trio.open_nursery() as nursery:
                nursery.start_soon(swarm.heads.run)
                yield swarm
                nursery.cancel_scope.cancel()
    finally:
        ledger.close()
