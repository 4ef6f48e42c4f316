"""Attacks by the file itself: too large, larger inside than outside, or not a rollout file."""

from __future__ import annotations

import io

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import trio
from arena import Arena, codes
from coordinator_site import NODE, Site
from example_unit import with_row

from intellect_protocol.errors import RefusedError, RolloutFileError
from intellect_protocol.rollouts import FileLimits, RolloutUnit, parse, write_unit
from intellect_protocol.run import RunConfig
from intellect_protocol.validation.findings import Check, Outcome

GENEROUS = FileLimits(1 << 20, 1 << 30, 1 << 30, 1 << 32)


@pytest.fixture(scope="module")
def unit(arena: Arena) -> RolloutUnit:
    return arena.build()


def refused_unread(arena: Arena, data: bytes, text: str) -> None:
    """Refused as no rollout file, and nothing of it held against the validator."""
    judgement = arena.judge(data)
    assert (judgement.outcome, codes(judgement)) == (Outcome.REJECTED, {"file_format"})
    assert text in judgement.findings[0].text


def test_a_bomb_is_refused_by_what_its_footer_declares(arena: Arena, unit: RolloutUnit) -> None:
    bomb = write_unit(with_row(unit, 0, environment="x" * 60_000_000))
    assert len(bomb) < 200_000
    refused_unread(arena, bomb, "once decompressed")
    with pytest.raises(RolloutFileError, match="has a value of 60000000 bytes"):
        parse("unit", bomb, GENEROUS)  # without limits it unpacks to three hundred times its size


@pytest.mark.parametrize("column", ["prompt_tokens", "completion_tokens", "logprobs", "proofs"])
def test_endless_columns_are_refused(column: str, arena: Arena, unit: RolloutUnit) -> None:
    endless = {
        "prompt_tokens": [7] * 3_000_000,
        "completion_tokens": [7] * 3_000_000,
        "logprobs": np.zeros(3_000_000, np.float32),
        "proofs": [bytes(258)] * 20_000,
    }[column]
    data = write_unit(with_row(unit, 0, **{column: endless}))
    assert len(data) < arena.run.revision.window.max_submission_bytes
    judgement = arena.judge(data)
    assert judgement.outcome is Outcome.REJECTED
    assert codes(judgement) <= {"file_format", "proof_form"}


def test_a_file_over_the_runs_size_is_refused_unread(arena: Arena, unit: RolloutUnit) -> None:
    data = write_unit(unit)
    window = msgspec.structs.replace(arena.run.revision.window, max_submission_bytes=len(data) - 1)
    revision = msgspec.structs.replace(arena.run.revision, window=window)
    narrow = Arena(RunConfig(arena.run.terms, revision), arena.folder, arena.engine, arena.tasks)
    refused_unread(narrow, data, "exceeds the limit")
    assert arena.judge(data).outcome is Outcome.ACCEPTED


async def test_the_door_refuses_a_size_before_it_reads_the_body(site: Site) -> None:
    most = site.config.revision.window.max_submission_bytes
    claimed = msgspec.structs.replace(site.submission(b"x", 0), size_bytes=most + 1)
    with pytest.raises(RefusedError, match="too_large"):
        await site.intake.submit(NODE.address, claimed, b"x")


def test_more_rows_than_the_unit_has_are_refused(arena: Arena, unit: RolloutUnit) -> None:
    refused_unread(arena, write_unit(RolloutUnit(unit.meta, unit.rows * 2)), "rows")


def test_numbers_that_are_none_are_refused(arena: Arena, unit: RolloutUnit) -> None:
    poisoned = unit.rows[3].logprobs.copy()
    poisoned[0] = np.nan
    refused_unread(arena, write_unit(with_row(unit, 3, logprobs=poisoned)), "non-finite")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_file_that_ends_early_is_refused(share: float, arena: Arena, unit: RolloutUnit) -> None:
    data = write_unit(unit)
    refused_unread(arena, data[: int(share * len(data))], "not a readable Parquet file")


def test_columns_that_the_schema_does_not_have_are_refused(arena: Arena, unit: RolloutUnit) -> None:
    table = pq.read_table(io.BytesIO(write_unit(unit)))
    for name in ("proofs", "logprobs", "reward"):
        sink = io.BytesIO()
        pq.write_table(table.drop_columns([name]), sink, compression="zstd")
        refused_unread(arena, sink.getvalue(), "columns")


def test_a_swapped_file_is_noticed_by_its_hash(arena: Arena, unit: RolloutUnit) -> None:
    """Signed and announced is one file, delivered another of the same size."""
    from example_unit import LocalScorer

    from intellect_protocol.validation.pipeline import validate_unit

    data = write_unit(unit)
    other = data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]
    judgement = trio.run(validate_unit, other, arena.context(data), LocalScorer(arena.engine))
    assert (judgement.outcome, codes(judgement)) == (Outcome.REJECTED, {"file_hash"})


def test_the_model_is_not_asked_about_any_of_these(arena: Arena, unit: RolloutUnit) -> None:
    """A bad file costs a validator no forward pass."""

    class Unreachable:
        async def score(self, *arguments: object) -> list[object]:
            raise AssertionError("scored")

    from intellect_protocol.validation.pipeline import validate_unit

    for data in (b"", b"PAR1", write_unit(unit)[:-1], write_unit(RolloutUnit(unit.meta, unit.rows[:-1]))):
        judgement = trio.run(validate_unit, data, arena.context(data), Unreachable())
        assert judgement.outcome is Outcome.REJECTED
        assert Check.COMMITMENT not in {finding.check for finding in judgement.findings}
