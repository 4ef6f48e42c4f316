"""The policies under attack: a tiny one in float32 with a past of its own, and any chat model in bf16."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from arena import environment_arena
from policy_history import at_version, train_policy

from intellect_coordinator.calibration.altered_weights import Alteration, Kind
from intellect_protocol.run import EnvironmentTerms, SamplingTerms
from intellect_trainer.models.tiny import make_tiny

from .bench import Bench, Mount

STEPS = 8


def tiny_bench(work: Path) -> tuple[Bench, dict[str, Mount]]:
    """The sorting policy after 8 real steps of GRPO; older policies are its own past."""
    folder = work / "tiny-v0"
    if not folder.exists():
        make_tiny("sort_digits", folder, max_tokens=16, seed=0)
    sampling = SamplingTerms(1.0, 12, [1], 16, 8)
    first = environment_arena(folder, "float32", sampling, EnvironmentTerms("sort_digits"))
    past = work / "tiny-history"
    folders = [folder, *(past / f"v{step}" for step in range(1, STEPS + 1))]
    if not folders[-1].exists():
        past.mkdir(exist_ok=True)
        folders = train_policy(first, past, STEPS)
    bench = Bench("tiny", at_version(first, folders[-1]), work)
    older: dict[str, Callable[[], Path]] = {
        f"{steps} step{'s'[: steps > 1]} older": partial(folders.__getitem__, STEPS - steps)
        for steps in (1, 2, 8)
    }
    return bench, bench.attacks(older)


def model_bench(folder: Path, work: Path) -> tuple[Bench, dict[str, Mount]]:
    """A chat model in bf16 with tasks that it answers at length."""
    environments = [
        EnvironmentTerms(name)
        for name in ("arithmetic", "reasoning_gym:leg_counting", "reasoning_gym:basic_arithmetic")
    ]
    sampling = SamplingTerms(1.0, 64, _stop_ids(folder), 2, 8)
    bench = Bench("model", environment_arena(folder, "bfloat16", sampling, *environments, chat=True), work)

    def before(steps: int, rate: float) -> Callable[[], Path]:
        return lambda: bench.altered(Alteration(Kind.OLDER, steps=steps, learning_rate=rate))

    older = {
        f"{steps} step{'s'[: steps > 1]} older, lr {rate:g}": before(steps, rate)
        for rate in (1e-6, 1e-5)
        for steps in (1, 2, 8)
    }
    attacks = bench.attacks(older)
    del attacks["slack steering"]  # it needs rewards to steer to, see `sums_bench`
    return bench, attacks


SELECTION = (
    "honest",
    "tokens of another sample, own proofs",
    "answer pasted after the fact",
    "stop token within reach of the draw",
    "best of 4 samples",
    "slack steering",
)


def sums_bench(folder: Path, work: Path) -> tuple[Bench, dict[str, Mount]]:
    """The same model on one-digit sums in 12 tokens, where there are rewards to gain: attacks that choose."""
    sampling = SamplingTerms(1.0, 12, _stop_ids(folder), 4, 8)
    arena = environment_arena(folder, "bfloat16", sampling, EnvironmentTerms("arithmetic"), chat=True)
    bench = Bench("sums", arena, work)
    attacks = bench.attacks({})
    return bench, {name: attacks[name] for name in SELECTION}


def _stop_ids(folder: Path) -> list[int]:
    return [json.loads((folder / "config.json").read_text())["eos_token_id"]]
