"""Resume checkpoints: everything a trainer needs to go on after kill -9 as if nothing had happened.

    resume/v{version:08d}/model.safetensors   fp32 master weights
    resume/v{version:08d}/optimizer.pt        optimizer state (own file, read with weights_only)
    resume/v{version:08d}/state.json          counters

A checkpoint is written to a temporary folder, synced, and renamed into place. It precedes the publication
of its version, so no version that others can see is ever unknown here. There is no generator state to keep:
every random choice is drawn from (seed, version). The data cursor is the journal.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from intellect_protocol.checkpoint_folder import fsync_folder
from intellect_protocol.errors import ConfigError, PreflightError

from .files import fsync_file
from .learner import Learner

_FOLDER = re.compile(r"v(\d{8,})")
_KEEP = 2


class TrainerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counters of a run; times add up over restarts and leave out the time between them."""

    run_id: str
    version: int = 0
    updates: int = 0
    seconds_since_first_step: float = 0.0
    waiting_s: float = 0.0  # for batches, since the first step
    publish_wait_s: float = 0.0  # for the publication of the version before


class ResumePoint(msgspec.Struct, frozen=True):
    """A copy of everything that training changes, taken between two steps."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    state: TrainerState


def capture(learner: Learner, state: TrainerState) -> ResumePoint:
    """Copy weights and optimizer state, so that the next step can change them."""
    weights = {name: p.detach().clone() for name, p in learner.policy.named_parameters()}
    return ResumePoint(weights, _cloned(learner.optimizer.state_dict()), state)


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cloned(item) for item in value]
    return value


def save(folder: Path, point: ResumePoint) -> None:
    """Write a resume checkpoint under `folder`, durably, and remove all but the newest two.

    Raises:
        PreflightError: the disk refuses.
    """
    final = folder / f"v{point.state.version:08d}"
    partial = folder / f".{final.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(point.weights, partial / "model.safetensors")
        torch.save(point.optimizer, partial / "optimizer.pt")
        (partial / "state.json").write_bytes(msgspec.json.encode(point.state))
        for path in partial.iterdir():
            fsync_file(path)
        fsync_folder(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        fsync_folder(folder)
        for version in _versions(folder)[:-_KEEP]:
            shutil.rmtree(folder / f"v{version:08d}")
    except OSError as error:
        raise PreflightError(f"{folder}: {error.strerror or error}") from error


def load_newest(folder: Path, learner: Learner, run_id: str) -> TrainerState | None:
    """Put the newest resume checkpoint into `learner`; None if there is none.

    Raises:
        ConfigError: it belongs to another run or model, or is damaged.
    """
    versions = _versions(folder)
    if not versions:
        return None
    newest = folder / f"v{versions[-1]:08d}"
    try:
        state = msgspec.json.decode((newest / "state.json").read_bytes(), type=TrainerState)
        weights = load_file(newest / "model.safetensors")
        optimizer = torch.load(newest / "optimizer.pt", weights_only=True)
    except Exception as error:
        raise ConfigError(f"{newest}: damaged resume checkpoint: {error}") from error
    if state.run_id != run_id:
        raise ConfigError(f"{newest} belongs to another run; use another --data-dir")
    load_parameters(learner.policy, weights, str(newest))
    learner.optimizer.load_state_dict(optimizer)
    learner.updates = state.updates
    return state


def load_parameters(model: nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Copy tensors into parameters of the same names and shapes, whatever the dtypes.

    Raises:
        ConfigError: names or shapes differ.
    """
    parameters = dict(model.named_parameters())
    if parameters.keys() != weights.keys() or any(
        parameters[name].shape != tensor.shape for name, tensor in weights.items()
    ):
        raise ConfigError(f"{source}: the tensors are not those of the model")
    with torch.no_grad():
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)


def _versions(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _FOLDER.fullmatch(path.name)))
