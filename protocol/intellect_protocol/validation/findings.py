"""What a check says about a submission, and what all findings together amount to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from ..messages import FindingNote

MAX_NOTES = 200
"""Findings that travel in one verdict; a unit may have thousands of bad rows."""


class Check(StrEnum):
    """The checks in the order in which they run, cheapest first."""

    ENVELOPE = "envelope"
    STANDING = "standing"
    WINDOW = "window"
    FILE = "file"
    ASSIGNMENT = "assignment"
    TOKENS = "tokens"
    TERMINATION = "termination"
    REWARD = "reward"
    COMMITMENT = "commitment"
    SAMPLING = "sampling"
    DRIFT = "drift"


ALL_CHECKS = frozenset(Check)


class Kind(StrEnum):
    """What a finding costs the node.

    INVALID and STALE cost the work; FRAUD opens a slashing case; SUSPECT sends the unit to a second
    validator; NOTE decides nothing.
    """

    INVALID = "invalid"
    STALE = "stale"
    FRAUD = "fraud"
    SUSPECT = "suspect"
    NOTE = "note"


FATAL = frozenset({Kind.INVALID, Kind.STALE, Kind.FRAUD})


class Finding(msgspec.Struct, frozen=True):
    """One finding of one check.

    Attributes:
        code: machine-readable reason, unique over all checks.
        row: position in the file, or None where the finding is about the unit.
        measured: the value that was judged and `limit` what it may be at most, where the check is a
            measurement.
        text: one line for the person whose work it is.
    """

    check: Check
    code: str
    kind: Kind
    text: str
    row: int | None = None
    measured: float | None = None
    limit: float | None = None

    def to_note(self) -> FindingNote:
        """The finding as it travels to the node."""
        return FindingNote(
            check=self.check.value,
            code=self.code,
            kind=self.kind.value,
            row=self.row,
            measured=None if self.measured is None else float(self.measured),
            limit=None if self.limit is None else float(self.limit),
            text=self.text,
        )


class Outcome(StrEnum):
    """What becomes of a submission; INCONCLUSIVE is the validator's own fault and means: judge it again."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    SUSPECT = "suspect"
    INCONCLUSIVE = "inconclusive"


def is_fatal(findings: Iterable[Finding]) -> bool:
    """Whether any finding refuses the submission."""
    return any(finding.kind in FATAL for finding in findings)


def is_fraud(findings: Iterable[Finding]) -> bool:
    """Whether any finding opens a slashing case."""
    return any(finding.kind is Kind.FRAUD for finding in findings)


def judge(findings: Sequence[Finding]) -> Outcome:
    """The outcome that follows from all findings of all checks that ran."""
    if is_fatal(findings):
        return Outcome.REJECTED
    if any(finding.kind is Kind.SUSPECT for finding in findings):
        return Outcome.SUSPECT
    return Outcome.ACCEPTED


def to_notes(findings: Sequence[Finding]) -> list[FindingNote]:
    """At most 200 findings for the wire, those that decide first, and a remark on how many were left out."""
    ordered = sorted(findings, key=lambda finding: _WEIGHT[finding.kind])
    notes = [finding.to_note() for finding in ordered[:MAX_NOTES]]
    left = len(ordered) - len(notes)
    if left:
        text = f"{left} more findings were left out here"
        notes.append(Finding(ordered[-1].check, "more_findings", Kind.NOTE, text).to_note())
    return notes


_WEIGHT = {Kind.FRAUD: 0, Kind.INVALID: 1, Kind.STALE: 2, Kind.SUSPECT: 3, Kind.NOTE: 4}
