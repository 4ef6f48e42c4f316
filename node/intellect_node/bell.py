"""A bell that wakes all who wait: how the services of a node tell each other that something changed."""

from __future__ import annotations

import trio


class Bell:
    """Take `heard = bell.listen()` before looking at the state, then await it: no ring is lost."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def listen(self) -> trio.Event:
        """The event that the next `ring` sets."""
        return self._event

    def ring(self) -> None:
        """Wake everybody who listens."""
        self._event.set()
        self._event = trio.Event()
