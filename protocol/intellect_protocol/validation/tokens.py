"""Checks 6 and 7: what the rows' tokens may be, and how a completion may end.

The token ids in the file are what is proved, rewarded and trained on; no text is ever read from a worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..rollouts import Rollout
from ..run import RunTerms
from .findings import Check, Finding, Kind


def check_tokens(rows: Sequence[Rollout], prompts: Sequence[Sequence[int]], terms: RunTerms) -> list[Finding]:
    """Check 6: the assigned prompt, then 1 to max_tokens ids of the vocabulary, none after the first stop.

    Args:
        prompts: token ids of the prompt of each row.
    """
    findings = []
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        problem = _token_problem(row, prompt, terms)
        if problem:
            code, text, measured, limit = problem
            text = f"row {number}: {text}"
            findings.append(Finding(Check.TOKENS, code, Kind.FRAUD, text, number, measured, limit))
    return findings


def _token_problem(
    row: Rollout, prompt: Sequence[int], terms: RunTerms
) -> tuple[str, str, float | None, float | None] | None:
    completion, most = row.completion_tokens, terms.sampling.max_tokens
    if row.prompt_tokens != list(prompt):
        return "prompt_tokens", "the prompt is not the assigned one", None, None
    if not completion:
        return "empty", "the completion is empty", None, None
    if len(completion) > most:
        text = f"{len(completion)} tokens, the run allows {most}"
        return "too_long", text, len(completion), most
    if max(completion) >= terms.model.vocab_size:
        text = f"token id {max(completion)} is outside the vocabulary of {terms.model.vocab_size}"
        return "token_id", text, max(completion), terms.model.vocab_size - 1
    stop = _first_stop(completion, terms.sampling.stop_ids)
    if stop is not None and stop != len(completion) - 1:
        extra = len(completion) - 1 - stop
        return "after_stop", f"{extra} tokens after the stop token", extra, 0
    return None


def check_termination(rows: Sequence[Rollout], terms: RunTerms) -> list[Finding]:
    """Check 7: a completion ends with a stop token or at the run's maximum, and says which.

    Whether the stop token was rightly drawn is for check 11.
    """
    findings = []
    for number, row in enumerate(rows):
        length = len(row.completion_tokens)
        stopped = _first_stop(row.completion_tokens, terms.sampling.stop_ids) is not None
        if not stopped and length < terms.sampling.max_tokens:
            most = terms.sampling.max_tokens
            text = f"row {number}: ends without a stop token after {length} of {most} tokens"
            findings.append(Finding(Check.TERMINATION, "unfinished", Kind.FRAUD, text, number, length))
        elif row.finish_reason != ("stop" if stopped else "length"):
            text = f"row {number}: says that it ended by {row.finish_reason!r}, its tokens say otherwise"
            findings.append(Finding(Check.TERMINATION, "finish_reason", Kind.INVALID, text, number))
    return findings


def _first_stop(completion: Sequence[int], stop_ids: Sequence[int]) -> int | None:
    return next((place for place, token in enumerate(completion) if token in stop_ids), None)
