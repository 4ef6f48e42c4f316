"""Batches: read strictly, used once, whole groups, the freshest first."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from micro_run import MAX_TOKENS, NODE, PROMPTS, SAMPLES, make_batch, make_run, put_batch

from intellect_protocol.messages import TrainingState
from intellect_protocol.rollouts import Batch, write_batch
from intellect_protocol.run import RunConfig
from intellect_protocol.wire import sha256
from intellect_trainer.data import BatchSource
from intellect_trainer.journal import Journal, UnitKey

C = [bytes([version]) * 32 for version in range(1, 20)]
SAME = [[1.0] * SAMPLES] * PROMPTS


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    (tmp_path / "tokenizer.json").write_text("{}")
    return make_run(tmp_path)


@pytest.fixture
def journal(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    for version, checkpoint in enumerate(C):
        journal.record_checkpoint(version, checkpoint)
    yield journal
    journal.close()


@pytest.fixture
def source(tmp_path: Path, journal: Journal, run: RunConfig) -> BatchSource:
    return _open(tmp_path / "batches", journal, run)


def _open(folder: Path, journal: Journal, run: RunConfig, *, oldest_weights: int = 0) -> BatchSource:
    return BatchSource(folder, journal, run, has_weights=lambda version, head: version >= oldest_weights)


def _put(source_folder: Path, run: RunConfig, version: int, index: int = 0, rewards=None) -> bytes:
    return sha256(
        put_batch(
            source_folder, make_batch(run, version, C[version], index=index, rewards=rewards)
        ).read_bytes()
    )


def test_the_freshest_groups_are_trained_first_and_the_rest_waits(source, run, tmp_path) -> None:
    for version in (3, 5, 4):
        _put(tmp_path / "batches", run, version)
    source.poll()
    first = source.choose(head=5, count=PROMPTS + 1)
    assert [group.unit.version for group in first.groups] == [5] * PROMPTS + [4]
    second = source.choose(head=6, count=100)
    assert [group.unit.version for group in second.groups] == [4] * (PROMPTS - 1)
    assert {(entry.unit.version, entry.outcome) for entry in second.plan} == {
        (4, TrainingState.TRAINED),
        (3, TrainingState.EXPIRED),
    }


def test_groups_stay_whole_and_in_sample_order(source, run, tmp_path) -> None:
    batch = make_batch(run, 2, C[2])
    put_batch(tmp_path / "batches", msgspec.structs.replace(batch, rows=list(reversed(batch.rows))))
    source.poll()
    for group in source.choose(head=2, count=10).groups:
        assert [row.sample for row in group.rows] == list(range(SAMPLES))


def test_rows_older_than_the_async_level_expire_and_equal_rewards_are_filtered(
    source, run, journal, tmp_path
):
    expired, at_the_edge = _put(tmp_path / "batches", run, 2), _put(tmp_path / "batches", run, 3)
    filtered = _put(tmp_path / "batches", run, 5, rewards=SAME)
    source.poll()
    data = source.choose(head=5, count=10)
    assert {group.file_hash for group in data.groups} == {at_the_edge}
    assert journal.outcomes(6) == {
        expired: TrainingState.EXPIRED,
        at_the_edge: TrainingState.TRAINED,
        filtered: TrainingState.FILTERED,
    }


def test_a_unit_has_one_outcome_however_many_steps_its_groups_take(source, run, journal, tmp_path) -> None:
    one_differs = [[0.0, 1.0, 0.0, 1.0], *SAME[1:]]
    mixed = _put(tmp_path / "batches", run, 4, index=0, rewards=one_differs)
    spread = _put(tmp_path / "batches", run, 4, index=1)
    source.poll()
    for head in (4, 5, 6):
        source.choose(head, count=2)
    outcomes = [journal.outcomes(step) for step in (5, 6, 7)]
    assert outcomes == [{mixed: TrainingState.TRAINED, spread: TrainingState.TRAINED}, {}, {}]


def test_a_group_is_used_once_even_if_its_file_comes_again_or_the_program_restarts(
    source, run, journal, tmp_path
) -> None:
    batches = tmp_path / "batches"
    _put(batches, run, 4)
    source.poll()
    assert len(source.choose(head=4, count=2).groups) == 2
    # The same bytes again, in a folder whose time stamp says that it changed.
    _put(batches, run, 4)
    for reader in (source, _open(batches, journal, run)):
        reader.poll()
        assert len(reader.trainable(head=5)) == PROMPTS - 2
    assert len(source.choose(head=5, count=9).groups) == PROMPTS - 2
    # Another file for the unit that was used.
    put_batch(batches, make_batch(run, 4, C[4], rewards=[[0.0, 0.0, 0.0, 1.0]] * PROMPTS))
    restarted = _open(batches, journal, run)
    restarted.poll()
    assert restarted.trainable(head=5) == []


def test_a_changed_file_of_a_half_used_unit_is_set_aside(source, run, journal, tmp_path) -> None:
    batches = tmp_path / "batches"
    _put(batches, run, 4)
    source.poll()
    source.choose(head=4, count=1)
    put_batch(batches, make_batch(run, 4, C[4], rewards=[[0.0, 0.0, 0.0, 1.0]] * PROMPTS))
    restarted = _open(batches, journal, run)
    restarted.poll()
    assert restarted.trainable(head=5) == []
    reason = journal.set_aside_reason(f"v00000004/{NODE.hex()}-000000.parquet")
    assert reason == "the unit was already used from another file"


def test_a_journaled_step_is_repeated_exactly(source, run, journal, tmp_path) -> None:
    for index in range(3):
        _put(tmp_path / "batches", run, 4, index=index)
    source.poll()
    planned = source.choose(head=4, count=5)
    # A fresher unit arrives before the restart; the plan stands.
    _put(tmp_path / "batches", run, 4, index=9)
    restarted = _open(tmp_path / "batches", journal, run)
    repeated = restarted.repeat(head=4)
    assert repeated is not None
    assert repeated.plan == planned.plan
    assert [(g.unit, g.prompt) for g in repeated.groups] == [(g.unit, g.prompt) for g in planned.groups]
    restarted.poll()
    assert {(g.unit.unit_index, g.prompt) for g in restarted.trainable(head=5)} == {
        (1, 2), *((2, p) for p in range(PROMPTS)), *((9, p) for p in range(PROMPTS))
    }  # fmt: skip


def _tampered(batch: Batch, **changes) -> Batch:
    rows = list(batch.rows)
    rows[1] = msgspec.structs.replace(rows[1], **changes)
    return msgspec.structs.replace(batch, rows=rows)


def _meta(batch: Batch, **changes) -> Batch:
    return msgspec.structs.replace(batch, meta=msgspec.structs.replace(batch.meta, **changes))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda b: b"not parquet at all", "not a readable Parquet file"),
        (lambda b: write_batch(b)[:-40], "not a readable Parquet file"),
        (lambda b: write_batch(_meta(b, run_id=b"\x09" * 32)), "belongs to another run"),
        (lambda b: write_batch(_meta(b, index=3)), "another unit than its name says"),
        (lambda b: write_batch(_meta(b, checkpoint_hash=b"\x08" * 32)), "another checkpoint than version 4"),
        (lambda b: write_batch(_meta(b, format=2)), "format 2 is not supported"),
        (
            lambda b: write_batch(_tampered(b, completion_tokens=[99], logprobs=np.float32([-1]))),
            "vocabulary",
        ),
        (lambda b: write_batch(_tampered(b, completion_tokens=[], logprobs=np.float32([]))), "no completion"),
        (lambda b: write_batch(_tampered(b, reward=float("nan"))), "non-finite"),
        (lambda b: write_batch(_tampered(b, logprobs=b.rows[1].logprobs * -1)), "log-prob is above 0"),
        (lambda b: write_batch(_tampered(b, prompt_tokens=[5])), "different prompts"),
        (lambda b: write_batch(_tampered(b, sample=0)), "every sample exactly once"),
        (
            lambda b: write_batch(msgspec.structs.replace(b, rows=b.rows[:-SAMPLES])),
            "the prompts are not 0 to",
        ),
        (
            lambda b: write_batch(
                _tampered(
                    b, completion_tokens=[5] * (MAX_TOKENS + 1), logprobs=np.float32([-1] * (MAX_TOKENS + 1))
                )
            ),
            f"longer than {MAX_TOKENS} tokens",
        ),
    ],
)
def test_a_malformed_file_is_set_aside_with_the_reason(source, run, journal, tmp_path, caplog, spoil, reason):
    path = put_batch(tmp_path / "batches", make_batch(run, 4, C[4]))
    path.write_bytes(spoil(make_batch(run, 4, C[4])))
    good = _put(tmp_path / "batches", run, 4, index=1)
    source.poll()
    source.poll()
    assert reason in (journal.set_aside_reason(f"v00000004/{path.name}") or "")
    assert caplog.text.count(path.name) == 1
    assert source.files_set_aside == 1
    assert {group.file_hash for group in source.trainable(head=4)} == {good}


def test_a_version_that_was_never_published_is_set_aside(source, run, journal, tmp_path) -> None:
    path = put_batch(tmp_path / "batches", make_batch(run, 300, C[4]))
    source.poll()
    assert "never published" in (journal.set_aside_reason(f"v00000300/{path.name}") or "")


def test_files_in_any_order_of_arrival_are_found_though_folders_keep_old_time_stamps(source, run, tmp_path):
    batches = tmp_path / "batches"
    for index in (2, 0):
        put_batch(batches, make_batch(run, 4, C[4], index=index))
    folder = batches / "v00000004"
    os.utime(folder, ns=(1, 1))
    source.poll()
    put_batch(batches, make_batch(run, 4, C[4], index=1))
    source.poll()
    assert {group.unit for group in source.trainable(head=4)} == {UnitKey(4, NODE, i) for i in range(3)}


def test_a_plan_whose_file_vanished_is_an_error_that_names_the_file(source, run, journal, tmp_path) -> None:
    from intellect_protocol.errors import RolloutFileError

    path = put_batch(tmp_path / "batches", make_batch(run, 4, C[4]))
    source.poll()
    source.choose(head=4, count=2)
    path.unlink()
    with pytest.raises(RolloutFileError, match=path.name):
        _open(tmp_path / "batches", journal, run).repeat(head=4)
