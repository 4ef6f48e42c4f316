"""Making requests: greet first, sign if asked, send, and never take an error for success."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import trio

from ..errors import DeadlineError, RefusedError, UnreachableError, UpgradeRequiredError, WireError
from ..keys import Signer, peer_id_text
from ..wire import decode, encode
from . import rpc
from .addresses import PeerAddress
from .envelopes import seal
from .rpc import EMPTY_BODY, RPC_PROTOCOL_ID, Body, Request, Response, make_body, receive_body, send_body
from .stream import Stream

if TYPE_CHECKING:
    from .host import Host

R = TypeVar("R")

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0

logger = logging.getLogger(__name__)


class RpcClient:
    """Calls to other peers."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._slots: dict[bytes, tuple[trio.CapacityLimiter, int]] = {}

    async def call(
        self,
        peer: bytes | str | PeerAddress,
        message: msgspec.Struct,
        result_type: type[R],
        *,
        signer: Signer | None = None,
        body: bytes | Path | None = None,
        body_to: Path | None = None,
        max_body_bytes: int = 0,
        deadline_s: float = 10.0,
        retries: int = 0,
    ) -> tuple[R, bytes]:
        """Ask `peer` (peer id or full multiaddress) and wait for its answer.

        Args:
            signer: sign the request with this key.
            body: sent behind the request.
            body_to: where the answer's body is written; it appears once its hash is right.
            max_body_bytes: the largest body taken with the answer.
            deadline_s: for one attempt, everything included.
            retries: further attempts, with growing pauses, when nobody answers or the other side
                says when to come back. The other side treats a repeated request as one.

        Returns:
            The result, and the answer's body (b"" if there is none or it went to `body_to`).

        Raises:
            RefusedError: an error answer; `code`, `text` and `retry_after_s` are the other side's.
            UpgradeRequiredError: the other side needs a newer protocol version.
            UnreachableError, DeadlineError: no (whole) answer.
            WireError: the answer is malformed or its body has another hash.
            OSError: a body cannot be read or written.
        """
        pause_s = _FIRST_PAUSE_S
        for attempt in range(retries + 1):
            try:
                return await self._attempt(
                    peer, message, result_type, signer, body, body_to, max_body_bytes, deadline_s
                )
            except UnreachableError:
                if attempt == retries:
                    raise
                wait_s = pause_s * self._host.options.rng.uniform(0.5, 1.5)
            except RefusedError as error:
                if attempt == retries or error.retry_after_s is None:
                    raise
                wait_s = max(error.retry_after_s, 0.05)
            await trio.sleep(min(wait_s, _LONGEST_PAUSE_S))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise AssertionError("unreachable")

    async def _attempt(
        self,
        peer: bytes | str | PeerAddress,
        message: msgspec.Struct,
        result_type: type[R],
        signer: Signer | None,
        body: bytes | Path | None,
        body_to: Path | None,
        max_body_bytes: int,
        deadline_s: float,
    ) -> tuple[R, bytes]:
        name = type(message).__name__
        with trio.move_on_after(deadline_s) as scope:
            peer_id = (
                peer if isinstance(peer, bytes) else await self._host.connect(peer, timeout_s=deadline_s)
            )
            await self._host.bindings.hello(peer_id)
            try:
                return await self.exchange(
                    peer_id, message, result_type, signer, body, body_to, max_body_bytes, deadline_s
                )
            except RefusedError as error:
                # The binding may be newer than our greeting: say hello again, once.
                if error.code != rpc.NOT_BOUND or not await self._host.bindings.hello(peer_id, again=True):
                    raise
            return await self.exchange(
                peer_id, message, result_type, signer, body, body_to, max_body_bytes, deadline_s
            )
        assert scope.cancelled_caught
        raise DeadlineError(f"no answer to {name} within {deadline_s:g} s")

    async def exchange(
        self,
        peer_id: bytes,
        message: msgspec.Struct,
        result_type: type[R],
        signer: Signer | None = None,
        body: bytes | Path | None = None,
        body_to: Path | None = None,
        max_body_bytes: int = 0,
        deadline_s: float = 10.0,
    ) -> tuple[R, bytes]:
        """One request without greeting; see `call`."""
        content = EMPTY_BODY if body is None else await make_body(body)
        payload = encode(message)
        options = self._host.options
        name = type(message).__name__
        envelope = None
        if signer is not None:
            envelope = seal(
                signer,
                run_id=options.run_id,
                chain_id=options.chain_id,
                audience=peer_id,
                message_type=name,
                payload=payload,
                body_hash=content.sha256,
                now_ms=int(options.wall_clock() * 1000),
            )
        request = Request(name, payload, envelope, content.size, content.sha256)
        async with self._slot(peer_id):
            stream = await self._host.open_stream(peer_id, RPC_PROTOCOL_ID, deadline_s)
            try:
                response = await self._converse(stream, request, content, deadline_s)
                result = self._result(response, result_type, peer_id, max_body_bytes)
                answer = EMPTY_BODY
                if response.body_size:
                    answer = await receive_body(
                        stream,
                        response.body_size,
                        response.body_hash,
                        limits=self._host.limits,
                        timeouts=self._host.timeouts,
                        to=body_to,
                    )
                elif body_to is not None:
                    await trio.to_thread.run_sync(body_to.write_bytes, b"")
            finally:
                await stream.reset()
        self._host.table.praise(peer_id)
        return result, answer.data

    async def _converse(self, stream: Stream, request: Request, content: Body, deadline_s: float) -> Response:
        """Send the request while listening: an early answer means that the body is not wanted."""
        answers: list[Response] = []
        failures: list[Exception] = []

        async def send() -> None:
            try:
                await stream.write_frame(encode(request), timeout_s=deadline_s)
                await send_body(stream, content)
            except (UnreachableError, OSError) as error:
                failures.append(error)  # an answer may have come before

        async def listen() -> None:
            try:
                frame = await stream.read_frame(timeout_s=deadline_s)
                answers.append(decode(frame, Response))
            except (UnreachableError, WireError) as error:
                failures.append(error)
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            nursery.start_soon(listen)
        if answers:
            return answers[0]
        disk = [error for error in failures if isinstance(error, OSError)]
        error = (disk or failures)[0]
        if isinstance(error, WireError) and "ended" in str(error):
            raise UnreachableError("the peer closed the stream before it answered") from error
        raise error

    @staticmethod
    def _result(response: Response, result_type: type[R], peer_id: bytes, max_body_bytes: int) -> R:
        if not response.ok:
            if response.code == rpc.UPGRADE_REQUIRED:
                raise UpgradeRequiredError(_line(response.text))
            raise RefusedError(
                _line(response.code)[:64], _line(response.text), _pause(response.retry_after_s)
            )
        if response.body_size < 0 or len(response.body_hash) != 32:
            raise WireError("the answer's body size or hash is out of range")
        if response.body_size > max_body_bytes:
            raise WireError(
                f"peer {peer_id_text(peer_id)} sends a body of {response.body_size} bytes; "
                f"the limit is {max_body_bytes}"
            )
        return decode(response.payload, result_type)

    def _slot(self, peer_id: bytes) -> Any:
        """Keeps us below the other side's limit of requests at once."""
        return _Slot(self._slots, peer_id, self._host.limits.requests_per_peer)


class _Slot:
    """A slot of a limiter per peer that is forgotten when nobody uses it."""

    def __init__(
        self, slots: dict[bytes, tuple[trio.CapacityLimiter, int]], peer_id: bytes, size: int
    ) -> None:
        self._slots = slots
        self._peer_id = peer_id
        self._size = size

    async def __aenter__(self) -> None:
        limiter, users = self._slots.get(self._peer_id, (trio.CapacityLimiter(self._size), 0))
        self._slots[self._peer_id] = (limiter, users + 1)
        try:
            await limiter.acquire_on_behalf_of(self)
        except BaseException:
            self._leave()
            raise

    async def __aexit__(self, *exc: object) -> None:
        self._slots[self._peer_id][0].release_on_behalf_of(self)
        self._leave()

    def _leave(self) -> None:
        limiter, users = self._slots[self._peer_id]
        if users == 1:
            del self._slots[self._peer_id]
        else:
            self._slots[self._peer_id] = (limiter, users - 1)


def _line(text: str) -> str:
    """Text of a stranger, fit for a terminal: one line, printable, short."""
    return "".join(c if c.isprintable() else " " for c in text[:500])


def _pause(retry_after_s: float | None) -> float | None:
    if retry_after_s is None or not 0.0 <= retry_after_s < 1e6:
        return None
    return retry_after_s
