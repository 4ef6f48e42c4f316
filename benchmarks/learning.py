"""Does the recipe learn, and what does a step cost? Trainer and engine alone, without a network.

    python benchmarks/learning.py --recipe tiny --environment sort_digits --steps 60 --seed 0

The trainer runs as the real program in a process of its own. Here stands in for the swarm: one engine that
follows the newest checkpoint, generates the units of one node and writes them as accepted batches. Nothing
is verified, so the engine's own log-probs are the behaviour log-probs. Prints one JSON line: held-out
greedy pass@1 before and after, rewards, idle share, seconds and CPU seconds of the trainer per step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from intellect_protocol.assignment import prompt_slots, stream_seed, unit_seed
from intellect_protocol.checkpoint import SignedManifest, checkpoint_hash
from intellect_protocol.engines.base import Completion, GenerateRequest, Sampling
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.environments import registry
from intellect_protocol.environments.prompts import Prompts
from intellect_protocol.keys import LocalSigner
from intellect_protocol.rollouts import Batch, BatchMeta, BatchRow, write_batch
from intellect_protocol.run import (
    EnvironmentTerms,
    KeyTerms,
    LedgerTerms,
    Limit,
    ModelTerms,
    RevisionTerms,
    RunConfig,
    RunTerms,
    SamplingTerms,
    Thresholds,
    WindowTerms,
)
from intellect_protocol.wire import decode

NODE = bytes(20)
BLOCK = bytes(32)


def run_config(folder: Path, args: argparse.Namespace, key: LocalSigner) -> RunConfig:
    """A run for the model in `folder`."""
    model = json.loads((folder / "config.json").read_text())
    chat = args.recipe == "smollm2"
    limits = {
        name: Limit(1.0, 2.0)
        for name in Thresholds.__struct_fields__
        if name not in ("far_distance", "informative_top_probability", "min_informative")
    }
    return RunConfig(
        terms=RunTerms(
            name="learning",
            protocol=1,
            model=ModelTerms(
                model["architectures"][0],
                model["vocab_size"],
                model["hidden_size"],
                model["max_position_embeddings"],
                model["dtype"],
                hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
                chat,
            ),
            environments=[EnvironmentTerms(args.environment)],
            sampling=SamplingTerms(
                1.0,
                12,
                Prompts(folder, chat=chat).stop_ids,
                args.prompts_per_unit,
                args.samples,
            ),
            ledger=LedgerTerms(31337, {"NodeRegistry": key.address}),
            keys=KeyTerms(key.address, key.address),
        ),
        revision=RevisionTerms(
            0,
            0,
            [],
            ["http://127.0.0.1:1"],
            Thresholds(**limits),
            window=WindowTerms(async_level=args.async_level),
            min_publish_interval_s=args.publish_interval,
        ),
    ).signed(key)


class Swarm:
    """The newest policy in an engine, and the units of one node."""

    def __init__(self, run: RunConfig, root: Path, environment: str) -> None:
        self._run = run
        self._checkpoints = root / "trainer" / "checkpoints"
        self._batches = root / "batches"
        self._environment = registry.make(environment)
        self._engine = TorchEngine(device="cpu", dtype=run.terms.model.dtype, max_rows=256)
        self._version = -1
        self.units = 0
        self._checkpoint = b""
        self._prompts: Prompts | None = None

    def follow(self) -> bool:
        """Load the newest published version; False if there is none."""
        versions = sorted(int(path.stem[1:]) for path in self._checkpoints.glob("v*.manifest"))
        if versions and versions[-1] > self._version:
            version = versions[-1]
            signed = decode((self._checkpoints / f"v{version:08d}.manifest").read_bytes(), SignedManifest)
            folder = self._checkpoints / f"v{version:08d}"
            if self._version < 0:
                self._engine.load(folder)
                self._prompts = Prompts(folder, chat=self._run.terms.model.chat)
            else:
                self._engine.update(folder)
            self._version, self.units, self._checkpoint = version, 0, checkpoint_hash(signed.manifest)
        return self._version >= 0

    def make_unit(self) -> None:
        """Generate one unit and put it into the batch store."""
        terms, prompts = self._run.terms, self._prompts
        assert prompts is not None
        seed = unit_seed(self._run.run_id, self._version, self._checkpoint, BLOCK, NODE, self.units)
        slots = prompt_slots(seed, terms)
        problems = [self._environment.problem(slot.task_index) for slot in slots]
        encoded = [prompts.encode(problem) for problem in problems]
        samples = range(terms.sampling.samples_per_prompt)
        found: dict[tuple[int, int], Completion] = {}
        self._engine.generate(
            [
                GenerateRequest(tokens, [stream_seed(seed, p, s) for s in samples], terms.sampling.max_tokens)
                for p, tokens in enumerate(encoded)
            ],
            Sampling(stop_ids=terms.sampling.stop_ids),
            lambda p, s, completion: found.__setitem__((p, s), completion),
            lambda tokens: None,
        )
        rows = []
        for p, (slot, problem) in enumerate(zip(slots, problems, strict=True)):
            for s in samples:
                completion = found[p, s]
                finished = completion.finish_reason == "stop"
                rows.append(
                    BatchRow(
                        prompt=p,
                        sample=s,
                        environment=slot.environment,
                        task_index=slot.task_index,
                        target_length=0,
                        prompt_tokens=encoded[p],
                        completion_tokens=completion.tokens,
                        logprobs=np.array(completion.logprobs, dtype=np.float32),
                        finish_reason=completion.finish_reason,
                        reward=self._environment.reward(problem, prompts.decode(completion.tokens), finished),
                    )
                )
        unit = (self._run.run_id, self._version, self._checkpoint, NODE, self.units)
        meta = BatchMeta(1, *unit, file_hash=BLOCK, validator=terms.keys.publisher)
        path = self._batches / f"v{self._version:08d}" / f"{NODE.hex()}-{self.units:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(write_batch(Batch(meta, rows)))
        partial.rename(path)
        self.units += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--model", help="as for init-model; default: the recipe's")
    parser.add_argument("--environment", default="sort_digits")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts-per-unit", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--async-level", type=int, default=2)
    parser.add_argument("--publish-interval", type=float, default=0.0)
    parser.add_argument("--units-per-version", type=int, default=8, help="as the run's cap per owner")
    parser.add_argument("--keep", type=Path, help="keep the run's files in this folder")
    parser.add_argument("trainer", nargs="*", help="flags for intellect-trainer run, after --")
    args = parser.parse_args()
    root = args.keep or Path(tempfile.mkdtemp(prefix="learning-"))
    root.mkdir(parents=True, exist_ok=True)
    policy = root / "policy-zero"
    program = [sys.executable, "-m", "intellect_trainer"]
    if not policy.exists():
        command = ["init-model", "--model", args.model or args.recipe, "--environment", args.environment]
        subprocess.run([*program, *command, "--seed", str(args.seed), "--out", str(policy)], check=True)
    key = LocalSigner(b"\x41" * 32)
    run = run_config(policy, args, key)
    (root / "run.toml").write_text(run.to_toml())
    (root / "publisher.key").write_bytes(key.secret())
    command = ["run", "--run", root / "run.toml", "--data-dir", root / "trainer"]
    command += [
        "--batches",
        root / "batches",
        "--key",
        root / "publisher.key",
        "--checkpoint",
        policy,
        "--recipe",
        args.recipe,
    ]
    command += ["--steps", args.steps, "--seed", args.seed, *args.trainer]
    trainer = subprocess.Popen([*program, *map(str, command)])
    swarm = Swarm(run, root, args.environment)
    try:
        while trainer.poll() is None:
            if swarm.follow() and swarm.units < args.units_per_version:
                swarm.make_unit()
            else:
                time.sleep(0.02)
    finally:
        if trainer.poll() is None:
            trainer.terminate()
        trainer.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = [json.loads(line) for line in (root / "trainer" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    heldout = [row for row in rows if row["kind"] == "heldout"]
    for row in heldout:
        print(f"version {row['version']}: held-out {row['score']:.3f}", file=sys.stderr)
    result = {
        "environment": args.environment,
        "seed": args.seed,
        "steps": len(steps),
        "heldout_before": heldout[0]["score"],
        "heldout_after": heldout[-1]["score"],
        "reward_first": float(np.mean([row["reward"] for row in steps[:5]])),
        "reward_last": float(np.mean([row["reward"] for row in steps[-5:]])),
        "seconds": steps[-1]["seconds_since_first_step"],
        "idle_share": steps[-1]["idle_share"],
        "train_s_per_step": float(np.median([row["step_s"] for row in steps])),
        "cpu_s_of_trainer_and_init": used.ru_utime + used.ru_stime,
        "max_rss_mb": used.ru_maxrss / 1024,
        "trainer_flags": args.trainer,
    }
    print(json.dumps(result))
    if args.keep is None:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
