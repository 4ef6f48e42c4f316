"""A policy small enough to watch learning on a laptop: 138k parameters, made and warmed up on the spot.

Qwen2 architecture (hidden 64, 2 layers, 4 heads, tied embeddings) with a character tokenizer. From random
weights no reward would ever be seen, so it first learns from examples of the train split, until it solves
three in ten of them: enough to learn from rewards, and far from done.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from intellect_protocol.environments import registry
from intellect_protocol.environments.base import Environment
from intellect_protocol.environments.prompts import Prompts
from intellect_protocol.errors import PreflightError

from ..generation import generate
from .folder import write_model_folder

logger = logging.getLogger(__name__)

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
_CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
_MAX_POSITIONS = 256

_PASS_RATE = 0.3
_BATCH = 128
_LEARNING_RATE = 3e-3
_CHECK_EVERY = 5
_CHECK_TASKS = 256
_MAX_STEPS = 3000


def character_tokenizer() -> Any:
    """A fast tokenizer with one token per printable ASCII character and three special ones.

    It is a byte-level BPE without merges: whatever the file says, transformers rebuilds a Qwen2 model's
    tokenizer as one, from vocabulary and merges alone.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Byte-level alphabets write the space and the newline as letters of their own.
    characters = _CHARACTERS.replace(" ", "\u0120").replace("\n", "\u010a")
    vocabulary = {token: index for index, token in enumerate((PAD, EOS, UNKNOWN, *characters))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=_MAX_POSITIONS,
    )


def new_model(vocab_size: int, *, eos_id: int, pad_id: int, seed: int) -> Any:
    """The model with random weights that follow from `seed`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=_MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).float()


def make_tiny(environment: str, out: Path, *, max_tokens: int, seed: int) -> float:
    """Make, warm up and write the model; returns the pass rate it ended with.

    Args:
        environment: name of the environment; its train split gives the examples.
        max_tokens: longest completion.

    Raises:
        UsageError: `out` exists.
        ConfigError: no such environment.
        PreflightError: the model did not learn the task.
    """
    tokenizer = character_tokenizer()
    model = new_model(len(tokenizer), eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        prompts = Prompts(Path(folder), chat=False)
    tasks = _Tasks(registry.make(environment), prompts, int(tokenizer.eos_token_id))
    rate = _warm_up(model, tasks, max_tokens=max_tokens, seed=seed)
    write_model_folder(model, tokenizer, out, dtype="float32", stop_ids=[tokenizer.eos_token_id])
    return rate


class _Tasks:
    """Train-split tasks of one environment, in token ids."""

    def __init__(self, environment: Environment, prompts: Prompts, stop_id: int) -> None:
        self._environment = environment
        self._prompts = prompts
        self.stop_id = stop_id

    def example(self, index: int) -> tuple[list[int], list[int]]:
        """Prompt and right completion, with its end."""
        problem = self._environment.problem(index)
        return self._prompts.encode(problem), [*self._prompts.encode_answer(problem), self.stop_id]

    def passed(self, index: int, completion: Sequence[int]) -> bool:
        """Whether a completion earns the full reward."""
        problem = self._environment.problem(index)
        text = self._prompts.decode(completion)
        return self._environment.reward(problem, text, completion[-1] == self.stop_id) >= 1.0


def _warm_up(model: Any, tasks: _Tasks, *, max_tokens: int, seed: int) -> float:
    """Train on right answers until three in ten sampled completions pass.

    Raises:
        PreflightError: not reached within the step limit.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.01, fused=True)
    sampler = torch.Generator().manual_seed(seed)
    indices = _task_indices(seed)
    for step in range(1, _MAX_STEPS + 1):
        loss = _supervised_loss(model, [tasks.example(i) for i in itertools.islice(indices, _BATCH)])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % _CHECK_EVERY == 0:
            picked = list(itertools.islice(indices, _CHECK_TASKS))
            prompts = [tasks.example(index)[0] for index in picked]
            completions = generate(
                model, prompts, max_tokens=max_tokens, stop_ids=[tasks.stop_id], sampler=sampler
            )
            rate = sum(map(tasks.passed, picked, completions)) / len(picked)
            logger.info("warm-up step %d: loss %.3f, pass rate %.3f", step, float(loss.detach()), rate)
            if rate >= _PASS_RATE:
                return rate
    raise PreflightError(f"the tiny model did not learn this task in {_MAX_STEPS} warm-up steps")


def _task_indices(seed: int) -> Iterator[int]:
    """Task indices (u64) that follow from `seed`."""
    generator = torch.Generator().manual_seed(seed + 1)
    while True:
        yield from torch.randint(0, 1 << 62, (1024,), generator=generator).tolist()


def _supervised_loss(model: Any, batch: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
    width = max(len(prompt) + len(answer) for prompt, answer in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    labels = torch.full((len(batch), width), -100)
    for line, (prompt, answer) in enumerate(batch):
        row = torch.tensor([*prompt, *answer])
        ids[line, : len(row)] = row
        labels[line, len(prompt) : len(row)] = row[len(prompt) :]
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
