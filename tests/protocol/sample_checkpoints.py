"""Small real checkpoints for the tests of weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from intellect_protocol.checkpoint import (
    Manifest,
    ManifestLimits,
    Probe,
    SignedManifest,
    build_manifest,
    sign_manifest,
)
from intellect_protocol.keys import LocalSigner

RUN_ID = b"r" * 32
PUBLISHER = LocalSigner(b"\x07" * 32)
LIMITS = ManifestLimits(max_checkpoint_bytes=1 << 30)


def write_checkpoint(folder: Path, *, size_bytes: int = 300_000, seed: int = 0, files: int = 2) -> Path:
    """A folder with `files` safetensors files of about `size_bytes` together, and a config."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    for number in range(files):
        count = max(1, size_bytes // files // 4 // 2)
        save_file(
            {
                f"layer.{number}.weight": random.standard_normal(count, dtype=np.float32),
                f"layer.{number}.norm": random.standard_normal(2 * count, dtype=np.float32).astype(
                    np.float16
                ),
            },
            folder / f"model-{number}.safetensors",
        )
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "seed": seed}))
    return folder


def describe(folder: Path, *, version: int = 1, run_id: bytes = RUN_ID) -> tuple[Manifest, SignedManifest]:
    """The manifest of `folder` and its signature by `PUBLISHER`."""
    manifest = build_manifest(
        folder,
        run_id=run_id,
        version=version,
        parent_version=version - 1 if version else None,
        probe=Probe([1, 2, 3], [-0.5, -1.25, -0.125]),
        batches=[b"b" * 32],
        created_at_ms=1_700_000_000_000 + version,
        publisher=PUBLISHER.address,
    )
    return manifest, sign_manifest(manifest, PUBLISHER)
