"""Publication: from master weights to a signed checkpoint that others may fetch.

A manifest that is on disk is final: the seeder may have recorded its hash on the ledger, where the first
write wins. So it is never written again, and a trainer that comes back after a crash goes on from the
resume checkpoint behind it, which is always older than the manifest.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from intellect_protocol.checkpoint import (
    ManifestLimits,
    Probe,
    SignedManifest,
    build_manifest,
    checkpoint_hash,
    is_checkpoint_file,
    sign_manifest,
    verify_manifest,
)
from intellect_protocol.checkpoint_folder import fsync_folder
from intellect_protocol.errors import PreflightError, WalletError
from intellect_protocol.keys import Signer
from intellect_protocol.run import RunConfig
from intellect_protocol.wire import encode

from .files import fsync_file, write_atomically
from .journal import Journal
from .layout import MAX_CHECKPOINT_BYTES, checkpoint_folder, is_kept, manifest_path, published_versions

_PROBE_TOKENS = 32
_PROBE_STRIDE = 7919


class Publisher:
    """Writes checkpoints of one run.

    Args:
        folder: `checkpoints` of the trainer's data directory; version 0's folder must be in it.
        signer: the run's publisher key.
        model: the policy in the run's dtype; `publish` writes what its parameters are.
        keep: how many checkpoint folders stay beside version 0's.

    Raises:
        WalletError: `signer` is not the run's publisher.
    """

    def __init__(
        self,
        folder: Path,
        run: RunConfig,
        signer: Signer,
        journal: Journal,
        model: nn.Module,
        *,
        keep: int,
    ) -> None:
        if signer.address != run.terms.keys.publisher:
            raise WalletError(
                f"the key is {signer.address}, the run's publisher is {run.terms.keys.publisher}"
            )
        self._folder = folder
        self._run = run
        self._signer = signer
        self._journal = journal
        self._model = model
        self._probe_prompt = probe_prompt(run.terms.model.vocab_size)
        self._keep = keep

    def is_published(self, version: int) -> bool:
        """Whether the version's manifest is on disk."""
        return manifest_path(self._folder, version).exists()

    def versions(self) -> list[int]:
        """Versions whose manifest is on disk, ascending."""
        return published_versions(self._folder)

    def publish(self, version: int, batches: Sequence[bytes]) -> None:
        """Write the model's parameters as `version`; does nothing if it is published already.

        Args:
            batches: SHA-256 of the batch files this version was trained on.

        Raises:
            PreflightError: the disk refuses.
        """
        if self.is_published(version):
            return
        try:
            if version:
                self._write_folder(version)
            signed = self._sign(version, batches)
            self._journal.record_checkpoint(version, checkpoint_hash(signed.manifest))
            write_atomically(manifest_path(self._folder, version), encode(signed))
            self._prune(version)
        except OSError as error:
            raise PreflightError(f"{self._folder}: {error.strerror or error}") from error

    def _write_folder(self, version: int) -> None:
        final = checkpoint_folder(self._folder, version)
        partial = self._folder / f".{final.name}.partial"
        for left_over in (partial, final):
            if left_over.exists():
                shutil.rmtree(left_over)
        partial.mkdir()
        for path in checkpoint_folder(self._folder, 0).iterdir():
            if is_checkpoint_file(path.name) and not _holds_weights(path.name):
                shutil.copyfile(path, partial / path.name)
        weights = {name: p.detach() for name, p in self._model.named_parameters()}
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        for path in partial.iterdir():
            fsync_file(path)
        fsync_folder(partial)
        partial.rename(final)
        fsync_folder(self._folder)

    def _sign(self, version: int, batches: Sequence[bytes]) -> SignedManifest:
        manifest = build_manifest(
            checkpoint_folder(self._folder, version),
            run_id=self._run.run_id,
            version=version,
            parent_version=version - 1 if version else None,
            probe=Probe(self._probe_prompt, probe_logprobs(self._model, self._probe_prompt)),
            batches=sorted(set(batches)),
            created_at_ms=time.time_ns() // 1_000_000,
            publisher=self._signer.address,
        )
        signed = sign_manifest(manifest, self._signer)
        limits = ManifestLimits(max_checkpoint_bytes=MAX_CHECKPOINT_BYTES)
        verify_manifest(signed, self._run.run_id, self._signer.address, limits)
        return signed

    def _prune(self, version: int) -> None:
        for old in published_versions(self._folder):
            if not is_kept(old, version, self._keep):
                shutil.rmtree(checkpoint_folder(self._folder, old), ignore_errors=True)


def _holds_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json"))


def probe_prompt(vocab_size: int) -> list[int]:
    """Token ids spread over the vocabulary: text that no policy is sure of, so that every weight counts."""
    return [(at * _PROBE_STRIDE + 1) % vocab_size for at in range(_PROBE_TOKENS)]


@torch.no_grad()
def probe_logprobs(model: nn.Module, prompt: Sequence[int]) -> list[float]:
    """[len(prompt) - 1] log-softmax(logits) of each token of `prompt` after the first, at T = 1."""
    ids = torch.tensor([list(prompt)])
    log_p = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), dim=-1)
    return [min(0.0, float(log_p[at, token])) for at, token in enumerate(prompt[1:])]
