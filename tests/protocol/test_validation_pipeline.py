"""Whole units through the pipeline, made and scored by the real engine with a small random model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import pytest
import torch
import trio
from example_unit import (
    CountingTasks,
    LocalScorer,
    context_of,
    generate_unit,
    load,
    tiny_run,
    with_row,
    write_tiny_model,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from intellect_protocol import sampling, toploc
from intellect_protocol.assignment import PromptSlot, stream_seed
from intellect_protocol.engines.base import GenerateRequest, RowScore, Sampling, ScoreRow
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.errors import EngineError
from intellect_protocol.rollouts import RolloutUnit, write_unit
from intellect_protocol.validation.findings import ALL_CHECKS, Check, Kind, Outcome, to_notes
from intellect_protocol.validation.pipeline import Judgement, validate_unit
from intellect_protocol.wire import decode_canonical, encode

RUN = tiny_run()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    return load(write_tiny_model(tmp_path_factory.mktemp("honest") / "model", seed=0))


@pytest.fixture(scope="module")
def other_engine(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    return load(write_tiny_model(tmp_path_factory.mktemp("other") / "model", seed=1))


@pytest.fixture(scope="module")
def unit(engine: TorchEngine) -> RolloutUnit:
    return generate_unit(engine, RUN)


def judged(unit: RolloutUnit | bytes, engine: TorchEngine, *off: Check, **changes: object) -> Judgement:
    data = unit if isinstance(unit, bytes) else write_unit(unit)
    context = context_of(data, RUN, checks=ALL_CHECKS - set(off), **changes)
    return trio.run(validate_unit, data, context, LocalScorer(engine))


def codes(judgement: Judgement) -> set[str]:
    return {finding.code for finding in judgement.findings}


def free_of_stops(unit: RolloutUnit, *, at_least: int) -> Iterator[int]:
    """Rows that run to the maximum length."""
    return (n for n, row in enumerate(unit.rows) if len(row.completion_tokens) >= at_least)


def test_an_honest_unit_is_accepted_without_a_finding(unit: RolloutUnit, engine: TorchEngine) -> None:
    judgement = judged(unit, engine)
    assert judgement.outcome is Outcome.ACCEPTED
    assert judgement.findings == []


def test_an_accepted_unit_yields_the_validators_numbers_for_training(
    unit: RolloutUnit, engine: TorchEngine
) -> None:
    shifted = RolloutUnit(
        unit.meta,
        [msgspec.structs.replace(row, logprobs=row.logprobs + np.float32(5e-4)) for row in unit.rows],
    )
    judgement = judged(shifted, engine)
    assert judgement.outcome is Outcome.ACCEPTED
    assert judgement.tokens == sum(len(row.completion_tokens) for row in unit.rows)
    for row, made in zip(judgement.rows, unit.rows, strict=True):
        assert (row.prompt, row.sample, row.completion_tokens) == (
            made.prompt,
            made.sample,
            made.completion_tokens,
        )
        assert row.logprobs.dtype == np.float32
        np.testing.assert_allclose(row.logprobs, made.logprobs, atol=2e-4)
        assert row.reward == pytest.approx(made.reward)


def test_batch_size_and_packing_of_the_validator_do_not_matter(
    unit: RolloutUnit, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("intellect_protocol.engines.torch_engine._BATCH_TOKENS", 40)
    assert judged(unit, engine).findings == []


def test_another_model_is_caught_by_its_commitments_and_by_its_draws(
    engine: TorchEngine, other_engine: TorchEngine
) -> None:
    cheat = generate_unit(other_engine, RUN)
    judgement = judged(cheat, engine)
    assert judgement.fraud
    assert "commitment_exponents" in codes(judgement)
    assert {finding.row for finding in judgement.findings if finding.kind is Kind.FRAUD} >= set(range(32))
    assert "sampling_distance" in codes(judged(cheat, engine, Check.COMMITMENT))
    blind = judged(cheat, engine, Check.COMMITMENT, Check.SAMPLING, Check.DRIFT)
    assert blind.outcome is Outcome.ACCEPTED


@torch.inference_mode()
def recommitted(unit: RolloutUnit, number: int, tokens: list[int], engine: TorchEngine) -> RolloutUnit:
    """A row with other tokens, and everything else about it made honestly for these tokens."""
    prompt = unit.rows[number].prompt_tokens
    decoder = engine._loaded()
    states = decoder.sequence_states([prompt + tokens[:-1]])[0][len(prompt) - 1 :]
    return with_row(
        unit,
        number,
        completion_tokens=tokens,
        logprobs=sampling.log_probs(decoder.logits(states), torch.tensor(tokens)).numpy(),
        finish_reason="stop" if tokens[-1] in RUN.terms.sampling.stop_ids else "length",
        reward=CountingTasks().reward(PromptSlot("", 0, 0), tokens),
        proofs=toploc.build(states),
    )


def test_edited_tokens_with_honest_commitments_are_caught_by_the_seeds(
    unit: RolloutUnit, engine: TorchEngine
) -> None:
    number = next(free_of_stops(unit, at_least=10))
    tokens = list(unit.rows[number].completion_tokens)
    tokens[4] = 2 + (tokens[4] + 37) % 90
    cheat = recommitted(unit, number, tokens, engine)
    judgement = judged(cheat, engine)
    assert judgement.fraud
    assert "sampling_distance" in codes(judgement)
    assert {finding.row for finding in judgement.findings if finding.kind is Kind.FRAUD} >= {number}
    assert judged(cheat, engine, Check.SAMPLING).outcome is Outcome.ACCEPTED


def test_edited_tokens_with_the_old_commitments_are_caught_by_them_too(
    unit: RolloutUnit, engine: TorchEngine
) -> None:
    number = next(free_of_stops(unit, at_least=10))
    tokens = list(unit.rows[number].completion_tokens)
    tokens[1] = 2 + (tokens[1] + 37) % 90
    reward = CountingTasks().reward(PromptSlot("", 0, 0), tokens)
    judgement = judged(with_row(unit, number, completion_tokens=tokens, reward=reward), engine)
    assert judgement.fraud
    assert {finding.check for finding in judgement.findings} == {Check.COMMITMENT}


def test_the_best_of_many_samples_is_caught_by_the_seeds(unit: RolloutUnit, engine: TorchEngine) -> None:
    """The cheat draws each row from four streams, of which one is its own, and keeps the highest reward."""
    context = context_of(b"", RUN)
    best = unit
    for number, row in enumerate(unit.rows[:8]):
        seeds = [stream_seed(context.seed, row.prompt, row.sample + 1000 * extra) for extra in range(1, 4)]
        drawn: dict[int, list[int]] = {}
        engine.generate(
            [GenerateRequest(row.prompt_tokens, seeds, RUN.terms.sampling.max_tokens)],
            context.sampling,
            lambda prompt, sample, made, drawn=drawn: drawn.__setitem__(sample, made.tokens),
            lambda tokens: None,
        )
        reward = CountingTasks().reward
        choice = max(drawn.values(), key=lambda tokens: reward(PromptSlot("", 0, 0), tokens))
        if reward(PromptSlot("", 0, 0), choice) > row.reward:
            best = recommitted(best, number, choice, engine)
    changed = {n for n in range(8) if best.rows[n].completion_tokens != unit.rows[n].completion_tokens}
    judgement = judged(best, engine)
    assert judgement.fraud
    assert {finding.check for finding in judgement.findings} == {Check.SAMPLING}
    assert {f.row for f in judgement.findings if f.code == "sampling_distance"} == changed
    assert judged(best, engine, Check.SAMPLING).outcome is Outcome.ACCEPTED


def constant_proof(row_tokens: int) -> list[bytes]:
    coefficients = np.array([65497, 0x3FC0, *[0] * 127], dtype=">u2")
    return [coefficients.tobytes()] * toploc.chunk_count(row_tokens)


@pytest.mark.parametrize("kind", ["constant", "replayed", "malformed", "missing", "extra"])
def test_proofs_that_are_not_the_rows_own_are_fraud(
    kind: str, unit: RolloutUnit, engine: TorchEngine
) -> None:
    row = unit.rows[5]
    donor = next(
        other
        for other in unit.rows
        if other.prompt != row.prompt and len(other.proofs) == len(row.proofs) and other.proofs != row.proofs
    )
    proofs = {
        "constant": constant_proof(len(row.completion_tokens)),
        "replayed": donor.proofs,
        "malformed": [b"\x00" * 258] * len(row.proofs),
        "missing": [],
        "extra": [*row.proofs, row.proofs[0]],
    }[kind]
    cheat = with_row(unit, 5, proofs=proofs)
    judgement = judged(cheat, engine)
    assert judgement.fraud
    assert {(finding.check, finding.row) for finding in judgement.findings} == {(Check.COMMITMENT, 5)}
    assert judged(cheat, engine, Check.COMMITMENT).outcome is Outcome.ACCEPTED


def test_a_forged_reward_is_fraud_and_says_both_values(unit: RolloutUnit, engine: TorchEngine) -> None:
    true = unit.rows[12].reward
    judgement = judged(with_row(unit, 12, reward=2.0), engine)
    assert judgement.fraud
    assert [finding.text for finding in judgement.findings] == [
        f"row 12: reward declared 2, recomputed {true:.6g}"
    ]
    blind = judged(with_row(unit, 12, reward=2.0), engine, Check.REWARD)
    assert blind.outcome is Outcome.ACCEPTED
    assert blind.rows[12].reward == pytest.approx(true)


def test_drifting_log_probs_are_suspect_and_no_fraud(unit: RolloutUnit, engine: TorchEngine) -> None:
    row = unit.rows[0]
    judgement = judged(with_row(unit, 0, logprobs=row.logprobs - np.float32(0.5)), engine)
    assert judgement.outcome is Outcome.SUSPECT
    assert not judgement.fraud
    assert codes(judgement) == {"drift"}
    assert len(judgement.rows) == len(unit.rows)


Change = Callable[[RolloutUnit], RolloutUnit]
STRUCTURAL: list[tuple[str, Check, str, Kind, Change]] = [
    (
        "another prompt's task",
        Check.ASSIGNMENT,
        "assignment",
        Kind.FRAUD,
        lambda unit: with_row(unit, 3, task_index=unit.rows[3].task_index ^ 1),
    ),
    (
        "another target length",
        Check.ASSIGNMENT,
        "assignment",
        Kind.FRAUD,
        lambda unit: with_row(unit, 3, target_length=unit.rows[3].target_length + 1),
    ),
    (
        "another environment",
        Check.ASSIGNMENT,
        "assignment",
        Kind.FRAUD,
        lambda unit: with_row(unit, 3, environment="spell"),
    ),
    (
        "rows in another order",
        Check.ASSIGNMENT,
        "row_order",
        Kind.FRAUD,
        lambda unit: RolloutUnit(unit.meta, unit.rows[::-1]),
    ),
    (
        "another prompt",
        Check.TOKENS,
        "prompt_tokens",
        Kind.FRAUD,
        lambda unit: with_row(unit, 3, prompt_tokens=[*unit.rows[3].prompt_tokens, 7]),
    ),
    (
        "an id outside the vocabulary",
        Check.TOKENS,
        "token_id",
        Kind.FRAUD,
        lambda unit: with_row(unit, 3, completion_tokens=[100, *unit.rows[3].completion_tokens[1:]]),
    ),
    (
        "an empty completion",
        Check.TOKENS,
        "empty",
        Kind.FRAUD,
        lambda unit: with_row(unit, 3, completion_tokens=[], logprobs=np.zeros(0, np.float32), proofs=[]),
    ),
    (
        "too many tokens",
        Check.TOKENS,
        "too_long",
        Kind.FRAUD,
        lambda unit: with_row(unit, 3, completion_tokens=[2] * 21, logprobs=np.zeros(21, np.float32)),
    ),
    (
        "padding after the stop token",
        Check.TOKENS,
        "after_stop",
        Kind.FRAUD,
        lambda unit: with_row(unit, 3, completion_tokens=[5, 1, 1], logprobs=np.zeros(3, np.float32)),
    ),
    (
        "a completion cut short",
        Check.TERMINATION,
        "unfinished",
        Kind.FRAUD,
        lambda unit: with_row(unit, 3, completion_tokens=[5, 6], logprobs=np.zeros(2, np.float32)),
    ),
    (
        "a wrong finish reason",
        Check.TERMINATION,
        "finish_reason",
        Kind.INVALID,
        lambda unit: with_row(unit, 3, finish_reason="tired"),
    ),
    (
        "rows left out",
        Check.ASSIGNMENT,
        "row_count",
        Kind.INVALID,
        lambda unit: RolloutUnit(unit.meta, unit.rows[:-1]),
    ),
    (
        "another node's file",
        Check.FILE,
        "file_meta",
        Kind.INVALID,
        lambda unit: RolloutUnit(msgspec.structs.replace(unit.meta, node=b"\x01" * 20), unit.rows),
    ),
    (
        "a file of another index",
        Check.FILE,
        "file_meta",
        Kind.INVALID,
        lambda unit: RolloutUnit(msgspec.structs.replace(unit.meta, index=7), unit.rows),
    ),
    (
        "a file of another checkpoint",
        Check.FILE,
        "wrong_checkpoint",
        Kind.STALE,
        lambda unit: RolloutUnit(msgspec.structs.replace(unit.meta, checkpoint_hash=b"\x01" * 32), unit.rows),
    ),
]


@pytest.mark.parametrize(
    ("check", "code", "kind", "change"), [row[1:] for row in STRUCTURAL], ids=[r[0] for r in STRUCTURAL]
)
def test_a_unit_is_refused_without_the_model_where_its_structure_is_wrong(
    check: Check, code: str, kind: Kind, change: Change, unit: RolloutUnit, engine: TorchEngine
) -> None:
    judgement = judged(change(unit), engine)
    assert judgement.outcome is Outcome.REJECTED
    assert {(f.check, f.code, f.kind) for f in judgement.findings} == {(check, code, kind)}
    assert judgement.fraud == (kind is Kind.FRAUD)
    assert judgement.rows == []
    assert code not in codes(judged(change(unit), engine, check))


def test_a_unit_for_another_seed_is_fraud(unit: RolloutUnit, engine: TorchEngine) -> None:
    judgement = judged(unit, engine, block_hash=b"\xb1" * 32)
    assert judgement.fraud
    assert codes(judgement) == {"assignment"}


def test_the_streams_of_another_unit_are_caught_by_the_draws(unit: RolloutUnit, engine: TorchEngine) -> None:
    """Prompts and tokens look right, only the uniforms are not those of S."""
    off = (Check.ASSIGNMENT, Check.TOKENS, Check.REWARD)
    judgement = judged(unit, engine, *off, block_hash=b"\xb1" * 32)
    assert {finding.check for finding in judgement.findings} == {Check.SAMPLING}
    assert judgement.fraud


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"work_signature": b"\x00" * 65}, "bad_work_signature"),
        ({"node": b"\x02" * 20}, "bad_work_signature"),
        ({"version": 4}, "bad_work_signature"),
    ],
)
def test_work_that_its_node_did_not_sign_is_invalid(
    changes: dict[str, object], code: str, unit: RolloutUnit, engine: TorchEngine
) -> None:
    judgement = judged(unit, engine, **changes)
    assert [(f.check, f.code, f.kind) for f in judgement.findings] == [(Check.ENVELOPE, code, Kind.INVALID)]


def test_other_bytes_than_the_announced_ones_are_invalid(unit: RolloutUnit, engine: TorchEngine) -> None:
    data = write_unit(unit)
    context = context_of(data, RUN)
    scorer = LocalScorer(engine)
    truncated = trio.run(validate_unit, data[:-1], context, scorer)
    assert codes(truncated) == {"file_size"}
    flipped = trio.run(validate_unit, data[:-1] + bytes([data[-1] ^ 1]), context, scorer)
    assert codes(flipped) == {"file_hash"}


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=2000))
def test_bytes_that_are_no_rollout_file_are_invalid(data: bytes) -> None:
    judgement = trio.run(validate_unit, data, context_of(data, RUN), UnreachableScorer())
    assert codes(judgement) == {"file_format"}
    assert judgement.outcome is Outcome.REJECTED


class UnreachableScorer:
    """Fails as an engine does whose child process died."""

    async def score(self, rows: Sequence[ScoreRow], options: Sampling, secret: bytes) -> list[RowScore]:
        raise EngineError("killed", "the engine's process ended with signal 9")


@settings(max_examples=150, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_a_damaged_file_never_raises(unit: RolloutUnit, place: float, value: int) -> None:
    damaged = bytearray(write_unit(unit))
    damaged[int(place * len(damaged))] = value
    data = bytes(damaged)
    judgement = trio.run(validate_unit, data, context_of(data, RUN), UnreachableScorer())
    assert judgement.outcome in (Outcome.REJECTED, Outcome.INCONCLUSIVE)
    if judgement.outcome is Outcome.INCONCLUSIVE:
        assert judgement.fault.startswith("EngineError")


def test_our_own_faults_are_inconclusive_and_cost_the_node_nothing(
    unit: RolloutUnit, engine: TorchEngine
) -> None:
    data = write_unit(unit)
    dead = trio.run(validate_unit, data, context_of(data, RUN), UnreachableScorer())
    assert (dead.outcome, dead.findings, dead.fraud) == (Outcome.INCONCLUSIVE, [], False)
    assert "signal 9" in dead.fault

    class RaisingTasks(CountingTasks):
        def reward(self, slot: PromptSlot, completion: Sequence[int]) -> float:
            raise RuntimeError("the sandbox is gone")

    class NanTasks(CountingTasks):
        def reward(self, slot: PromptSlot, completion: Sequence[int]) -> float:
            return float("nan")

    for tasks in (RaisingTasks(), NanTasks()):
        judgement = judged(unit, engine, tasks=tasks)
        assert (judgement.outcome, judgement.findings) == (Outcome.INCONCLUSIVE, [])


@pytest.mark.parametrize("damage", ["missing", "short", "nan"])
def test_scores_that_do_not_fit_the_rows_are_our_own_fault(
    damage: str, unit: RolloutUnit, engine: TorchEngine
) -> None:
    class Damaged(LocalScorer):
        async def score(self, rows: Sequence[ScoreRow], options: Sampling, secret: bytes) -> list[RowScore]:
            scores = await super().score(rows, options, secret)
            if damage == "missing":
                return scores[:-1]
            changed = {"distances": [float("nan")] * len(scores[0].distances)}
            if damage == "short":
                changed = {"distances": scores[0].distances[1:]}
            return [msgspec.structs.replace(scores[0], **changed), *scores[1:]]

    data = write_unit(unit)
    judgement = trio.run(validate_unit, data, context_of(data, RUN), Damaged(engine))
    assert (judgement.outcome, judgement.findings) == (Outcome.INCONCLUSIVE, [])


def test_findings_travel_canonically_and_in_bounded_number(unit: RolloutUnit, engine: TorchEngine) -> None:
    cheat = RolloutUnit(unit.meta, [msgspec.structs.replace(row, reward=9.0) for row in unit.rows])
    findings = judged(cheat, engine).findings * 20
    notes = to_notes(findings)
    assert len(findings) == 640
    assert len(notes) == 201
    assert notes[-1].text == "440 more findings were left out here"
    assert all(decode_canonical(encode(note), type(note)) == note for note in notes)
