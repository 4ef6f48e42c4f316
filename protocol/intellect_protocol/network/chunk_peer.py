"""What a chunk service knows of one linked peer, and the two ways to get a chunk from it."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

import trio

from ..errors import RefusedError, UnreachableError, WireError
from .chunk_download import ConnectError, HttpSource, SharedThrottle
from .chunk_frames import Ask, Busy, Data, Refuse, Request, Ticket
from .chunk_link import Link

_MAX_VERSIONS = 8  # of one peer that are kept track of
_ASK_AGAIN_S = 2.0  # an unanswered Ask is repeated
_DIRECT_FAILURES = 2  # in a row, then chunks come over the stream
_STREAM_REQUESTS = 2  # at once


class _Partial:
    def __init__(self, size: int) -> None:
        self.size = size
        self.buffer = bytearray()
        self.changed = trio.Event()
        self.error: Exception | None = None

    def note(self, error: Exception | None = None) -> None:
        self.error = error
        self.changed.set()
        self.changed = trio.Event()


class RemotePeer:
    """A linked peer.

    Args:
        link: its control stream.
        address: IP address its connection comes from, "" if unknown.
    """

    def __init__(self, link: Link, address: str, *, progress_s: float, throttle: SharedThrottle) -> None:
        self.link = link
        self.peer_id = link.peer_id
        self.origin = link.hello.origin
        self._offers: OrderedDict[bytes, int] = OrderedDict()
        self._wants: OrderedDict[bytes, None] = OrderedDict()
        self._address = address
        self._progress_s = progress_s
        self._throttle = throttle
        self._ticket: Ticket | None = None
        self._ticket_until = 0.0
        self._renew_at = 0.0
        self._ask_at = 0.0
        self._http: HttpSource | None = None
        self._direct_failures = 0
        self._partial: dict[tuple[bytes, int], _Partial] = {}
        self.introduced: set[bytes] = set()  # peers whose addresses it was told
        self.uploads = 0  # chunks being sent to it on the stream

    # What it says

    def offered(self, checkpoint: bytes) -> int:
        """Mask of what it offers of a version."""
        return self._offers.get(checkpoint, 0)

    def note_offer(self, checkpoint: bytes, mask: int) -> None:
        """It offers exactly `mask`."""
        self._offers[checkpoint] = mask
        self._offers.move_to_end(checkpoint)
        if len(self._offers) > _MAX_VERSIONS:
            self._offers.popitem(last=False)

    def wants(self, checkpoint: bytes) -> bool:
        """Whether it downloads the version."""
        return checkpoint in self._wants

    def note_want(self, checkpoint: bytes) -> None:
        """It downloads the version."""
        self._wants[checkpoint] = None
        self._wants.move_to_end(checkpoint)
        if len(self._wants) > _MAX_VERSIONS:
            self._wants.popitem(last=False)

    def note_done(self, checkpoint: bytes) -> bool:
        """It does not download the version any more. Returns whether it still downloads anything."""
        self._wants.pop(checkpoint, None)
        return bool(self._wants)

    # Its upload slot

    def has_slot(self, now: float) -> bool:
        """Whether chunks may be asked of it now; asks for, or renews, its permission when due."""
        held = self._ticket is not None and now < self._ticket_until
        if now >= self._ask_at and (not held or now >= self._renew_at):
            self._ask_at = now + _ASK_AGAIN_S
            self.link.send(Ask())
        return held

    def note_ticket(self, ticket: Ticket, now: float) -> None:
        """It grants a slot."""
        self._ticket = ticket
        self._ticket_until = now + ticket.lifetime_s * 0.9
        self._renew_at = now + ticket.lifetime_s * 0.5
        self._ask_at = now
        address = self._safe_address(ticket.address)
        if self._http is not None and (self._http.address, self._http.port) != (address, ticket.port):
            self._http.close()
            self._http = None
            self._direct_failures = 0
        if self._http is None and ticket.port and address:
            self._http = HttpSource(
                address, ticket.port, progress_s=self._progress_s, throttle=self._throttle
            )

    def note_busy(self, busy: Busy, now: float) -> None:
        """It has no slot for us now."""
        self._ticket = None
        self._ask_at = now + max(0.05, busy.retry_after_s)

    def end_slot(self) -> None:
        """We said `Done` to it: it took the slot back, and the next download asks anew."""
        self._ticket = None
        self._ask_at = 0.0

    def _safe_address(self, stated: str) -> str:
        """A peer may name a public address or its own, not make us call on our private network."""
        if not stated or stated == self._address:
            return self._address
        return stated if ipaddress.ip_address(stated).is_global else self._address

    # Chunks

    @property
    def direct(self) -> bool:
        """Whether its data plane is used, rather than the stream."""
        return self._http is not None and self._direct_failures < _DIRECT_FAILURES

    def max_requests(self, configured: int) -> int:
        """How many requests it may have at once."""
        return configured if self.direct else min(configured, _STREAM_REQUESTS)

    async def fetch(
        self, checkpoint: bytes, index: int, digest: bytes, size: int, limiter: trio.CapacityLimiter
    ) -> bytes:
        """Bytes that it sends for a chunk, unchecked.

        Raises:
            RefusedError, UnreachableError, ManifestError: as `HttpSource.fetch`.
        """
        if self._ticket is None:
            raise RefusedError("ticket", "no upload slot")
        if not self.direct:
            return await self._fetch_on_stream(checkpoint, index, size)
        assert self._http is not None
        try:
            data = await self._http.fetch(digest, size, self._ticket.token, limiter)
        except ConnectError:
            self._direct_failures += 1
            raise
        except RefusedError as error:
            if error.code == "ticket":
                self._ticket = None
            raise
        self._direct_failures = 0
        return data

    async def _fetch_on_stream(self, checkpoint: bytes, index: int, size: int) -> bytes:
        key = (checkpoint, index)
        if key in self._partial:
            raise RefusedError("busy", "the chunk is under way", 0.1)
        partial = self._partial[key] = _Partial(size)
        self.link.send(Request(checkpoint, index))
        try:
            while len(partial.buffer) < size:
                with trio.move_on_after(self._progress_s) as scope:
                    await partial.changed.wait()
                if scope.cancelled_caught:
                    raise UnreachableError("the peer does not send the chunk")
                if partial.error is not None:
                    raise partial.error
            return bytes(partial.buffer)
        finally:
            del self._partial[key]

    def note_data(self, data: Data) -> None:
        """A piece of a chunk; one that is not waited for any more is dropped.

        Raises:
            WireError: it does not continue the chunk.
        """
        partial = self._partial.get((data.c, data.index))
        if partial is None:
            return
        if data.offset != len(partial.buffer):
            if not partial.buffer:
                return  # the rest of an answer to a request that was given up and made again
            raise WireError("a piece of a chunk does not continue it")
        if not data.data or len(partial.buffer) + len(data.data) > partial.size:
            raise WireError("a piece of a chunk has a wrong size")
        partial.buffer += data.data
        partial.note()

    def note_refuse(self, refuse: Refuse) -> None:
        """It does not send a chunk."""
        partial = self._partial.get((refuse.c, refuse.index))
        if partial is not None:
            code = "gone" if refuse.gone else "busy"
            partial.note(RefusedError(code, "the peer does not send the chunk now", 0.2))

    def gone(self) -> None:
        """The link is closed."""
        if self._http is not None:
            self._http.close()
        for partial in self._partial.values():
            partial.note(UnreachableError("the peer is gone"))
