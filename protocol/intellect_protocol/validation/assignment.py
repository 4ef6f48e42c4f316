"""Check 5: the unit holds every sample of every prompt that S assigns, in order, and nothing else.

The seeds of the samples are not in the file: they follow from S and a row's place, and check 11 replays them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..assignment import PromptSlot
from ..rollouts import Rollout
from .findings import Check, Finding, Kind


def check_assignment(
    rows: Sequence[Rollout], slots: Sequence[PromptSlot], samples_per_prompt: int
) -> list[Finding]:
    """Rows against the unit's slots; row i must be sample i mod samples of prompt i div samples."""
    expected = len(slots) * samples_per_prompt
    if len(rows) != expected:
        text = f"{len(rows)} rows, the unit has {len(slots)} prompts with {samples_per_prompt} samples each"
        return [Finding(Check.ASSIGNMENT, "row_count", Kind.INVALID, text, None, len(rows), expected)]
    findings = []
    for number, row in enumerate(rows):
        prompt, sample = divmod(number, samples_per_prompt)
        if (row.prompt, row.sample) != (prompt, sample):
            text = (
                f"row {number}: is sample {row.sample} of prompt {row.prompt}, must be {sample} of {prompt}"
            )
            findings.append(Finding(Check.ASSIGNMENT, "row_order", Kind.FRAUD, text, number))
            continue
        slot = slots[prompt]
        for name in ("environment", "task_index", "target_length"):
            found, assigned = getattr(row, name), getattr(slot, name)
            if found != assigned:
                text = f"row {number}: {name.replace('_', ' ')} {found!r}, assigned was {assigned!r}"
                findings.append(Finding(Check.ASSIGNMENT, "assignment", Kind.FRAUD, text, number))
    return findings
