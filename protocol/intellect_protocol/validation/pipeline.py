"""All checks of one unit, cheapest first, up to a judgement.

A check that refuses the unit is the last one to run; its findings are listed in full. What goes wrong on
our own side (an engine that dies, an environment that raises, scores that do not fit) is never the node's
fault: the judgement is inconclusive and the unit is judged again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import trio

from ..assignment import stream_seed
from ..engines.base import RowScore, ScoreRow
from ..rollouts import BatchRow, Rollout, RolloutUnit
from ..toploc import chunk_count
from .admission import check_work_signature
from .assignment import check_assignment
from .commitment import check_commitments, check_proof_form
from .context import Scorer, UnitContext
from .drift import check_drift
from .file import check_bytes, check_meta, read_file
from .findings import Check, Finding, Outcome, is_fatal, is_fraud, judge
from .improbable import check_improbable
from .reward import check_rewards, recompute_rewards
from .sampling import check_sampling
from .tokens import check_termination, check_tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judgement:
    """What a validator says about one unit.

    Attributes:
        outcome: accepted, rejected, suspect or inconclusive.
        findings: of all checks that ran.
        rows: for an accepted or suspect unit what the trainer may read: the validator's log-probs (without
            a forward pass the node's) and task rewards. Rows of one `prompt` form a group. Empty otherwise.
        fault: why the judgement is inconclusive, else "".
    """

    outcome: Outcome
    findings: list[Finding] = field(default_factory=list)
    rows: list[BatchRow] = field(default_factory=list)
    fault: str = ""

    @property
    def fraud(self) -> bool:
        """Whether a slashing case is to be opened."""
        return is_fraud(self.findings)

    @property
    def tokens(self) -> int:
        """Generated tokens that may be trained on."""
        return sum(len(row.completion_tokens) for row in self.rows)


@dataclass(frozen=True)
class Structure:
    """What checks 1 and 4 to 9 found, and what they derived for the rest.

    Attributes:
        unit: None where the file could not be read.
        rewards: [rows] task rewards; empty where an earlier check refused the unit.
    """

    findings: list[Finding]
    unit: RolloutUnit | None = None
    rewards: list[float] = field(default_factory=list)


def check_structure(data: bytes, context: UnitContext) -> Structure:
    """Checks 1 (the work's signature) and 4 to 9, and the form of the proofs: all that needs no model.

    Raises:
        Exception: whatever an environment raises; a fault of ours.
    """
    findings: list[Finding] = []
    if Check.ENVELOPE in context.checks:
        findings += _signature(context)
    if Check.FILE in context.checks and not is_fatal(findings):
        findings += check_bytes(data, context)
    if is_fatal(findings):
        return Structure(findings)
    unit = read_file(data, context)
    if isinstance(unit, Finding):
        return Structure([*findings, unit])

    terms = context.run.terms
    samples = terms.sampling.samples_per_prompt
    slots = context.slots
    rewards: list[float] = []

    def rewards_of_rows() -> list[Finding]:
        rewards.extend(recompute_rewards(unit.rows, slots, samples, context.tasks))
        return check_rewards(unit.rows, rewards)

    def tokens_of_rows() -> list[Finding]:
        prompts = [context.tasks.prompt_tokens(slot) for slot in slots]
        return check_tokens(unit.rows, [prompts[i // samples] for i in range(len(unit.rows))], terms)

    stages: list[tuple[Check, Callable[[], list[Finding]]]] = [
        (Check.FILE, lambda: check_meta(unit.meta, context)),
        (Check.ASSIGNMENT, lambda: check_assignment(unit.rows, slots, samples)),
        (Check.TOKENS, tokens_of_rows),
        (Check.TERMINATION, lambda: check_termination(unit.rows, terms)),
        (Check.REWARD, rewards_of_rows),
        (Check.COMMITMENT, lambda: check_proof_form(unit.rows, terms.model.hidden_size)),
    ]
    findings += _until_fatal(stages, context)
    if not is_fatal(findings) and not rewards:
        rewards_of_rows()
    return Structure(findings, unit, rewards)


def check_scores(rows: Sequence[Rollout], scores: Sequence[RowScore], context: UnitContext) -> list[Finding]:
    """Checks 10 to 12 on the validator's scores of all rows.

    Raises:
        ValueError: the scores are not those of the rows, or not finite; a fault of ours.
    """
    _check_fit(rows, scores)
    limits, terms = context.run.revision.thresholds, context.run.terms

    def draws() -> list[Finding]:
        found = check_sampling(scores, terms.sampling.samples_per_prompt, limits)
        return found + check_improbable(rows, scores, terms)

    return _until_fatal(
        [
            (Check.COMMITMENT, lambda: check_commitments(scores, limits)),
            (Check.SAMPLING, draws),
            (Check.DRIFT, lambda: check_drift(rows, scores, limits)),
        ],
        context,
    )


async def validate_unit(data: bytes, context: UnitContext, engine: Scorer | None) -> Judgement:
    """Judge one submitted file.

    Args:
        data: the file as received.
        engine: holds the weights of `context.version`; deadlines on its work are its own. None: the unit was
            not drawn for an audit, checks 10 to 12 are left out.

    Returns:
        A judgement; never an exception for anything the file may contain. Cancellation passes through.
    """
    try:
        structure = await trio.to_thread.run_sync(check_structure, data, context)
        if structure.unit is None or is_fatal(structure.findings):
            return Judgement(judge(structure.findings), structure.findings)
        rows = structure.unit.rows
        if engine is None:
            claimed = [row.logprobs for row in rows]
            batch = _batch_rows(rows, claimed, structure.rewards)
            return Judgement(judge(structure.findings), structure.findings, batch)
        scores = await engine.score(score_rows(rows, context.seed), context.sampling, context.secret)
        findings = structure.findings + await trio.to_thread.run_sync(check_scores, rows, scores, context)
    except Exception as error:
        # Nothing of this may be held against the node: a refusal is always a finding, never an exception.
        log.exception("unit %d of version %d could not be judged", context.index, context.version)
        return Judgement(Outcome.INCONCLUSIVE, fault=f"{type(error).__name__}: {error}")
    outcome = judge(findings)
    if outcome is Outcome.REJECTED:
        return Judgement(outcome, findings)
    logprobs = [np.asarray(score.logprobs, dtype=np.float32) for score in scores]
    return Judgement(outcome, findings, _batch_rows(rows, logprobs, structure.rewards))


def score_rows(rows: Sequence[Rollout], seed: bytes) -> list[ScoreRow]:
    """Rows as an engine scores them, each with the stream seed that follows from its place."""
    return [
        ScoreRow(
            prompt=row.prompt_tokens,
            completion=row.completion_tokens,
            seed=stream_seed(seed, row.prompt, row.sample),
            proofs=row.proofs,
        )
        for row in rows
    ]


def _signature(context: UnitContext) -> list[Finding]:
    return check_work_signature(
        context.run.run_id,
        context.version,
        context.checkpoint_hash,
        context.index,
        context.file_hash,
        context.size_bytes,
        context.work_signature,
        context.node,
    )


def _until_fatal(
    stages: Sequence[tuple[Check, Callable[[], list[Finding]]]], context: UnitContext
) -> list[Finding]:
    findings: list[Finding] = []
    for check, run in stages:
        if check in context.checks and not is_fatal(findings):
            findings += run()
    return findings


def _check_fit(rows: Sequence[Rollout], scores: Sequence[RowScore]) -> None:
    if len(scores) != len(rows):
        raise ValueError(f"{len(scores)} scores for {len(rows)} rows")
    for number, (row, score) in enumerate(zip(rows, scores, strict=True)):
        length = len(row.completion_tokens)
        columns = (score.logprobs, score.distances, score.exact, score.top_prob)
        if any(len(column) != length for column in columns):
            raise ValueError(f"row {number} was scored at another length than {length}")
        if not score.proof_error and len(score.chunk_reports) != chunk_count(length):
            raise ValueError(f"row {number} has {len(score.chunk_reports)} chunk reports")
        if not all(map(math.isfinite, (*score.logprobs, *score.distances, *score.top_prob))):
            raise ValueError(f"row {number} has a score that is not finite")


def _batch_rows(
    rows: Sequence[Rollout], logprobs: Sequence[np.ndarray], rewards: Sequence[float]
) -> list[BatchRow]:
    return [
        BatchRow(
            prompt=row.prompt,
            sample=row.sample,
            environment=row.environment,
            task_index=row.task_index,
            target_length=row.target_length,
            prompt_tokens=row.prompt_tokens,
            completion_tokens=row.completion_tokens,
            logprobs=of_row,
            finish_reason=row.finish_reason,
            reward=reward,
        )
        for row, of_row, reward in zip(rows, logprobs, rewards, strict=True)
    ]
