"""Where a work root stands.

proposed -> committed        a quorum signed and the ledger has it
    |
    +----> dropped           the ledger has something else: a person has to look
"""

from __future__ import annotations

from enum import StrEnum


class RootState(StrEnum):
    """See the module."""

    PROPOSED = "proposed"
    COMMITTED = "committed"
    DROPPED = "dropped"
