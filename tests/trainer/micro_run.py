"""A run small enough for tests: a micro model, batch files made from seeds, and who feeds them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import numpy as np

from intellect_protocol.checkpoint import Manifest, SignedManifest, checkpoint_hash
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
from intellect_trainer.config import TrainerConfig

COORDINATOR = LocalSigner(b"\x31" * 32)
PUBLISHER = LocalSigner(b"\x32" * 32)
NODE = bytes(range(20))
PROMPTS, SAMPLES, MAX_TOKENS = 3, 4, 6

CONFIG = TrainerConfig(
    recipe="tiny",
    groups_per_step=PROMPTS,
    updates_per_step=2,
    learning_rate=1e-3,
    warmup_updates=3,
    dtype="float32",
    micro_batch_tokens=64,
    eval_every=0,
    eval_tasks=0,
    keep_checkpoints=2,
    poll_interval_s=0.01,
)


def make_model(folder: Path, *, dtype: str = "float32") -> None:
    """Version 0: the tiny architecture with random weights."""
    from intellect_trainer.models.folder import write_model_folder
    from intellect_trainer.models.tiny import character_tokenizer, new_model

    tokenizer = character_tokenizer()
    model = new_model(len(tokenizer), eos_id=1, pad_id=0, seed=5)
    write_model_folder(model, tokenizer, folder, dtype=dtype, stop_ids=[1])


def make_run(folder: Path, *, dtype: str = "float32", min_publish_interval_s: float = 0.0) -> RunConfig:
    """A signed configuration for the model in `folder`."""
    limit = Limit(suspect=1.0, fraud=2.0)
    plain = ("far_distance", "informative_top_probability", "min_informative")
    limits = {name: limit for name in Thresholds.__struct_fields__ if name not in plain}
    tokenizer_hash = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    return RunConfig(
        terms=RunTerms(
            name="micro",
            protocol=1,
            model=ModelTerms("Qwen2ForCausalLM", 99, 64, 256, dtype, tokenizer_hash),
            environments=[EnvironmentTerms("sort_digits")],
            sampling=SamplingTerms(1.0, MAX_TOKENS, [1], PROMPTS, SAMPLES),
            ledger=LedgerTerms(31337, {"NodeRegistry": COORDINATOR.address}),
            keys=KeyTerms(COORDINATOR.address, PUBLISHER.address),
        ),
        revision=RevisionTerms(
            0,
            0,
            [],
            ["http://127.0.0.1:1"],
            Thresholds(**limits),
            window=WindowTerms(async_level=2),
            min_publish_interval_s=min_publish_interval_s,
        ),
    ).signed(COORDINATOR)


def make_batch(run: RunConfig, version: int, checkpoint: bytes, *, index: int = 0, rewards=None) -> Batch:
    """A unit whose content follows from version and index; every group's rewards differ by default."""
    rng = np.random.default_rng([version, index])
    rows = []
    for prompt in range(PROMPTS):
        tokens = rng.integers(3, 99, size=rng.integers(3, 9)).tolist()
        for sample in range(SAMPLES):
            length = int(rng.integers(1, MAX_TOKENS + 1))
            reward = float((sample + prompt) % 2) if rewards is None else rewards[prompt][sample]
            rows.append(
                BatchRow(
                    prompt=prompt,
                    sample=sample,
                    environment="sort_digits",
                    task_index=prompt,
                    target_length=0,
                    prompt_tokens=tokens,
                    completion_tokens=rng.integers(3, 99, size=length).tolist(),
                    logprobs=-rng.uniform(4.0, 5.0, size=length).astype(np.float32),
                    finish_reason="length",
                    reward=reward,
                )
            )
    meta = BatchMeta(1, run.run_id, version, checkpoint, NODE, index, b"\x07" * 32, PUBLISHER.address)
    return Batch(meta, rows)


def put_batch(batches: Path, batch: Batch) -> Path:
    """Write a batch file as the coordinator does: whole or not at all."""
    folder = batches / f"v{batch.meta.version:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{batch.meta.node.hex()}-{batch.meta.index:06d}.parquet"
    partial = folder / f".{path.name}.partial"
    partial.write_bytes(write_batch(batch))
    partial.rename(path)
    return path


def manifests(checkpoints: Path) -> dict[int, SignedManifest]:
    """Signed manifests on disk, by version."""
    return {
        int(path.stem[1:]): decode(path.read_bytes(), SignedManifest)
        for path in checkpoints.glob("v*.manifest")
    }


def feed(checkpoints: Path, batches: Path, run: RunConfig) -> None:
    """One unit for every published version that has none: what nodes and validators do, in one call."""
    for version, signed in manifests(checkpoints).items():
        if not (batches / f"v{version:08d}").exists():
            put_batch(batches, make_batch(run, version, checkpoint_hash(signed.manifest)))


def manifest_of(signed: SignedManifest) -> Manifest:
    """The manifest inside."""
    return msgspec.msgpack.decode(signed.manifest, type=Manifest)
