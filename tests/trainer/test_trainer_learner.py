"""One step on a micro model: gradients, micro-batches, the guard, the schedule."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from micro_run import CONFIG, make_model

from intellect_trainer.learner import Learner
from intellect_trainer.packing import TrainRow, pack
from intellect_trainer.policy import load_policy, token_statistics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "v0"
    make_model(folder)
    return folder


def _rows(seed: int, count: int = 6) -> list[TrainRow]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        prompt, length = rng.integers(3, 99, size=rng.integers(1, 9)).tolist(), int(rng.integers(1, 7))
        rows.append(
            TrainRow(
                prompt,
                rng.integers(3, 99, size=length).tolist(),
                -rng.uniform(4, 5, size=length).astype(np.float32),
                float(rng.normal()),
            )
        )
    return rows


def _learner(folder: Path, **changes) -> Learner:
    config = msgspec.structs.replace(CONFIG, **changes)
    models = [load_policy(folder, dtype="float32", attention=config.attention) for _ in range(2)]
    return Learner(*models, config, temperature=1.0)


def _weights(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in learner.policy.parameters()])


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10)), min_size=1, max_size=30), st.integers(1, 60)
)
def test_packing_puts_every_completion_token_into_one_micro_batch(shapes, max_tokens) -> None:
    tokens = iter(range(1, 10_000))
    rows = [
        TrainRow(
            [next(tokens) for _ in range(prompt)],
            [next(tokens) for _ in range(completion)],
            np.arange(completion, dtype=np.float32) + 100 * index,
            float(index),
        )
        for index, (prompt, completion) in enumerate(shapes)
    ]
    batches = pack(rows, max_tokens=max_tokens)
    assert sorted(index for batch in batches for index in batch.rows) == list(range(len(rows)))
    for batch in batches:
        assert batch.input_ids.numel() <= max_tokens or len(batch.rows) == 1
        expected = [token for index in batch.rows for token in rows[index].completion_tokens]
        assert batch.targets.tolist() == expected
        before = [
            token
            for index in batch.rows
            for token in [*rows[index].prompt_tokens, *rows[index].completion_tokens][
                len(rows[index].prompt_tokens) - 1 : -1
            ]
        ]
        assert batch.input_ids.flatten()[batch.positions].tolist() == before
        assert batch.old_logprobs.tolist() == [v for i in batch.rows for v in rows[i].old_logprobs.tolist()]
        assert batch.advantages.tolist() == [
            rows[i].advantage for i in batch.rows for _ in rows[i].completion_tokens
        ]


def test_log_probs_and_entropies_are_those_of_each_row_alone(folder) -> None:
    model = load_policy(folder, dtype="float32", attention="sdpa")
    rows = _rows(1)
    with torch.no_grad():
        for batch in pack(rows, max_tokens=10_000):
            logprobs, entropies = token_statistics(model, batch, temperature=0.7)
            expected_logprobs, expected_entropies = [], []
            for index in batch.rows:
                ids = torch.tensor([[*rows[index].prompt_tokens, *rows[index].completion_tokens]])
                log_p = torch.log_softmax(model(input_ids=ids).logits[0].double() / 0.7, dim=-1)
                for at in range(len(rows[index].prompt_tokens), ids.shape[1]):
                    expected_logprobs.append(float(log_p[at - 1, ids[0, at]]))
                    expected_entropies.append(-float((log_p[at - 1].exp() * log_p[at - 1]).sum()))
            np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5)
            np.testing.assert_allclose(entropies, expected_entropies, atol=1e-5)


def test_an_update_does_not_depend_on_how_the_batch_is_cut(folder) -> None:
    groups = [_rows(2)]
    whole, cut = (_learner(folder, updates_per_step=1, micro_batch_tokens=size) for size in (10_000, 8))
    for learner in (whole, cut):
        learner.step(groups, version=1)
    torch.testing.assert_close(_weights(whole), _weights(cut), rtol=0, atol=2e-6)
    assert not torch.equal(_weights(whole), _weights(_learner(folder)))


def test_every_group_is_in_exactly_one_of_the_updates(folder) -> None:
    groups = [_rows(seed, 3) for seed in range(5)]
    learner = _learner(folder, updates_per_step=2)
    metrics = learner.step(groups, version=3)
    assert metrics.tokens == sum(len(row.completion_tokens) for group in groups for row in group)
    assert (metrics.updates, learner.updates) == (2, 2)


@settings(max_examples=10, deadline=None)
@given(st.sampled_from([float("nan"), float("inf")]))
def test_an_update_that_is_not_finite_is_skipped_and_said(folder, bad) -> None:
    rows = _rows(3)
    rows[2] = TrainRow(rows[2].prompt_tokens, rows[2].completion_tokens, rows[2].old_logprobs, bad)
    learner = _learner(folder, updates_per_step=1)
    before = _weights(learner)
    metrics = learner.step([rows], version=1)
    assert (metrics.updates, metrics.updates_skipped, metrics.tokens) == (0, 1, 0)
    assert torch.equal(before, _weights(learner))
    assert not learner.optimizer.state
    metrics = learner.step([_rows(4)], version=2)
    assert metrics.updates == 1
    assert torch.isfinite(_weights(learner)).all()


def test_a_skipped_update_is_logged(folder, caplog) -> None:
    rows = [TrainRow([5], [6], np.float32([-1]), float("nan")), *_rows(3)]
    _learner(folder, updates_per_step=1).step([rows], version=7)
    assert "version 7: an update was skipped, its loss is nan" in caplog.text


def test_the_learning_rate_warms_up_linearly_and_stays(folder) -> None:
    learner = _learner(folder, updates_per_step=1, warmup_updates=3, learning_rate=0.3)
    rates = [learner.step([_rows(seed)], version=seed).learning_rate for seed in range(1, 6)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3])


def test_a_better_sample_becomes_more_probable(folder) -> None:
    learner = _learner(folder, updates_per_step=1, max_grad_norm=10.0, warmup_updates=0)
    good, bad = [10, 11, 1], [12, 13, 1]

    def logprob(tokens: list[int]) -> float:
        (batch,) = pack([TrainRow([5, 6], tokens, np.zeros(3, np.float32), 0.0)], max_tokens=100)
        with torch.no_grad():
            return float(token_statistics(learner.policy, batch, temperature=1.0)[0].sum())

    old = {tuple(tokens): logprob(tokens) / 3 for tokens in (good, bad)}
    group = [
        TrainRow([5, 6], tokens, np.full(3, old[tuple(tokens)], np.float32), advantage)
        for tokens, advantage in ((good, 1.0), (bad, -1.0))
    ]
    learner.step([group], version=1)
    assert logprob(good) / 3 > old[tuple(good)]
    assert logprob(bad) / 3 < old[tuple(bad)]
