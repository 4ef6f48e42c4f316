"""Prompts and sampling of a calibration: those of the run, or, without one, long answers to its tasks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from intellect_protocol.assignment import prompt_slots
from intellect_protocol.engines.base import Sampling
from intellect_protocol.engines.weights import weight_files
from intellect_protocol.environments.prompts import Prompts
from intellect_protocol.environments.registry import make, names
from intellect_protocol.environments.tasks import load_tasks
from intellect_protocol.errors import ConfigError
from intellect_protocol.run import ModelTerms, RunTerms
from intellect_protocol.wire import sha256, u32

from ..new_run import model_terms

MAX_TOKENS = 64
PROMPTS_PER_UNIT = 4
SAMPLES_PER_PROMPT = 8
_PHRASES = (
    "{}",
    "Explain step by step how to solve this, then answer. {}",
    "Write a short story in which somebody asks: {}",
    "What would a mathematician, a poet and a child say to this? {}",
)


class Workload(msgspec.Struct, frozen=True):
    """What is generated; units as in `plan.Plan`."""

    model: ModelTerms
    sampling: Sampling
    max_tokens: int
    prompts_per_unit: int
    samples: int
    folder: Path
    run: RunTerms | None
    seed: int

    def prompts(self, units: int) -> list[list[list[int]]]:
        """[units][prompts per unit] token ids; more units begin with the same ones.

        Raises:
            ConfigError: an environment or the tokenizer does not give prompts.
        """
        return _run_prompts(self, self.run, units) if self.run is not None else _long_prompts(self, units)


def make_workload(folder: Path, run: RunTerms | None, seed: int) -> Workload:
    """The workload of a run or, without one, of the model alone.

    Without a run completions go on to their full length, past any stop token, so that all chunks are whole.

    Raises:
        ConfigError: the folder does not hold a model with tokenizer, or not the run's.
    """
    model, _ = model_terms(folder, None if run is None else run.model.chat)
    if run is None:
        if model.dtype not in ("float32", "bfloat16"):
            raise ConfigError(
                f"{folder / 'config.json'}: dtype must be float32 or bfloat16, not {model.dtype}"
            )
        longest = min(MAX_TOKENS, model.max_positions // 2)
        return Workload(model, Sampling(), longest, PROMPTS_PER_UNIT, SAMPLES_PER_PROMPT, folder, None, seed)
    for field in ModelTerms.__struct_fields__:
        here, there = getattr(model, field), getattr(run.model, field)
        if here != there:
            raise ConfigError(f"{folder}: not the run's model: {field} is {here}, the run has {there}")
    terms = run.sampling
    sampling = Sampling(terms.temperature, terms.top_k, terms.top_p, terms.stop_ids)
    return Workload(
        model, sampling, terms.max_tokens, terms.prompts_per_unit, terms.samples_per_prompt, folder, run, seed
    )


def _run_prompts(workload: Workload, run: RunTerms, units: int) -> list[list[list[int]]]:
    tasks = load_tasks(run, workload.folder)
    seeds = [sha256(b"intellect/calibrate/prompts", u32(workload.seed), u32(unit)) for unit in range(units)]
    return [[tasks.prompt_tokens(slot) for slot in prompt_slots(seed, run)] for seed in seeds]


def _long_prompts(workload: Workload, units: int) -> list[list[list[int]]]:
    prompts = Prompts(workload.folder, chat=workload.model.chat)
    environments = [make(name) for name in names()]
    longest = workload.model.max_positions - workload.max_tokens

    def prompt(number: int) -> list[int]:
        draw = sha256(b"intellect/calibrate/prompts", u32(workload.seed), u32(number))
        environment = environments[draw[8] % len(environments)]
        problem = environment.problem(int.from_bytes(draw[:8], "little"))
        phrase = _PHRASES[draw[9] % len(_PHRASES)]
        problem = msgspec.structs.replace(problem, question=phrase.format(problem.question))
        tokens = prompts.encode(problem)[:longest]
        if not tokens:
            raise ConfigError(f"{workload.folder}: the tokenizer makes an empty prompt")
        return tokens

    width = workload.prompts_per_unit
    return [[prompt(unit * width + p) for p in range(width)] for unit in range(units)]


def weights_hash(folder: Path) -> str:
    """Hex SHA-256 over the weight files of a checkpoint, by name.

    Raises:
        ConfigError: there are none, or one cannot be read.
    """
    total = hashlib.sha256()
    for path in weight_files(folder):
        try:
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from error
    return total.hexdigest()
