"""Figures of a run: `metrics.jsonl` (the record), TensorBoard, and `status.json` (for views).

`metrics.jsonl` has one line per version: `{"kind": "step", "version": ...}`, and one per evaluation:
`{"kind": "heldout", "version": ..., "score": ...}`. It is also what a restarted trainer takes its history
from: lines of versions that will be trained again, and a torn last line, are removed first.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .files import write_atomically


class MetricsLog:
    """The figures of a run, kept up to `version` from an earlier start.

    Args:
        folder: the trainer's data directory.
    """

    def __init__(self, folder: Path, version: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._path = folder / "metrics.jsonl"
        self.rows = _rows_up_to(self._path, version)
        write_atomically(self._path, b"".join(_line(row) for row in self.rows))
        self._file = self._path.open("ab")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=version + 1)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._board.close()

    def add(self, kind: str, version: int, values: dict[str, Any]) -> None:
        """Append one line, durably, and the numbers in it to TensorBoard under `kind/`."""
        row = {"kind": kind, "version": version, **values}
        self.rows.append(row)
        self._file.write(_line(row))
        self._file.flush()
        os.fsync(self._file.fileno())
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._board.add_scalar(f"{kind}/{name}", value, version)
        self._board.flush()

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """All lines of one kind, in the order they were added."""
        return [row for row in self.rows if row["kind"] == kind]


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def _rows_up_to(path: Path, version: int) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("version"), int) and row["version"] <= version:
            rows.append(row)
    return rows
