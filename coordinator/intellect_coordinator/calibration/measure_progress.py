"""What the measuring process reports, one JSON line per unit; its parent reads it without loading torch."""

from __future__ import annotations

import msgspec


class Progress(msgspec.Struct, frozen=True):
    """How far it is, in units generated or scored; with an `error` (of class `error_kind`) it ends."""

    done: int
    steps: int
    what: str
    error: str = ""
    error_kind: str = ""
