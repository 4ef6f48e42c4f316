"""How a peer shares out its upload: slots by reciprocity, and an origin that sends each chunk once.

Both are pure; times are seconds of the caller's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from .chunk_selection import indexes_of, random_index


class UploadSlots:
    """At most `count` peers download from us at once, each for a lease that it may renew.

    When more want to, those that gave us most keep their slots, and the last slot goes to
    whoever has waited longest (BitTorrent's optimistic unchoke), so that a newcomer gets a chance.
    """

    def __init__(self, count: int, lease_s: float) -> None:
        self._count = count
        self.lease_s = lease_s
        self._until: dict[bytes, float] = {}
        self._waiting: dict[bytes, tuple[float, float]] = {}  # first and last time of asking

    def ask(self, peer: bytes, given: Mapping[bytes, int], now: float) -> float:
        """Ask for a slot or its renewal.

        Args:
            given: bytes each peer has given us.

        Returns:
            0.0 if granted until `now + lease_s`, else the seconds after which to ask again.
        """
        self._forget(now)
        first, _ = self._waiting.get(peer, (now, now))
        others = {other: until for other, until in self._until.items() if other != peer}
        if len(others) + len(self._waiting.keys() - {peer}) >= self._count:
            rivals = sorted(
                (set(others) | set(self._waiting)) - {peer}, key=lambda rival: -given.get(rival, 0)
            )
            ahead = [rival for rival in rivals if given.get(rival, 0) >= given.get(peer, 0)]
            holds = peer in self._until
            longest = all(first <= since for since, _ in self._waiting.values())
            deserves = len(ahead) < self._count - 1 or (longest and not holds)
            if len(others) >= self._count or not deserves:
                self._until.pop(peer, None)
                self._waiting[peer] = (first, now)
                return max(0.05, min(others.values(), default=now) - now)
        self._waiting.pop(peer, None)
        self._until[peer] = now + self.lease_s
        return 0.0

    def holds(self, peer: bytes, now: float) -> bool:
        """Whether `peer` has a slot."""
        return self._until.get(peer, now) > now

    def release(self, peer: bytes) -> None:
        """`peer` is done or gone."""
        self._until.pop(peer, None)
        self._waiting.pop(peer, None)

    def _forget(self, now: float) -> None:
        self._until = {peer: until for peer, until in self._until.items() if until > now}
        # Whoever has not asked for two leases has given up.
        horizon = now - 2 * self.lease_s
        self._waiting = {peer: times for peer, times in self._waiting.items() if times[1] > horizon}


class Reveal:
    """Which chunks of one version an origin shows to whom, so that it uploads each about once.

    A chunk is shown to one peer; to a second one only when the first has not announced it within
    the lease, or when nobody connected has it any more. Everybody else gets it from peers, which
    works because a peer announces and serves a chunk as soon as it is verified. A peer that gains
    nothing for a lease cannot reach the others (or they lie about what they have): from then on it
    is shown whatever it lacks. This is BitTorrent's super-seeding (BEP 16) with a time limit in place of its
    wait for the piece to turn up elsewhere. The lease is `lease_s` and four times what it usually
    takes from showing a chunk to its announcement, so that a slow link or a busy machine is not
    taken for an isolated one.
    """

    FIRST_WINDOW = 4  # chunks shown and not yet announced, per peer; grows by one with each gain
    MAX_WINDOW = 32

    def __init__(self, count: int, lease_s: float, random: Random) -> None:
        self._everything = (1 << count) - 1
        self._lease_s = lease_s
        self._random = random
        self._peers: dict[bytes, _Shown] = {}
        self._typical_s = 0.0  # from showing to announcing
        self.available = 0  # mask of the chunks the origin has itself

    def update(self, peer: bytes, has: int, now: float) -> None:
        """`peer` downloads this version and has the chunks of `has`."""
        has &= self._everything
        state = self._peers.get(peer)
        if state is None:
            self._peers[peer] = _Shown(has, now)
            return
        gained = has & ~state.has
        if not gained:
            return
        for index in indexes_of(gained & state.mask):
            self._typical_s += 0.2 * (now - state.shown_at[index] - self._typical_s)
        state.has |= has
        state.gained_at = now
        state.window = min(state.window + gained.bit_count(), self.MAX_WINDOW)

    def remove(self, peer: bytes) -> None:
        """`peer` is gone."""
        self._peers.pop(peer, None)

    def shown(self, peer: bytes) -> int:
        """Mask of what `peer` has been shown."""
        state = self._peers.get(peer)
        return state.mask if state else 0

    def advance(self, now: float, may_download: Callable[[bytes], bool]) -> dict[bytes, list[int]]:
        """Show more chunks where it is time to. Returns the new ones per peer.

        Args:
            may_download: whether a peer has an upload slot; to others nothing new is shown.
        """
        lease_s = self._lease_s + 4 * self._typical_s
        held = leased = 0
        for state in self._peers.values():
            held |= state.has
            leased |= state.leased(now - lease_s)
        news: dict[bytes, list[int]] = {}
        order = [
            peer
            for peer, state in self._peers.items()
            if state.has != self._everything and may_download(peer)
        ]
        self._random.shuffle(order)
        progress = True
        while progress:
            # One each in turn, so that the first to come does not get everything.
            progress = False
            for peer in order:
                state = self._peers[peer]
                open_now = state.mask & ~state.has
                if open_now.bit_count() >= state.window:
                    continue
                lacks = self.available & ~state.has & ~state.mask
                choice = lacks & ~held & ~leased
                state.alone |= now - state.gained_at >= lease_s
                if not choice and state.alone:
                    choice = (lacks & ~held) or lacks
                if choice:
                    index = random_index(choice, self._random)
                    state.show(index, now)
                    leased |= 1 << index
                    news.setdefault(peer, []).append(index)
                    progress = True
        return news


class _Shown:
    def __init__(self, has: int, now: float) -> None:
        self.has = has
        self.mask = 0
        self.window = Reveal.FIRST_WINDOW
        self.gained_at = now
        self.alone = False  # gained nothing for a lease: it is not left to the others again
        self.shown_at: dict[int, float] = {}

    def show(self, index: int, now: float) -> None:
        self.mask |= 1 << index
        self.shown_at[index] = now

    def leased(self, horizon: float) -> int:
        """Mask of what was shown after `horizon` and is not announced yet."""
        mask = 0
        for index in indexes_of(self.mask & ~self.has):
            if self.shown_at[index] > horizon:
                mask |= 1 << index
        return mask
