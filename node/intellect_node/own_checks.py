"""The validators' checks on a node's own unit, each with what it measured, in plain words.

`check_own` tells everything about one file, for `verify`. `self_check` is the daemon's: it only says whether
a validator would accuse this node, before anything is signed. Both run the validators' own pipeline, so what
passes here fails there only within the numeric spread of two machines. Checks 2 and 3 (standing and window)
depend on the moment of submission and stay with the coordinator.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import trio

from intellect_protocol.errors import EngineError
from intellect_protocol.messages import FindingNote
from intellect_protocol.validation.context import Scorer, Tasks, UnitContext
from intellect_protocol.validation.findings import ALL_CHECKS, Check, Finding, Outcome, judge, to_notes
from intellect_protocol.validation.measures import Measurement, measure_scores
from intellect_protocol.validation.pipeline import check_scores, check_structure, score_rows, validate_unit
from intellect_protocol.wire import sha256

if TYPE_CHECKING:
    from intellect_protocol.engines.base import RowScore, Sampling, ScoreRow
    from intellect_protocol.rollouts import RolloutUnit
    from intellect_protocol.run import RunConfig

    from .rollout import Policy

SECRET_BYTES = 16
PASSED, REFUSED, SUSPECT, NOT_RUN, ELSEWHERE = "passed", "refused", "suspect", "not run", "elsewhere"
_RESULTS = {"fraud": REFUSED, "invalid": REFUSED, "stale": REFUSED, "suspect": SUSPECT}


class CheckLine(msgspec.Struct, frozen=True):
    """One check.

    Attributes:
        result: "passed", "refused", "suspect", "not run" (an earlier check refused the unit) or "elsewhere".
        text: what was compared.
        measured: the worst value of each quantity that the check grades.
        findings: what is wrong.
    """

    check: str
    result: str
    text: str
    measured: list[Measurement]
    findings: list[FindingNote]


class OwnReport(msgspec.Struct, frozen=True):
    """What a validator would say about a unit."""

    outcome: str  # accepted, rejected or suspect
    rows: int
    tokens: int
    checks: list[CheckLine]


class RawScoring(Protocol):
    """What of an engine's client scores rows; `engines.supervisor.EngineClient` is one."""

    async def score(
        self, rows: Sequence[ScoreRow], sampling: Sampling, *, secret: bytes = ...
    ) -> list[RowScore]: ...


class ClientScorer:
    """An engine's client as a pipeline's scorer."""

    def __init__(self, engine: RawScoring) -> None:
        self._engine = engine

    async def score(self, rows: Sequence[ScoreRow], sampling: Sampling, secret: bytes) -> list[RowScore]:
        """Scores of rows, in their order."""
        return await self._engine.score(rows, sampling, secret=secret)


def own_context(
    run: RunConfig,
    tasks: Tasks,
    node: bytes,
    version: int,
    checkpoint_hash: bytes,
    block_hash: bytes,
    index: int,
    data: bytes,
    signature: bytes = b"",
) -> UnitContext:
    """A validator's view of a file of this node.

    Args:
        signature: of the node key over the work; empty: not signed yet, and check 1 is left out.
    """
    return UnitContext(
        run=run,
        version=version,
        checkpoint_hash=checkpoint_hash,
        block_hash=block_hash,
        node=node,
        index=index,
        file_hash=sha256(data),
        size_bytes=len(data),
        work_signature=signature,
        tasks=tasks,
        secret=secrets.token_bytes(SECRET_BYTES),
        checks=ALL_CHECKS if signature else ALL_CHECKS - {Check.ENVELOPE},
    )


async def self_check(
    run: RunConfig, tasks: Tasks, node: bytes, policy: Policy, index: int, data: bytes, engine: RawScoring
) -> str:
    """Judge an unsigned unit as a validator would.

    Returns:
        "" or why a second validator would have to look; that is no accusation, and the unit can be sent.

    Raises:
        EngineError: reason ``self-check``: a validator would refuse it, or it could not be judged.
    """
    context = own_context(
        run, tasks, node, policy.version, policy.checkpoint_hash, policy.block_hash, index, data
    )
    judgement = await validate_unit(data, context, ClientScorer(engine))
    if judgement.outcome is Outcome.INCONCLUSIVE:
        raise EngineError("self-check", f"this unit could not be checked: {judgement.fault}")
    texts = [f"{finding.code}: {finding.text}" for finding in judgement.findings]
    if judgement.outcome is Outcome.REJECTED:
        raise EngineError("self-check", f"a validator would refuse this unit ({len(texts)}): {texts[0]}")
    return texts[0] if judgement.outcome is Outcome.SUSPECT else ""


async def check_own(data: bytes, context: UnitContext, engine: Scorer) -> OwnReport:
    """Run all checks on a file.

    Raises:
        EngineError: the engine failed.
        ValueError: the engine's scores make no sense.
    """
    structure = await trio.to_thread.run_sync(check_structure, data, context)
    findings, unit = structure.findings, structure.unit
    measured: list[Measurement] = []
    scored = False
    if unit is not None and judge(findings) is Outcome.ACCEPTED:
        scores = await engine.score(score_rows(unit.rows, context.seed), context.sampling, context.secret)
        findings = findings + await trio.to_thread.run_sync(check_scores, unit.rows, scores, context)
        samples = context.run.terms.sampling.samples_per_prompt
        measured = measure_scores(unit.rows, scores, samples, context.run.revision.thresholds)
        scored = True
    rows = [] if unit is None else unit.rows
    return OwnReport(
        outcome=judge(findings).value,
        rows=len(rows),
        tokens=sum(len(row.completion_tokens) for row in rows),
        checks=_lines(findings, measured, _texts(data, unit, context), context, scored),
    )


def refused_file(finding: Finding) -> OwnReport:
    """The report on a file that is no rollout file."""
    lines = [
        CheckLine(check.value, REFUSED, "", [], [finding.to_note()])
        if check is finding.check
        else CheckLine(check.value, NOT_RUN, "", [], [])
        for check in Check
    ]
    return OwnReport(Outcome.REJECTED.value, 0, 0, lines)


def _lines(
    findings: Sequence[Finding],
    measured: Sequence[Measurement],
    texts: dict[Check, str],
    context: UnitContext,
    scored: bool,
) -> list[CheckLine]:
    lines = []
    stopped = False
    for check in Check:
        own = to_notes([finding for finding in findings if finding.check is check])
        values = [each for each in measured if each.check is check]
        text = texts.get(check, "")
        if check in (Check.STANDING, Check.WINDOW):
            result, text = ELSEWHERE, "the coordinator checks it when the unit is submitted"
        elif check not in context.checks:
            result, text = ELSEWHERE, "not signed yet"
        elif own:
            kinds = [_RESULTS.get(note.kind, PASSED) for note in own]
            result = next((kind for kind in (REFUSED, SUSPECT) if kind in kinds), PASSED)
        elif stopped or (check in (Check.COMMITMENT, Check.SAMPLING, Check.DRIFT) and not scored):
            result, text = NOT_RUN, "an earlier check refused the unit"
        else:
            result = PASSED
        stopped = stopped or result == REFUSED
        lines.append(CheckLine(check.value, result, text, values, own))
    return lines


def _texts(data: bytes, unit: RolloutUnit | None, context: UnitContext) -> dict[Check, str]:
    """What each check looked at, where it needs no measured value."""
    most = context.run.revision.window.max_submission_bytes
    size = f"{len(data):,} of at most {most:,} bytes"
    texts = {Check.ENVELOPE: "signed by the node key for this unit and file", Check.FILE: size}
    if unit is None or not unit.rows:
        return texts
    rows, terms = unit.rows, context.run.terms.sampling
    stopped = sum(row.finish_reason == "stop" for row in rows)
    longest = max(len(row.completion_tokens) for row in rows)
    mean = sum(row.reward for row in rows) / len(rows)
    return texts | {
        Check.FILE: f"{len(rows)} rows, {size}",
        Check.ASSIGNMENT: f"{terms.prompts_per_unit} prompts with {terms.samples_per_prompt} samples each",
        Check.TOKENS: f"the longest completion has {longest} of at most {terms.max_tokens} tokens",
        Check.TERMINATION: f"{stopped} end with a stop token, {len(rows) - stopped} at the maximum",
        Check.REWARD: f"all computed again, {mean:.4g} on average",
        Check.COMMITMENT: f"{sum(len(row.proofs) for row in rows)} chunks",
        Check.SAMPLING: f"{sum(len(row.completion_tokens) for row in rows)} tokens drawn again",
        Check.DRIFT: "the node's log-probs beside those computed here",
    }
