"""Everything a run needs, opened: models, learner, journal, batch store, publisher, figures.

Opening checks that the pieces belong together: key and run, model and run, resume checkpoint and
published versions.
"""

from __future__ import annotations

import math
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from intellect_protocol import tensor_files
from intellect_protocol.checkpoint import is_checkpoint_file
from intellect_protocol.errors import ConfigError, PreflightError
from intellect_protocol.file_lock import FileLock, try_lock
from intellect_protocol.keys import Signer
from intellect_protocol.run import RunConfig
from intellect_protocol.wire import sha256

from . import resume
from .config import TrainerConfig
from .data import BatchSource
from .evaluation import Evaluator, open_evaluator
from .files import fsync_file
from .journal import Journal
from .layout import checkpoint_folder, published_versions
from .learner import Learner
from .master_weights import dither_master
from .metrics import MetricsLog
from .past_policies import PastPolicies
from .policy import load_policy
from .publish import Publisher
from .resume import TrainerState

_SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16"}


@dataclass(frozen=True)
class RunOptions:
    """What `intellect-trainer run` was asked to do.

    Attributes:
        batches: the batch store.
        checkpoint: folder of version 0; only needed until the data directory has it.
        steps: stop at this version.
        minutes: stop this long after the first step, restarts not counted.
    """

    run: RunConfig
    config: TrainerConfig
    data_dir: Path
    batches: Path
    signer: Signer
    checkpoint: Path | None = None
    steps: int | None = None
    minutes: float | None = None


@dataclass
class Session:
    """The open pieces of one run; `copy` holds the weights that are published and evaluated."""

    options: RunOptions
    state: TrainerState
    learner: Learner
    copy: nn.Module
    journal: Journal
    source: BatchSource
    publisher: Publisher
    metrics: MetricsLog
    evaluator: Evaluator | None
    past: PastPolicies
    last_published_at: float = -math.inf
    resources: ExitStack = field(default_factory=ExitStack)

    @property
    def resume_folder(self) -> Path:
        """Where resume checkpoints are."""
        return self.options.data_dir / "resume"

    @property
    def min_publish_interval_s(self) -> float:
        """Seconds between two publications, as the run wants it."""
        return self.options.run.revision.min_publish_interval_s

    def copy_weights(self) -> None:
        """Round the master weights into `copy`."""
        weights = {name: p.detach() for name, p in self.learner.policy.named_parameters()}
        resume.load_parameters(self.copy, weights, "policy")

    def close(self) -> None:
        """Close files and let another trainer have the data directory."""
        self.resources.close()


def open_session(options: RunOptions) -> Session:
    """Open a new run, or an earlier one at its newest resume checkpoint.

    Raises:
        ConfigError: checkpoint, run configuration and data directory do not belong together.
        WalletError: the key is not the publisher's.
        PreflightError: the data directory cannot be used or another trainer uses it.
    """
    torch.set_num_threads(options.config.threads)
    with ExitStack() as stack:
        stack.enter_context(_locked(options.data_dir))
        session = _open(options, stack)
        # From here on the session closes what was opened.
        session.resources = stack.pop_all()
    return session


def _locked(data_dir: Path) -> FileLock:
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = try_lock(data_dir / "lock")
    except OSError as error:
        raise PreflightError(f"{data_dir}: {error.strerror or error}") from error
    if lock is None:
        raise PreflightError(f"{data_dir} is in use by another trainer")
    return lock


def _open(options: RunOptions, stack: ExitStack) -> Session:
    data_dir, run, config = options.data_dir, options.run, options.config
    checkpoints = data_dir / "checkpoints"
    first = _version_zero(checkpoints, options.checkpoint)
    _check_model(first, run)
    policy = load_policy(first, dtype="float32", attention=config.attention)
    reference = load_policy(first, dtype=run.terms.model.dtype, attention=config.attention)
    copy = load_policy(first, dtype=run.terms.model.dtype, attention=config.attention)
    copy.requires_grad_(False)
    learner = Learner(policy, reference, config, temperature=run.terms.sampling.temperature)
    run_id = run.run_id.hex()
    state = resume.load_newest(data_dir / "resume", learner, run_id)
    if state is None:
        state = TrainerState(run_id)
        if config.dither_master:
            dither_master(policy, next(copy.parameters()).dtype, seed=config.seed)
    newest = max(published_versions(checkpoints), default=0)
    if newest > state.version:
        raise ConfigError(
            f"{data_dir}: version {newest} is published, but the resume checkpoint is of version "
            f"{state.version}: restore its `resume` folder, or start a new run"
        )
    journal = Journal(data_dir / "journal.sqlite")
    stack.callback(journal.close)
    evaluator = open_evaluator(run, first, count=config.eval_tasks) if config.eval_tasks else None
    publisher = Publisher(checkpoints, run, options.signer, journal, copy, keep=config.keep_checkpoints)
    metrics = MetricsLog(data_dir, state.version)
    stack.callback(metrics.close)
    past = PastPolicies(checkpoints, run, config)
    session = Session(
        options=options,
        state=state,
        learner=learner,
        copy=copy,
        journal=journal,
        source=BatchSource(options.batches, journal, run, has_weights=past.has_weights),
        past=past,
        publisher=publisher,
        metrics=metrics,
        evaluator=evaluator,
    )
    session.copy_weights()
    return session


def _version_zero(checkpoints: Path, source: Path | None) -> Path:
    folder = checkpoint_folder(checkpoints, 0)
    if folder.is_dir():
        return folder
    if source is None:
        raise ConfigError(f"{folder} does not exist: give the first policy's folder with --checkpoint")
    try:
        files = [path for path in source.iterdir() if path.is_file() and is_checkpoint_file(path.name)]
        partial = checkpoints / f".{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for path in files:
            shutil.copyfile(path, partial / path.name)
            fsync_file(partial / path.name)
        partial.rename(folder)
    except OSError as error:
        raise ConfigError(f"{source}: cannot be taken as version 0: {error.strerror or error}") from error
    return folder


def _check_model(folder: Path, run: RunConfig) -> None:
    """Check that version 0 is the model the run's terms describe."""
    import json

    terms = run.terms.model
    try:
        config = json.loads((folder / "config.json").read_bytes())
        tokenizer_hash = sha256((folder / "tokenizer.json").read_bytes()).hex()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: not a model folder: {error}") from error
    wanted = {
        "architecture": (terms.architecture, (config.get("architectures") or [""])[0]),
        "vocab_size": (terms.vocab_size, config.get("vocab_size")),
        "hidden_size": (terms.hidden_size, config.get("hidden_size")),
        "tokenizer_hash": (terms.tokenizer_hash, tokenizer_hash),
    }
    for name, (want, found) in wanted.items():
        if want != found:
            raise ConfigError(f"{folder}: {name} is {found}, the run says {want}")
    for path in folder.glob("*.safetensors"):
        if set(tensor_files.dtype_counts(path)) != {_SAFETENSORS_DTYPES[terms.dtype]}:
            raise ConfigError(f"{path}: not all tensors are {terms.dtype}, as the run says")
