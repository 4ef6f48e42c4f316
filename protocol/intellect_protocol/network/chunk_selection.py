"""Which chunk to ask which peer for: rarest first, at random among the rarest.

Pure bookkeeping without clock or network, so that a simulator can drive the same code. Sets of
chunks are bit masks in Python integers (bit i is chunk i): for a checkpoint of 16,000 chunks one
operation on 2 KB replaces a loop over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random


def mask_of(indexes: Iterable[int]) -> int:
    """The set of `indexes` as a bit mask."""
    mask = 0
    for index in indexes:
        mask |= 1 << index
    return mask


def indexes_of(mask: int) -> list[int]:
    """The members of a bit mask in ascending order."""
    indexes = []
    while mask:
        low = mask & -mask
        indexes.append(low.bit_length() - 1)
        mask ^= low
    return indexes


def random_index(mask: int, random: Random) -> int:
    """One member of a mask that is not empty: the first at or after a random place, cyclically."""
    above = mask >> random.randrange(mask.bit_length()) if mask & (mask - 1) else mask
    shift = mask.bit_length() - above.bit_length()
    return shift + (above & -above).bit_length() - 1


class Selection:
    """The chunks of one version that this peer still needs, and who offers them.

    Args:
        count: chunks in the version.
        wanted: mask of the chunks to fetch.
        random: source of the choice among equally rare chunks.
    """

    def __init__(self, count: int, wanted: int, random: Random) -> None:
        self._everything = (1 << count) - 1
        self._missing = wanted
        self._free = wanted  # missing, and nobody is asked for it
        self._random = random
        self._offers: dict[bytes, int] = {}
        self._holders = [0] * count
        self._by_holders = [self._everything]  # chunks held by exactly so many peers
        self._asked: dict[int, dict[bytes, float]] = {}

    @property
    def missing(self) -> int:
        """Mask of the chunks that are not verified yet."""
        return self._missing

    def offer(self, peer: bytes, mask: int) -> None:
        """`peer` offers exactly the chunks of `mask` (bits beyond the version are ignored)."""
        mask &= self._everything
        before = self._offers.get(peer, 0)
        for index in indexes_of(mask & ~before):
            self._move(index, 1)
        for index in indexes_of(before & ~mask):
            self._move(index, -1)
        self._offers[peer] = mask

    def offered(self, peer: bytes) -> int:
        """Mask of what `peer` offers."""
        return self._offers.get(peer, 0)

    def remove(self, peer: bytes) -> None:
        """`peer` offers nothing any more; chunks asked of it alone become free."""
        self.offer(peer, 0)
        del self._offers[peer]
        for index in [index for index, peers in self._asked.items() if peer in peers]:
            self.release(peer, index)

    def take(self, peer: bytes, *, now: float, patience_s: float, avoid: int = 0) -> int | None:
        """Choose the next chunk to ask of `peer` and note that it is asked.

        Rarest first among the chunks nobody is asked for. When nothing is left, a chunk that
        somebody else has been asked for longer than `patience_s` ago: the endgame, at most twice
        per chunk.

        Args:
            avoid: mask of chunks not to ask of `peer`. For an origin, what other peers deliver, so
                that its upload goes to chunks that need it.
        """
        free = self._free & self._offers.get(peer, 0) & ~avoid
        if free:
            rarest = next(level & free for level in self._by_holders if level & free)
            return self._ask(peer, random_index(rarest, self._random), now)
        late = [
            index
            for index, peers in self._asked.items()
            if len(peers) == 1
            and peer not in peers
            and self._offers.get(peer, 0) >> index & 1
            and now - next(iter(peers.values())) >= patience_s
        ]
        return self._ask(peer, self._random.choice(late), now) if late else None

    def release(self, peer: bytes, index: int) -> None:
        """`peer` did not deliver chunk `index`."""
        peers = self._asked.get(index)
        if peers is None or peers.pop(peer, None) is None:
            return
        if not peers:
            del self._asked[index]
            self._free |= 1 << index & self._missing

    def withdraw(self, peer: bytes, index: int) -> None:
        """`peer` turned out not to have chunk `index`."""
        self.release(peer, index)
        if peer in self._offers:
            self.offer(peer, self._offers[peer] & ~(1 << index))

    def verified(self, index: int) -> list[bytes]:
        """Chunk `index` is here. Returns the peers that are still asked for it."""
        self._missing &= ~(1 << index)
        self._free &= ~(1 << index)
        return list(self._asked.pop(index, ()))

    def _ask(self, peer: bytes, index: int, now: float) -> int:
        self._free &= ~(1 << index)
        self._asked.setdefault(index, {})[peer] = now
        return index

    def _move(self, index: int, step: int) -> None:
        count = self._holders[index]
        bit = 1 << index
        self._by_holders[count] &= ~bit
        self._holders[index] = count = count + step
        if count == len(self._by_holders):
            self._by_holders.append(0)
        self._by_holders[count] |= bit


class Source:
    """What one peer has done for one download: its rate decides how many requests it gets.

    Failures are counted here, per peer, never per chunk.
    """

    MAX_FAILURES = 4  # in a row, then the peer is left for this version
    MAX_BAD_CHUNKS = 2  # in all, then the peer is banned for this version
    PIPELINE_S = 0.5  # requests under way should cover this much time

    def __init__(self, chunk_size: int, max_requests: int) -> None:
        self._chunk_size = chunk_size
        self._max_requests = max_requests
        self.rate_bytes_per_s = 0.0
        self._since: list[float] = []  # when the requests under way were made
        self.failures = 0
        self.bad_chunks = 0
        self.paused_until = 0.0

    @property
    def left(self) -> bool:
        """Whether this peer is not asked again for this version."""
        return self.failures >= self.MAX_FAILURES or self.bad_chunks >= self.MAX_BAD_CHUNKS

    @property
    def banned(self) -> bool:
        """Whether it sent bad chunks too often."""
        return self.bad_chunks >= self.MAX_BAD_CHUNKS

    @property
    def outstanding(self) -> int:
        """Requests under way."""
        return len(self._since)

    def asked(self, now: float) -> None:
        """A request is made."""
        self._since.append(now)

    def answered(self, since: float) -> None:
        """The request made at `since` has ended, well or not."""
        self._since.remove(since)

    def delivers(self, now: float, patience_s: float) -> bool:
        """Whether others need not be asked for what this peer offers: nothing waits too long."""
        stuck = bool(self._since) and now - min(self._since) >= patience_s
        return not self.left and now >= self.paused_until and not stuck

    def room(self, now: float) -> int:
        """How many more requests this peer may get."""
        if self.left or now < self.paused_until:
            return 0
        covered = math.ceil(self.rate_bytes_per_s * self.PIPELINE_S / self._chunk_size)
        allowed = min(max(2, covered), self._max_requests) if self.failures == 0 else 1
        return max(0, allowed - self.outstanding)

    def delivered(self, size_bytes: int, seconds: float) -> None:
        """A verified chunk arrived; the rate is an exponential average over about 4 chunks."""
        rate = size_bytes * max(1, self.outstanding) / max(seconds, 1e-4)
        self.rate_bytes_per_s += (rate - self.rate_bytes_per_s) * (0.25 if self.rate_bytes_per_s else 1.0)
        self.failures = 0

    def failed(self, now: float) -> None:
        """A request failed: pause 0.25 s, doubling while failures go on."""
        self.paused_until = now + 0.25 * 2**self.failures
        self.failures += 1
