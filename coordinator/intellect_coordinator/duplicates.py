"""Check 8: completions that another node's accepted unit has as well. A remark; it decides nothing.

Short tasks repeat honestly, and a copy fails checks 5 and 11 whoever made it first, so nobody is refused for
this. But many long completions alike tell whoever looks into a fraud where the work came from.

The index is kept in memory: for each of the last versions, a digest of prompt and completion -> where it was
accepted first. It is bounded in versions and entries. A restart forgets it; then remarks are missing, never
wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from intellect_protocol.messages import FindingNote
from intellect_protocol.wire import sha256, u32

from .submissions import Unit

CHECK, CODE = "duplicate", "duplicate_completion"
_DIGEST_BYTES = 16
_VERSIONS_KEPT = 8
_MAX_ENTRIES = 1 << 17


class Tokens(Protocol):
    """What of a row is compared; rows of rollout files and of batches have it."""

    @property
    def prompt_tokens(self) -> list[int]: ...
    @property
    def completion_tokens(self) -> list[int]: ...


class _Place(NamedTuple):
    unit: Unit
    row: int


def _digests(rows: Iterable[Tokens]) -> list[bytes]:
    def packed(tokens: Sequence[int]) -> bytes:
        return np.asarray(tokens, dtype="<u4").tobytes()

    return [
        sha256(u32(len(row.prompt_tokens)), packed(row.prompt_tokens), packed(row.completion_tokens))[
            :_DIGEST_BYTES
        ]
        for row in rows
    ]


class DuplicateIndex:
    """Where completions were accepted first. Not thread-safe: one caller at a time."""

    def __init__(self, *, versions: int = _VERSIONS_KEPT, entries: int = _MAX_ENTRIES) -> None:
        """
        Args:
            versions: newest versions kept.
            entries: completions kept at most; the oldest version goes first, then nothing is added.
        """
        self._versions, self._entries = versions, entries
        self._places: dict[int, dict[bytes, _Place]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def remark(self, unit: Unit, rows: Iterable[Tokens]) -> FindingNote | None:
        """A note if another node's unit of the same version has some of these completions, else None.

        `measured` is the share of rows that are alike; `row` is the first of them.
        """
        known = self._places.get(unit.version, {})
        digests = _digests(rows)
        found = [
            (number, place)
            for number, place in enumerate(map(known.get, digests))
            if place is not None and place.unit.node != unit.node
        ]
        if not found:
            return None
        number, first = found[0]
        text = (
            f"{len(found)} of {len(digests)} completions are also another node's; row {number} is row "
            f"{first.row} of unit {first.unit.version}/{first.unit.index} of 0x{first.unit.node.hex()}"
        )
        return FindingNote(CHECK, CODE, "note", number, len(found) / len(digests), None, text)

    def add(self, unit: Unit, rows: Iterable[Tokens]) -> None:
        """Enter an accepted unit."""
        if unit.version not in self._places:
            if len(self._places) >= self._versions and unit.version < min(self._places):
                return
            self._places[unit.version] = {}
            while len(self._places) > self._versions:
                del self._places[min(self._places)]
        for number, digest in enumerate(_digests(rows)):
            while len(self) >= self._entries and min(self._places) < unit.version:
                del self._places[min(self._places)]
            if len(self) >= self._entries:
                return
            self._places[unit.version].setdefault(digest, _Place(unit, number))
