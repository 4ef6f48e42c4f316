"""A unit of work made by the real engine with a small random model, and a validator's view of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from example_run import COORDINATOR, example_run
from safetensors.torch import save_file

from intellect_protocol.assignment import PromptSlot, stream_seed
from intellect_protocol.engines.base import Completion, GenerateRequest, RowScore, Sampling, ScoreRow
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.keys import LocalSigner, work_digest
from intellect_protocol.rollouts import EngineNote, Rollout, RolloutUnit, UnitMeta
from intellect_protocol.run import RunConfig
from intellect_protocol.validation.context import UnitContext
from intellect_protocol.validation.limits import default_thresholds
from intellect_protocol.wire import sha256

NODE = LocalSigner(b"\x33" * 32)
CHECKPOINT_HASH, BLOCK_HASH = b"\xc0" * 32, b"\xb0" * 32
VERSION, INDEX = 3, 2
HIDDEN, LAYERS, HEADS, VOCAB, POSITIONS = 64, 2, 4, 100, 256


def write_tiny_model(folder: Path, seed: int) -> Path:
    """A Qwen2 checkpoint with random weights, scaled so that its predictions are neither flat nor certain."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int, scale: float = 0.15) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    tensors = {"model.embed_tokens.weight": weight(VOCAB, HIDDEN, scale=0.25)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN) + weight(HIDDEN)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{name}.self_attn.{projection}.weight"] = weight(HIDDEN, HIDDEN)
            if projection != "o_proj":
                tensors[f"{name}.self_attn.{projection}.bias"] = weight(HIDDEN)
        tensors[f"{name}.mlp.gate_proj.weight"] = weight(128, HIDDEN)
        tensors[f"{name}.mlp.up_proj.weight"] = weight(128, HIDDEN)
        tensors[f"{name}.mlp.down_proj.weight"] = weight(HIDDEN, 128)
        tensors[f"{name}.input_layernorm.weight"] = torch.ones(HIDDEN)
        tensors[f"{name}.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    save_file(tensors, folder / "model.safetensors")
    return folder


def tiny_run(*, max_tokens: int = 20) -> RunConfig:
    """The example run with the default fp32 thresholds."""
    run = example_run()
    sampling = msgspec.structs.replace(run.terms.sampling, max_tokens=max_tokens)
    terms = msgspec.structs.replace(run.terms, sampling=sampling)
    revision = msgspec.structs.replace(run.revision, thresholds=default_thresholds("float32"))
    return RunConfig(terms, revision).signed(COORDINATOR)


class CountingTasks:
    """Prompts that follow from the slot; the reward is the share of even token ids."""

    def prompt_tokens(self, slot: PromptSlot) -> list[int]:
        return [2 + (slot.task_index >> (7 * place)) % 90 for place in range(3 + slot.target_length % 4)]

    def reward(self, slot: PromptSlot, completion: Sequence[int]) -> float:
        return sum(token % 2 == 0 for token in completion) / len(completion)


class LocalScorer:
    """The engine in this process."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine

    async def score(self, rows: Sequence[ScoreRow], sampling: Sampling, secret: bytes) -> list[RowScore]:
        scores: dict[int, RowScore] = {}
        self.engine.score(rows, sampling, secret, scores.__setitem__, lambda tokens: None)
        return [scores[number] for number in range(len(rows))]


def load(folder: Path) -> TorchEngine:
    engine = TorchEngine(device="cpu", dtype="float32")
    engine.load(folder)
    return engine


def context_of(data: bytes, run: RunConfig, **changes: object) -> UnitContext:
    """A validator's context for a file that the example node signed."""
    size, file_hash = len(data), sha256(data)
    digest = work_digest(run.run_id, VERSION, CHECKPOINT_HASH, INDEX, file_hash, size)
    fields: dict[str, object] = {
        "run": run,
        "version": VERSION,
        "checkpoint_hash": CHECKPOINT_HASH,
        "block_hash": BLOCK_HASH,
        "node": NODE.address_bytes,
        "index": INDEX,
        "file_hash": file_hash,
        "size_bytes": size,
        "work_signature": NODE.sign_digest(digest),
        "tasks": CountingTasks(),
        **changes,
    }
    return UnitContext(**fields)  # type: ignore[arg-type]


def generate_unit(engine: TorchEngine, run: RunConfig) -> RolloutUnit:
    """What an honest node makes of the unit."""
    context = context_of(b"", run)
    samples = run.terms.sampling.samples_per_prompt
    requests = [
        GenerateRequest(
            prompt=context.tasks.prompt_tokens(slot),
            seeds=[stream_seed(context.seed, prompt, sample) for sample in range(samples)],
            max_tokens=run.terms.sampling.max_tokens,
        )
        for prompt, slot in enumerate(context.slots)
    ]
    completions: dict[tuple[int, int], Completion] = {}
    engine.generate(
        requests,
        context.sampling,
        lambda prompt, sample, completion: completions.__setitem__((prompt, sample), completion),
        lambda tokens: None,
    )
    rows = [
        Rollout(
            prompt=prompt,
            sample=sample,
            environment=slot.environment,
            task_index=slot.task_index,
            target_length=slot.target_length,
            prompt_tokens=requests[prompt].prompt,
            completion_tokens=(completion := completions[prompt, sample]).tokens,
            logprobs=np.array(completion.logprobs, dtype=np.float32),
            finish_reason=completion.finish_reason,
            reward=context.tasks.reward(slot, completion.tokens),
            proofs=completion.proofs,
        )
        for prompt, slot in enumerate(context.slots)
        for sample in range(samples)
    ]
    info = engine.info()
    note = EngineNote(info.engine, info.version, info.dtype, info.attention, info.device)
    meta = UnitMeta(1, run.run_id, VERSION, CHECKPOINT_HASH, NODE.address_bytes, INDEX, note)
    return RolloutUnit(meta, rows)


def with_row(unit: RolloutUnit, number: int, **changes: object) -> RolloutUnit:
    """The unit with one row changed."""
    rows = list(unit.rows)
    rows[number] = msgspec.structs.replace(rows[number], **changes)
    return RolloutUnit(unit.meta, rows)
