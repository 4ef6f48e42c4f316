"""The validator's prefill: what is computed once, what is computed at all, and in how much memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_unit import VOCAB, load, write_tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from intellect_protocol import toploc
from intellect_protocol.engines import scoring
from intellect_protocol.engines.base import RowScore, Sampling, ScoreRow
from intellect_protocol.engines.torch_engine import TorchEngine

LONG_ROW = Path(__file__).with_name("long_row.py")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    torch.set_num_threads(1)
    return load(write_tiny_model(tmp_path_factory.mktemp("scoring") / "model", seed=0))


def rows_of(shapes: list[tuple[int, list[int]]], seed: int) -> list[ScoreRow]:
    """Rows with random tokens: for each group the length of its prompt and of its completions."""
    rng = np.random.default_rng(seed)
    rows = []
    for prompt, completions in shapes:
        tokens = rng.integers(0, VOCAB, prompt).tolist()
        for length in completions:
            proofs = [rng.bytes(toploc.PROOF_BYTES)] * toploc.chunk_count(length)
            rows.append(ScoreRow(tokens, rng.integers(0, VOCAB, length).tolist(), rng.bytes(32), proofs))
    return [rows[number] for number in rng.permutation(len(rows))]


@torch.inference_mode()
def scored(engine: TorchEngine, rows: list[ScoreRow], batch_tokens: int) -> list[RowScore]:
    done: dict[int, RowScore] = {}
    scoring.Scoring(
        engine._loaded(),
        rows,
        Sampling(temperature=0.8),
        b"secret",
        max_rows=len(rows),
        batch_tokens=batch_tokens,
        deliver=done.__setitem__,
        progress=lambda tokens: None,
    ).run()
    return [done[number] for number in range(len(rows))]


groups = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 50), min_size=1, max_size=5)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25, deadline=None)
@given(shapes=groups, batch_tokens=st.sampled_from([1, 60, 200, 8192]), seed=st.integers(0, 2**32 - 1))
def test_scores_in_float32_do_not_depend_on_how_rows_are_packed(
    engine: TorchEngine, shapes: list[tuple[int, list[int]]], batch_tokens: int, seed: int
) -> None:
    rows = rows_of(shapes, seed)
    together = scored(engine, rows, batch_tokens)
    for row, packed in zip(rows, together, strict=True):
        (alone,) = scored(engine, [row], 1)
        np.testing.assert_allclose(packed.logprobs, alone.logprobs, atol=1e-5)
        np.testing.assert_allclose(packed.distances, alone.distances, atol=1e-5)
        np.testing.assert_allclose(packed.top_prob, alone.top_prob, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(shapes=groups, seed=st.integers(0, 2**32 - 1))
def test_a_prompt_is_computed_once_and_padding_never(
    engine: TorchEngine, shapes: list[tuple[int, list[int]]], seed: int
) -> None:
    rows, decoder = rows_of(shapes, seed), engine._loaded()
    computed, logits = [], []
    with pytest.MonkeyPatch.context() as patch:
        forward, head = decoder.forward, decoder.logits  # type: ignore[attr-defined]

        def counting_forward(tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
            computed.append(len(tokens))
            return forward(tokens, *rest)  # type: ignore[no-any-return]

        def counting_head(states: torch.Tensor) -> torch.Tensor:
            logits.append(len(states))
            return head(states)

        patch.setattr(decoder, "forward", counting_forward)
        patch.setattr(decoder, "logits", counting_head)
        patch.setattr(scoring, "_LOGITS_BUDGET_BYTES", 4 * VOCAB * 16)
        scored(engine, rows, 8192)
    prompts = {tuple(row.prompt) for row in rows}
    completions = sum(len(row.completion) for row in rows)
    # A row's last token produces nothing; only that of a one-token row among longer ones goes along.
    least = sum(map(len, prompts)) + completions - len(rows)
    assert least <= sum(computed) <= least + sum(len(row.completion) == 1 for row in rows)
    assert sum(logits) == completions
    assert max(logits) <= 16


def test_a_long_group_is_packed_to_the_budget(engine: TorchEngine) -> None:
    rows = rows_of([(10, [30] * 12)], seed=1)
    sizes = [
        len(batch)
        for batch in scoring.Scoring(
            engine._loaded(),
            rows,
            Sampling(),
            b"",
            max_rows=len(rows),
            batch_tokens=200,
            deliver=lambda *_: None,
            progress=lambda _: None,
        )._batches()
    ]
    assert sizes == [5, 5, 2]


@pytest.mark.long
def test_a_row_of_32768_tokens_is_scored_in_bounded_memory(tmp_path: Path) -> None:
    """Whole logits of this row would take 1 GB as float32 and 2 GB as float64, an attention mask 1 GB."""
    search = os.pathsep.join([*sys.path, str(LONG_ROW.parent)])
    done = subprocess.run(
        [sys.executable, str(LONG_ROW), str(tmp_path / "model")],
        check=True,
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["tokens"] == 32_768
    assert result["scored"] == 32_768 - 1024
    assert result["growth_bytes"] < 700 << 20
