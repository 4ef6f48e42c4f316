"""A policy small enough to watch learning on a laptop: 138k parameters, made and warmed up on the spot.

Qwen2 architecture (hidden 64, 2 layers, 4 heads, tied embeddings) with a character tokenizer. From random
weights no reward would ever be seen, so it first learns from examples of the train split, until it solves
about a fifth of them: enough to learn from rewards, and far from done.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from intellect_protocol.errors import PreflightError

from ..generation import generate
from .folder import write_model_folder

logger = logging.getLogger(__name__)

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
_CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
_MAX_POSITIONS = 256

_PASS_RATE = 0.2
_BATCH = 128
_LEARNING_RATE = 3e-3
_CHECK_EVERY = 10
_CHECK_TASKS = 256
_MAX_STEPS = 3000


class WarmUpTasks(Protocol):
    """Train-split tasks of one environment, in token ids."""

    def example(self, index: int) -> tuple[list[int], list[int]]:
        """Prompt and right completion (stop token included) of a task."""
        ...

    def reward(self, index: int, completion: Sequence[int]) -> float:
        """Task reward of a completion."""
        ...


def character_tokenizer() -> Any:
    """A fast tokenizer with one token per printable ASCII character and three special ones."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((PAD, EOS, UNKNOWN, *_CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
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


def make_tiny(tokenizer: Any, tasks: WarmUpTasks, out: Path, *, max_tokens: int, seed: int) -> float:
    """Make, warm up and write the model; returns the pass rate it ended with.

    Args:
        tokenizer: `character_tokenizer()`.
        max_tokens: longest completion.

    Raises:
        PreflightError: it did not learn the task.
    """
    model = new_model(len(tokenizer), eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id, seed=seed)
    rate = warm_up(model, tasks, stop_id=tokenizer.eos_token_id, max_tokens=max_tokens, seed=seed)
    write_model_folder(model, tokenizer, out, dtype="float32", stop_ids=[tokenizer.eos_token_id])
    return rate


def warm_up(model: Any, tasks: WarmUpTasks, *, stop_id: int, max_tokens: int, seed: int) -> float:
    """Train on right answers until a fifth of the sampled completions earns the full reward.

    Raises:
        PreflightError: not reached within the step limit.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.01, fused=True)
    sampler = torch.Generator().manual_seed(seed)
    indices = _task_indices(seed)
    for step in range(1, _MAX_STEPS + 1):
        batch = [tasks.example(index) for index in itertools.islice(indices, _BATCH)]
        loss = _supervised_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % _CHECK_EVERY == 0:
            picked = list(itertools.islice(indices, _CHECK_TASKS))
            prompts = [tasks.example(index)[0] for index in picked]
            completions = generate(
                model, prompts, max_tokens=max_tokens, stop_ids=[stop_id], sampler=sampler
            )
            rewards = [tasks.reward(*pair) for pair in zip(picked, completions, strict=True)]
            rate = sum(reward >= 1.0 for reward in rewards) / len(rewards)
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
