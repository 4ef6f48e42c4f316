"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

from intellect_protocol.checkpoint_folder import fsync_folder


def fsync_file(path: Path) -> None:
    """Make a file's content durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_atomically(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace `path` as a whole; readers see the old or the new content.

    Args:
        durable: also survive a power cut.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    partial.rename(path)
    if durable:
        fsync_folder(path.parent)


def write_json_atomically(path: Path, value: object, *, durable: bool = True) -> None:
    """`write_atomically` of JSON."""
    write_atomically(path, json.dumps(value, separators=(",", ":")).encode(), durable=durable)
