"""The trainer's word on accepted units, read back into the database: trained, filtered or expired."""

from __future__ import annotations

from functools import partial

import trio
from sqlalchemy import Connection

from intellect_protocol.messages import TrainingState

from . import submissions
from .batches import BatchStore
from .store import Store, cursor_value, set_cursor

_CURSOR = "outcomes"


async def take_outcomes(store: Store, batches: BatchStore, now_ms: int) -> int:
    """Take in what the trainer wrote since the last time; returns how many units changed.

    Raises:
        InvalidDataError: an outcome file is malformed; those before it are taken in.
    """
    after = await store.read(partial(cursor_value, name=_CURSOR))
    changed = 0

    def next_outcome(after: int) -> tuple[int, dict[bytes, TrainingState]] | None:
        return next(batches.outcomes(after), None)

    while True:
        found = await trio.to_thread.run_sync(next_outcome, -1 if after is None else after)
        if found is None:
            return changed
        version, outcome = found

        def step(
            connection: Connection, version: int = version, outcome: dict[bytes, TrainingState] = outcome
        ) -> int:
            set_cursor(connection, _CURSOR, version)
            return sum(
                submissions.set_training(connection, digest, state, now_ms)
                for digest, state in outcome.items()
            )

        changed += await store.write(step)
        after = version
