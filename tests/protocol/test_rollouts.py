"""The rollout file, and what happens to files that are not one."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intellect_protocol.errors import RolloutFileError
from intellect_protocol.rollouts import (
    ROLLOUT_SCHEMA,
    Batch,
    BatchMeta,
    BatchRow,
    EngineNote,
    FileLimits,
    Rollout,
    RolloutUnit,
    UnitMeta,
    read_batch,
    read_unit,
    write_batch,
    write_unit,
)
from intellect_protocol.wire import encode

META = UnitMeta(1, b"r" * 32, 3, b"c" * 32, b"n" * 20, 0, EngineNote("torch", "1", "float32", "eager", "cpu"))
LIMITS = FileLimits(max_rows=64, max_prompt_tokens=16, max_completion_tokens=16)


def row(length: int = 3, **changes: object) -> Rollout:
    values: dict[str, object] = {
        "prompt": 0,
        "sample": 0,
        "environment": "sort_digits",
        "task_index": 2**64 - 1,
        "target_length": 0,
        "prompt_tokens": [1, 2, 3],
        "completion_tokens": list(range(length)),
        "logprobs": np.linspace(-2, 0, length, dtype=np.float32),
        "finish_reason": "stop",
        "reward": 0.5,
        "proofs": [b"p" * 258],
    }
    return Rollout(**{**values, **changes})  # type: ignore[arg-type]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 16), max_size=20))
def test_a_file_gives_back_its_rows(lengths: list[int]) -> None:
    rows = [row(length, sample=s) for s, length in enumerate(lengths)]
    unit = read_unit(write_unit(RolloutUnit(META, rows)), LIMITS)
    assert unit.meta == META
    assert len(unit.rows) == len(rows)
    for before, after in zip(rows, unit.rows, strict=True):
        assert np.array_equal(before.logprobs, after.logprobs)
        assert (before.completion_tokens, before.proofs) == (after.completion_tokens, after.proofs)
        assert (before.task_index, before.sample) == (after.task_index, after.sample)


def test_a_batch_file_gives_back_its_rows() -> None:
    meta = BatchMeta(1, b"r" * 32, 3, b"c" * 32, b"n" * 20, 0, b"f" * 32, "0xabc")
    one = BatchRow(0, 1, "sort_digits", 5, 0, [1], [2, 3], np.zeros(2, np.float32), "length", 1.0)
    batch = read_batch(write_batch(Batch(meta, [one])), LIMITS)
    assert batch.meta == meta
    assert batch.rows[0].completion_tokens == [2, 3]
    with pytest.raises(RolloutFileError):
        read_unit(write_batch(Batch(meta, [one])), LIMITS)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_damaged_files_raise_only_file_errors(data: st.DataObject) -> None:
    good = write_unit(RolloutUnit(META, [row(sample=s) for s in range(4)]))
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 6))):
        damaged[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    for bad in (bytes(damaged), good[:cut], bytes(damaged[cut:])):
        try:
            read_unit(bad, LIMITS)
        except RolloutFileError:
            continue


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([row(17)], "completion is longer"),
        ([row(prompt_tokens=[0] * 17)], "prompt is longer"),
        ([row(logprobs=np.zeros(2, np.float32))], "differ in number"),
        ([row(logprobs=np.array([0, np.nan, 0], np.float32))], "non-finite"),
        ([row(reward=float("inf"))], "non-finite"),
        ([row()] * 65, "65 rows"),
    ],
)
def test_a_file_over_a_limit_is_refused_in_words(rows: list[Rollout], text: str) -> None:
    with pytest.raises(RolloutFileError, match=text):
        read_unit(write_unit(RolloutUnit(META, rows)), LIMITS)


def test_a_file_that_unpacks_to_far_more_than_it_may_is_refused_before_unpacking() -> None:
    rows = [row(environment="x" * 40_000_000)]
    bomb = write_unit(RolloutUnit(META, rows))
    assert len(bomb) < 100_000
    with pytest.raises(RolloutFileError, match="once decompressed"):
        read_unit(bomb, LIMITS)


def test_columns_must_be_exactly_those_of_the_schema() -> None:
    good = pq.read_table(io.BytesIO(write_unit(RolloutUnit(META, [row()]))))
    extra = good.append_column("extra", pa.array([1]))
    renamed = good.rename_columns(["other", *good.column_names[1:]])
    for table in (extra, renamed, good.drop_columns(["proofs"])):
        sink = io.BytesIO()
        pq.write_table(table, sink, compression="zstd")
        with pytest.raises(RolloutFileError, match="columns"):
            read_unit(sink.getvalue(), LIMITS)


def test_metadata_must_be_canonical_and_complete() -> None:
    table = pq.read_table(io.BytesIO(write_unit(RolloutUnit(META, [row()]))))
    for metadata in (b"", encode(META) + b"\x00", encode({"format": 1})):
        sink = io.BytesIO()
        schema = ROLLOUT_SCHEMA.with_metadata({b"intellect": metadata})
        pq.write_table(
            table.cast(ROLLOUT_SCHEMA).replace_schema_metadata(schema.metadata), sink, compression="zstd"
        )
        with pytest.raises(RolloutFileError, match="metadata"):
            read_unit(sink.getvalue(), LIMITS)
