"""The greeting of a connection, and the binding of peer key and node key that it carries.

`Hello` says protocol version, run, role and agent, and may carry a binding: the peer key's signature
over (chain id, registry, node key) and the node key's over (chain id, registry, peer id). It makes a
peer *bound* when both are right and `HostOptions.verify_node` agrees: the ledger for node keys, the
run's terms for the coordinator's. A peer that is not bound may ask for public data and nothing else.
The connection itself proves the peer key (Noise).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

import trio

from ..errors import BindingError, IntellectError, RefusedError, UpgradeRequiredError, WalletError
from ..keys import (
    address_bytes,
    check_binding,
    checksum_address,
    peer_id_text,
    recover_address,
    vouch_digest,
)
from ..messages import Hello
from ..run import PROTOCOL_VERSION
from .peers import Peer
from .rpc import WRONG_RUN, WRONG_VERSION
from .rpc_server import Call, Reply

if TYPE_CHECKING:
    from .host import Host

_MAX_TEXT = 64

logger = logging.getLogger(__name__)


class Bindings:
    """Greets peers and answers greetings."""

    def __init__(self, host: Host) -> None:
        self._host = host
        options = host.options
        node, binding, vouch = "", b"", b""
        if options.signer is not None and options.registry:
            node = options.signer.address
            binding = options.peer_key.sign_binding(options.chain_id, options.registry, node)
            digest = vouch_digest(options.chain_id, options.registry, host.peer_id)
            vouch = options.signer.sign_digest(digest)
        self._hello = Hello(
            protocol=PROTOCOL_VERSION,
            run_id=options.run_id,
            agent=options.agent,
            role=options.role,
            node=node,
            binding=binding,
            vouch=vouch,
        )
        self._greeting: OrderedDict[bytes, trio.Event] = OrderedDict()
        host.server.register(Hello, self._answer, access="public")

    async def hello(self, peer_id: bytes, *, again: bool = False) -> bool:
        """Exchange `Hello` with a peer, once per connection unless `again`; True if it was done now.

        Raises:
            UpgradeRequiredError: it says that it speaks a newer protocol version. Anybody may say
                so; only the coordinator's word is a reason to stop.
            RefusedError: it is in another run.
            UnreachableError: it does not answer.
        """
        while (ongoing := self._greeting.get(peer_id)) is not None:
            await ongoing.wait()
            again = False
        peer = self._host.table.get(peer_id)
        if peer is not None and peer.greeted and not again:
            return False
        done = self._greeting[peer_id] = trio.Event()
        try:
            theirs, _ = await self._host.client.exchange(
                peer_id, self._hello, Hello, deadline_s=self._host.timeouts.hello_s
            )
            if theirs.protocol > PROTOCOL_VERSION:
                raise UpgradeRequiredError(f"this peer speaks protocol version {theirs.protocol}")
            await self._meet(peer_id, theirs)
        finally:
            del self._greeting[peer_id]
            done.set()
        return True

    async def _answer(self, call: Call[Hello]) -> Reply:
        if call.payload.protocol < PROTOCOL_VERSION:
            raise UpgradeRequiredError(f"this run needs protocol version {PROTOCOL_VERSION}")
        await self._meet(call.peer_id, call.payload)
        return Reply(self._hello)

    async def _meet(self, peer_id: bytes, hello: Hello) -> None:
        """Note down who the peer is."""
        options = self._host.options
        if hello.protocol != PROTOCOL_VERSION:
            raise RefusedError(WRONG_VERSION, f"this peer speaks protocol version {PROTOCOL_VERSION}")
        if hello.run_id and options.run_id and hello.run_id != options.run_id:
            raise RefusedError(WRONG_RUN, f"this peer is in run {options.run_id.hex()[:16]}")
        peer = self._host.table.get(peer_id)
        if peer is None:
            return
        peer.protocol = hello.protocol
        peer.agent = _printable(hello.agent)
        peer.role = _printable(hello.role)
        peer.greeted = True
        if hello.run_id and hello.run_id == options.run_id:
            peer.tags.add("run")
            peer.node = await self._bound_node(peer, hello)

    async def _bound_node(self, peer: Peer, hello: Hello) -> str:
        """The node key the peer is bound to, or "" (the reason is logged)."""
        options = self._host.options
        if not hello.binding or options.verify_node is None:
            return ""
        try:
            node = checksum_address(address_bytes(hello.node))
            check_binding(peer.peer_id, options.chain_id, options.registry, node, hello.binding)
            digest = vouch_digest(options.chain_id, options.registry, peer.peer_id)
            if recover_address(digest, hello.vouch) != node:
                raise BindingError(f"node key {node} did not vouch for this peer")
            with trio.fail_after(self._host.timeouts.hello_s):
                if await options.verify_node(node, peer.peer_id):
                    return node
            raise BindingError(f"the ledger does not bind {node} to this peer")
        except (BindingError, WalletError) as error:
            logger.info("peer %s is not bound: %s", peer_id_text(peer.peer_id), error)
        except (IntellectError, trio.TooSlowError, OSError) as error:
            logger.warning("cannot check the binding of %s: %r", peer_id_text(peer.peer_id), error)
        return ""


def _printable(text: str) -> str:
    return "".join(c for c in text[:_MAX_TEXT] if c.isprintable())
