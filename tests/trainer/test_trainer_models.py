"""First policies and held-out evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from micro_run import make_model, make_run
from tokenizers import Tokenizer

from intellect_protocol.checkpoint import is_checkpoint_file
from intellect_protocol.environments import registry
from intellect_protocol.environments.prompts import Prompts
from intellect_protocol.errors import ConfigError, UsageError
from intellect_trainer.evaluation import open_evaluator
from intellect_trainer.generation import generate
from intellect_trainer.models import tiny
from intellect_trainer.models.registry import make_policy
from intellect_trainer.policy import load_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "v0"
    make_model(folder)
    return folder


def test_the_character_tokenizer_is_lossless_in_every_loader(folder) -> None:
    from transformers import AutoTokenizer

    text = "\n sort:5391=  A1\n~{}<eos 12ab"
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(folder)
    ids = plain.encode(text).ids
    assert len(ids) == len(text)
    assert auto(text)["input_ids"] == ids
    assert plain.decode(ids) == auto.decode(ids) == text
    assert (auto.pad_token_id, auto.eos_token_id) == (0, 1)
    assert Prompts(folder, chat=False).stop_ids == [1]


def test_a_model_folder_holds_only_what_a_checkpoint_may(folder) -> None:
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert all(is_checkpoint_file(path.name) for path in folder.iterdir())


def test_the_seed_decides_the_weights() -> None:
    def weights(seed: int) -> torch.Tensor:
        model = tiny.new_model(99, eos_id=1, pad_id=0, seed=seed)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert weights(1).numel() == pytest.approx(138_000, rel=0.01)


def test_greedy_generation_is_the_argmax_of_the_whole_sequence_whatever_the_batch(folder) -> None:
    model = load_policy(folder, dtype="float32", attention="sdpa")
    prompts = [[5], [7, 8, 9, 10], [50, 60]]
    expected = []
    for prompt in prompts:
        tokens: list[int] = []
        for _ in range(6):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        expected.append(tokens)
    assert generate(model, prompts, max_tokens=6, stop_ids=[]) == expected
    stop = expected[1][2]
    stopped = generate(model, prompts, max_tokens=6, stop_ids=[stop], batch_size=2)
    assert stopped == [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in expected]


def test_warm_up_reaches_the_pass_rate_on_train_tasks_only(tmp_path, monkeypatch) -> None:
    environment = registry.make("sort_digits", {"min_digits": 1, "max_digits": 2})
    held_out = {problem.question for problem in environment.heldout(1000)}
    seen: set[str] = set()

    class Watched:
        def problem(self, index: int):
            problem = environment.problem(index)
            seen.add(problem.question)
            return problem

        reward = staticmethod(environment.reward)

    monkeypatch.setattr(registry, "make", lambda name: Watched())
    rate = tiny.make_tiny("watched", tmp_path / "out", max_tokens=4, seed=0)
    assert rate >= 0.3
    assert seen
    assert not seen & held_out


def test_the_held_out_score_is_the_share_of_solved_tasks(folder, monkeypatch) -> None:
    from intellect_trainer import evaluation

    evaluator = open_evaluator(make_run(folder), folder, count=40)
    assert evaluator.tasks == 40
    prompts = Prompts(folder, chat=False)
    answers = [prompts.encode_answer(p) for p in registry.make("sort_digits").heldout(40)]

    def first_ten_right(model, encoded, **options):
        return [[*answer, 1] if at < 10 else [*answer, 5] for at, answer in enumerate(answers)]

    monkeypatch.setattr(evaluation, "generate", first_ten_right)
    assert evaluator.score(torch.nn.Identity()) == 0.25


def test_a_local_folder_becomes_version_zero_with_the_same_weights(folder, tmp_path) -> None:
    make_policy(str(folder), tmp_path / "out", environment=None, seed=0, dtype="bfloat16")
    ours, theirs = (
        load_policy(path, dtype="float32", attention="eager") for path in (tmp_path / "out", folder)
    )
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(a, b.bfloat16().float()), name
    assert Prompts(tmp_path / "out", chat=False).stop_ids == [1]


def test_what_cannot_be_made_is_refused(folder, tmp_path) -> None:
    with pytest.raises(UsageError, match="exists; nothing was changed"):
        make_policy("tiny", folder, environment="sort_digits", seed=0, dtype="float32")
    with pytest.raises(UsageError, match="needs --environment"):
        make_policy("tiny", tmp_path / "a", environment=None, seed=0, dtype="float32")
    with pytest.raises(ConfigError, match="not a model folder"):
        make_policy(str(tmp_path), tmp_path / "b", environment=None, seed=0, dtype="float32")
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ConfigError, match="cannot be loaded"):
        make_policy(str(tmp_path), tmp_path / "b", environment=None, seed=0, dtype="float32")


@pytest.mark.long
def test_smollm2_comes_from_its_package_and_answers(tmp_path) -> None:
    make_policy("smollm2", tmp_path / "out", environment=None, seed=0, dtype="bfloat16")
    model = load_policy(tmp_path / "out", dtype="bfloat16", attention="eager")
    prompts = Prompts(tmp_path / "out", chat=True)
    problem = registry.make("arithmetic").problem(0)
    prompt = prompts.encode(
        type(problem)(environment="arithmetic", index=0, question="What is the capital of France?", answer="")
    )
    (tokens,) = generate(model, [prompt], max_tokens=20, stop_ids=prompts.stop_ids)
    assert "Paris" in prompts.decode(tokens)
