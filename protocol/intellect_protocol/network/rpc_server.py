"""Serving requests: limits first, then form, then signature, then the body, then the handler.

A handler is ``async def answer(call: Call[GetHead]) -> Reply``. It refuses with `RefusedError`. Any
other exception is our fault: the caller is told `internal`, the log has the trace, the host goes on.
Handlers are written so that the same request again has the same effect once: callers retry.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec
import trio
from libp2p.peer.id import ID

from ..errors import (
    DeadlineError,
    InvalidDataError,
    RefusedError,
    UnreachableError,
    UpgradeRequiredError,
    WireError,
)
from ..wire import EMPTY_BODY_HASH, decode, encode
from . import rpc
from .envelopes import EnvelopeChecker
from .peers import Peer
from .rpc import EMPTY_BODY, RPC_PROTOCOL_ID, Body, Request, Response, make_body, receive_body, send_body
from .stream import Stream

if TYPE_CHECKING:
    from .host import Host

M = TypeVar("M", bound=msgspec.Struct)

Access = Literal["public", "bound"]
_MAX_TEXT = 500
_IMPATIENCE = 0.1  # blame for a request above the rate: a hundred in a row disconnect

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call(Generic[M]):
    """One request, checked."""

    payload: M
    peer_id: bytes
    signer: str  # address of the key that signed the request; "" for unsigned requests
    body: Body  # a spooled file is removed after the handler returns unless it moved it away
    peer: Peer


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer; `remove_body` deletes a file body once it has been sent."""

    result: msgspec.Struct
    body: bytes | Path | Body | None = None
    remove_body: bool = field(default=False, kw_only=True)


Handler = Callable[[Call[Any]], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class _Route:
    shape: type[msgspec.Struct]
    handler: Handler
    max_body_bytes: int
    signed: bool
    access: Access


class RpcServer:
    """The registry of handlers and the loop that serves them."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._routes: dict[str, _Route] = {}
        self._held_bytes = 0
        self._spool = host.options.data_dir / "spool"
        options = host.options
        self._envelopes = EnvelopeChecker(
            options.run_id, options.chain_id, host.peer_id, host.limits.nonces, options.wall_clock
        )
        for leftover in self._spool.glob("body-*"):
            leftover.unlink(missing_ok=True)
        host.set_stream_handler(RPC_PROTOCOL_ID, self._serve)

    def register(
        self,
        shape: type[M],
        handler: Callable[[Call[M]], Awaitable[Reply]],
        *,
        max_body_bytes: int = 0,
        signed: bool = False,
        access: Access | None = None,
    ) -> None:
        """Serve requests of one message struct.

        Args:
            max_body_bytes: the largest request body; 0: none is taken.
            signed: demand an envelope; `Call.signer` is the recovered address.
            access: "public": anybody; "bound": peers whose peer key and node key vouch for each
                other, confirmed by the ledger; such a request must be signed, if at all, by that
                node key. Default: what is signed is for bound peers, the rest is public.
        """
        granted: Access = access or ("bound" if signed else "public")
        self._routes[shape.__name__] = _Route(shape, handler, max_body_bytes, signed, granted)

    async def _serve(self, stream: Stream) -> None:
        # A stream may come before the swarm has told about its connection.
        peer = self._host.table.get(stream.peer_id) or self._host.table.joined(stream.peer_id, inbound=True)
        wait_s = peer.bucket.take()
        if wait_s > 0.0 or peer.in_flight >= self._host.limits.requests_per_peer:
            if wait_s > 0.0:
                self._host.fault(ID(stream.peer_id), "sends requests too fast", _IMPATIENCE)
            await self._refuse(stream, rpc.BUSY, "too many requests of yours at once", max(wait_s, 0.1))
            return
        peer.in_flight += 1
        try:
            reply = await self._answer(stream, peer)
        finally:
            peer.in_flight -= 1
        if reply is not None:
            await stream.finish()

    async def _refuse(self, stream: Stream, code: str, text: str, retry_after_s: float | None = None) -> None:
        """Send an error and let the caller read it before the stream goes."""
        if retry_after_s is not None and not math.isfinite(retry_after_s):
            retry_after_s = None
        response = Response(False, code, text[:_MAX_TEXT], retry_after_s, b"", 0, EMPTY_BODY_HASH)
        await stream.write_frame(encode(response))
        await stream.finish(timeout_s=self._host.timeouts.request_s / 4)

    async def _answer(self, stream: Stream, peer: Peer) -> Reply | None:
        """Serve one request; None if it was refused or the peer is gone."""
        body = EMPTY_BODY
        held = 0
        try:
            request = await self._read_request(stream)
            route = self._routes.get(request.type)
            if route is None:
                raise RefusedError(rpc.UNKNOWN_REQUEST, f"no such request: {request.type[:64]!r}")
            signer = self._check(request, route, peer)
            payload = decode(request.payload, route.shape)
            self._take_room(request.body_size)
            held = request.body_size
            if request.body_size:
                body = await receive_body(
                    stream,
                    request.body_size,
                    request.body_hash,
                    limits=self._host.limits,
                    timeouts=self._host.timeouts,
                    spool_dir=self._spool,
                )
            reply = await self._handle(route, Call(payload, stream.peer_id, signer, body, peer))
        except RefusedError as error:
            await self._refuse(stream, error.code, error.text, error.retry_after_s)
        except WireError as error:
            self._host.fault(ID(stream.peer_id), f"malformed request: {error}")
            code = rpc.BODY_HASH if "declared hash" in str(error) else rpc.MALFORMED
            await self._refuse(stream, code, str(error))
        except DeadlineError as error:
            self._host.fault(ID(stream.peer_id), f"stalls: {error}")
        except OSError as error:
            logger.error("cannot store a request's body: %s", error)
            await self._refuse(stream, rpc.UNAVAILABLE, "no room to store this; try again", 60.0)
        else:
            await self._send(stream, reply)
            self._host.table.praise(stream.peer_id)
            return reply
        finally:
            self._held_bytes -= held
            if body.path is not None:
                body.path.unlink(missing_ok=True)
        return None

    def _take_room(self, size: int) -> None:
        if self._held_bytes + size > self._host.limits.spooled_bytes:
            raise RefusedError(rpc.BUSY, "too many uploads at once", 5.0)
        self._held_bytes += size

    async def _read_request(self, stream: Stream) -> Request:
        with trio.move_on_after(self._host.timeouts.request_s):
            request = decode(await stream.read_frame(), Request)
            if request.body_size < 0 or len(request.body_hash) != 32:
                raise WireError("the body's size or hash is out of range")
            if request.body_size == 0 and request.body_hash != EMPTY_BODY_HASH:
                raise WireError("an empty body with a hash of something")
            return request
        raise DeadlineError("the peer did not finish its request")

    def _check(self, request: Request, route: _Route, peer: Peer) -> str:
        """Access, size and signature; returns the signer."""
        if route.access == "bound" and not peer.node:
            raise RefusedError(rpc.NOT_BOUND, "this peer's node key is not bound to it on the ledger")
        if request.body_size > route.max_body_bytes:
            raise RefusedError(
                rpc.TOO_LARGE, f"a body of {request.body_size} bytes; the limit is {route.max_body_bytes}"
            )
        if not route.signed:
            return ""
        signer = self._envelopes.signer_of(request)
        if route.access == "bound" and signer != peer.node:
            raise RefusedError(rpc.UNSIGNED, f"signed by {signer}, but this peer is bound to {peer.node}")
        return signer

    async def _handle(self, route: _Route, call: Call[Any]) -> Reply:
        name = route.shape.__name__
        try:
            with trio.fail_after(self._host.timeouts.handler_s):
                return await route.handler(call)
        except RefusedError:
            raise
        except UpgradeRequiredError as error:
            raise RefusedError(rpc.UPGRADE_REQUIRED, str(error)) from error
        except InvalidDataError as error:
            raise RefusedError(rpc.MALFORMED, str(error)) from error
        except UnreachableError as error:
            raise RefusedError(rpc.UNAVAILABLE, str(error), 5.0) from error
        except trio.TooSlowError as error:
            logger.warning("%s took longer than %.0f s", name, self._host.timeouts.handler_s)
            raise RefusedError(rpc.UNAVAILABLE, "this took too long; try again", 5.0) from error
        except Exception as error:
            logger.exception("handler of %s failed", name)
            raise RefusedError(rpc.INTERNAL, "an error on our side", 5.0) from error

    async def _send(self, stream: Stream, reply: Reply) -> None:
        try:
            body = await make_body(reply.body)
            response = Response(True, "", "", None, encode(reply.result), body.size, body.sha256)
            await stream.write_frame(encode(response))
            await send_body(stream, body)
        finally:
            if reply.remove_body and isinstance(reply.body, Path):
                reply.body.unlink(missing_ok=True)
