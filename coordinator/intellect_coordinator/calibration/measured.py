"""Files of measured units: msgpack, each written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from intellect_protocol.engines.base import Completion, RowScore
from intellect_protocol.errors import ConfigError

from .plan import Setting, Source, generated_file, scored_file

T = TypeVar("T")


def write_unit(path: Path, value: object) -> None:
    """Write one unit's file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(msgspec.msgpack.encode(value))
    part.replace(path)


def read_units(path: Path, shape: type[T]) -> T:
    """What a unit's file holds.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=shape)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}; delete the file to measure it again") from error


def completions_of(work: Path, source: Source, unit: int) -> list[list[Completion]]:
    """Completions of a unit: [prompts][samples]. Errors as `read_units`."""
    return read_units(generated_file(work, source, unit), list[list[Completion]])


def scores_of(work: Path, source: Source, verifier: Setting, unit: int) -> list[RowScore]:
    """A verifier's scores of a unit, one per row. Errors as `read_units`."""
    return read_units(scored_file(work, source, verifier, unit), list[RowScore])
