"""Names in the trainer's `checkpoints` folder, shared by the trainer, which writes, and the seeder.

v{version:08d}/             safetensors in the run's dtype, configuration, tokenizer
v{version:08d}.manifest     signed manifest, written last: now the version exists
"""

from __future__ import annotations

import re
from pathlib import Path

MAX_CHECKPOINT_BYTES = 1 << 42
_MANIFEST = re.compile(r"v(\d{8,})\.manifest")


def checkpoint_folder(folder: Path, version: int) -> Path:
    """Folder of a version's files."""
    return folder / f"v{version:08d}"


def manifest_path(folder: Path, version: int) -> Path:
    """File of a version's signed manifest."""
    return folder / f"v{version:08d}.manifest"


def is_kept(version: int, newest: int, keep: int) -> bool:
    """Whether the folder of a version stays once `newest` is published: version 0 and the `keep` newest."""
    return version == 0 or newest - keep < version <= newest


def published_versions(folder: Path) -> list[int]:
    """Versions whose manifest is on disk, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _MANIFEST.fullmatch(path.name)))
