"""One step on a micro model: gradients, micro-batches, the guard, the schedule."""

from __future__ import annotations

from functools import partial
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
from intellect_trainer.policy import load_policy, token_logprobs, token_statistics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "v0"
    make_model(folder)
    return folder


def _rows(seed: int, count: int = 6) -> list[TrainRow]:
    rng = np.random.default_rng(seed)
    rows = []
    prompt = rng.integers(3, 99, size=rng.integers(1, 9)).tolist()
    for _ in range(count):
        length = int(rng.integers(1, 7))
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


def _by_group(seed: int) -> list[list[TrainRow]]:
    """Groups of rows that share their prompt, of all kinds of lengths."""
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(rng.integers(1, 5)):
        prompt = rng.integers(3, 99, size=rng.integers(1, 12)).tolist()
        lengths = rng.integers(1, 9, size=rng.integers(1, 6)).tolist()
        groups.append(
            [
                TrainRow(
                    prompt,
                    rng.integers(3, 99, size=length).tolist(),
                    rng.normal(size=length).astype(np.float32),
                    float(rng.normal()),
                )
                for length in lengths
            ]
        )
    return groups


@given(st.integers(0, 2**32 - 1), st.integers(1, 80), st.integers(0, 40))
def test_packing_puts_every_completion_token_into_one_micro_batch(seed, max_tokens, shared_width) -> None:
    groups = _by_group(seed)
    found = []
    for batch in pack(groups, max_tokens=max_tokens, shared_width=shared_width):
        lines, width = batch.input_ids.shape
        assert lines * width <= max_tokens or lines == 1
        assert batch.visible is None or width <= shared_width
        found += zip(
            batch.targets.tolist(), batch.old_logprobs.tolist(), batch.advantages.tolist(), strict=True
        )
    expected = [
        (token, float(old), float(np.float32(row.advantage)))
        for group in groups
        for row in group
        for token, old in zip(row.completion_tokens, row.old_logprobs, strict=True)
    ]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_log_probs_and_entropies_are_those_of_each_row_alone(folder, attention) -> None:
    model = load_policy(folder, dtype="float32", attention=attention)
    for seed, shared_width, max_tokens in ((1, 0, 10_000), (2, 256, 10_000), (3, 30, 60), (4, 256, 10)):
        groups = _by_group(seed)
        found, expected = [], []
        with torch.no_grad():
            for batch in pack(groups, max_tokens=max_tokens, shared_width=shared_width):
                logprobs, entropies = token_statistics(model, batch, temperature=0.7)
                np.testing.assert_allclose(token_logprobs(model, batch, temperature=0.7), logprobs, atol=1e-5)
                found += zip(batch.old_logprobs.tolist(), logprobs.tolist(), entropies.tolist(), strict=True)
            for row in [row for group in groups for row in group]:
                ids = torch.tensor([[*row.prompt_tokens, *row.completion_tokens]])
                log_p = torch.log_softmax(model(input_ids=ids).logits[0].double() / 0.7, dim=-1)
                for old, at in zip(
                    row.old_logprobs, range(len(row.prompt_tokens), ids.shape[1]), strict=True
                ):
                    entropy = -float((log_p[at - 1].exp() * log_p[at - 1]).sum())
                    expected.append((float(old), float(log_p[at - 1, ids[0, at]]), entropy))
        # The old log-probs are distinct, so sorting pairs each token with itself.
        np.testing.assert_allclose(sorted(found), sorted(expected), atol=1e-5)


def test_sharing_a_prompt_changes_neither_loss_nor_gradient(folder, monkeypatch) -> None:
    groups = _by_group(5)
    shared, alone = (_learner(folder, updates_per_step=1, max_grad_norm=1e9) for _ in range(2))
    ours = shared.step(groups, version=1)
    monkeypatch.setattr("intellect_trainer.learner.pack", partial(pack, shared_width=0))
    theirs = alone.step(groups, version=1)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    torch.testing.assert_close(_weights(shared), _weights(alone), rtol=0, atol=2e-6)


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
    bad = [TrainRow([5], [6], np.float32([-1]), float("nan"))]
    _learner(folder, updates_per_step=1).step([bad, _rows(3)], version=7)
    assert "version 7: an update was skipped, its loss is nan" in caplog.text


def test_the_learning_rate_warms_up_linearly_and_stays(folder) -> None:
    learner = _learner(folder, updates_per_step=1, warmup_updates=3, learning_rate=0.3)
    rates = [learner.step([_rows(seed)], version=seed).learning_rate for seed in range(1, 6)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3])


def test_a_better_sample_becomes_more_probable(folder) -> None:
    learner = _learner(folder, updates_per_step=1, max_grad_norm=10.0, warmup_updates=0)
    good, bad = [10, 11, 1], [12, 13, 1]

    def logprob(tokens: list[int]) -> float:
        (batch,) = pack([[TrainRow([5, 6], tokens, np.zeros(3, np.float32), 0.0)]], max_tokens=100)
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
