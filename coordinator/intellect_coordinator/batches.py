"""The batch store: accepted units on their way to the trainer, and what the trainer says became of them.

<batches>/v{version:08d}/{node}-{index:06d}.parquet       written here, whole or not at all
<batches>/outcomes/{new version:08d}.json                 written by the trainer, read back here
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from intellect_protocol.errors import InvalidDataError, PreflightError
from intellect_protocol.file_lock import sweep_temporaries, temporary_sibling
from intellect_protocol.messages import TrainingState
from intellect_protocol.rollouts import Batch, BatchRow, Rollout, RolloutUnit

from .blobs import sync_folder
from .submissions import Unit

_OUTCOME_NAME = re.compile(r"(\d{8,19})\.json")
_MAX_OUTCOME_BYTES = 16 << 20
_TRAINED = {
    state.value: state for state in (TrainingState.TRAINED, TrainingState.FILTERED, TrainingState.EXPIRED)
}


class BatchStore:
    """Batch files under one folder. Methods block: call them in threads."""

    def __init__(self, root: Path) -> None:
        """
        Raises:
            PreflightError: the folder cannot be used.
        """
        self.root = root
        try:
            (root / "outcomes").mkdir(parents=True, exist_ok=True)
            (root / "tmp").mkdir(exist_ok=True)
            sweep_temporaries(root / "tmp", "")
        except OSError as error:
            raise PreflightError(f"{root}: {error.strerror or error}") from error

    def path(self, unit: Unit) -> Path:
        """Where the batch file of a unit is, or would be."""
        return self.root / f"v{unit.version:08d}" / f"{unit.node.hex()}-{unit.index:06d}.parquet"

    def put(self, unit: Unit, data: bytes) -> None:
        """Hand a batch file to the trainer; on disk when this returns.

        Raises:
            PreflightError: the disk refused.
        """
        path = self.path(unit)
        try:
            path.parent.mkdir(exist_ok=True)
            with temporary_sibling(self.root / "tmp", "") as temporary:
                with temporary.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.chmod(0o644)
                temporary.rename(path)
            sync_folder(path.parent)
            sync_folder(self.root)
        except OSError as error:
            raise PreflightError(f"{path}: {error.strerror or error}") from error

    def outcomes(self, after: int) -> Iterator[tuple[int, dict[bytes, TrainingState]]]:
        """What the trainer did with batch files (by SHA-256), per new version above `after`, ascending.

        Raises:
            InvalidDataError: a file is malformed.
        """
        found = []
        for path in (self.root / "outcomes").iterdir():
            match = _OUTCOME_NAME.fullmatch(path.name)
            if match and int(match[1]) > after:
                found.append((int(match[1]), path))
        for version, path in sorted(found):
            yield version, _read_outcome(path)


def _read_outcome(path: Path) -> dict[bytes, TrainingState]:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_OUTCOME_BYTES + 1)
        if len(content) > _MAX_OUTCOME_BYTES:
            raise ValueError("too large")
        plain = json.loads(content)
        if not isinstance(plain, dict):
            raise ValueError("not an object")
        return {bytes.fromhex(key): _TRAINED[value] for key, value in plain.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidDataError(f"{path}: not an outcome file ({error})") from error


def check_batch(
    batch: Batch, unit: Unit, run_id: bytes, checkpoint_hash: bytes, file_hash: bytes, validator: str
) -> None:
    """Check that a batch file says it is what this validator made of this file.

    Raises:
        InvalidDataError: it does not.
    """
    meta = batch.meta
    claimed = (meta.run_id, meta.version, meta.checkpoint_hash, meta.node, meta.index, meta.file_hash)
    if claimed != (run_id, unit.version, checkpoint_hash, unit.node, unit.index, file_hash):
        raise InvalidDataError("the batch file is of another unit")
    if meta.validator != validator:
        raise InvalidDataError("the batch file names another validator")


def check_rows(batch: Batch, unit: RolloutUnit) -> None:
    """Check that a batch file has the rows of the rollout file it was judged from.

    Raises:
        InvalidDataError: another count, order, prompt or completion.
    """
    if len(batch.rows) != len(unit.rows):
        raise InvalidDataError(
            f"the batch file has {len(batch.rows)} rows, the rollout file {len(unit.rows)}"
        )
    for position, (mine, theirs) in enumerate(zip(batch.rows, unit.rows, strict=True)):
        if _content(mine) != _content(theirs):
            raise InvalidDataError(f"row {position} of the batch file is not that of the rollout file")


def _content(row: BatchRow | Rollout) -> tuple[object, ...]:
    return (
        row.prompt,
        row.sample,
        row.environment,
        row.task_index,
        row.target_length,
        row.prompt_tokens,
        row.completion_tokens,
        row.finish_reason,
    )
