"""Check 4: the bytes are the announced ones, a rollout file of the agreed schema, and about this unit."""

from __future__ import annotations

from ..errors import RolloutFileError
from ..rollouts import RolloutUnit, UnitMeta, read_unit
from ..wire import sha256
from .context import UnitContext
from .findings import Check, Finding, Kind

FORMAT = 1


def check_bytes(data: bytes, context: UnitContext) -> list[Finding]:
    """Hash and size of the file against what was submitted and signed."""
    if len(data) != context.size_bytes:
        text = f"the file has {len(data)} bytes, {context.size_bytes} were announced"
        return [Finding(Check.FILE, "file_size", Kind.INVALID, text, None, len(data), context.size_bytes)]
    if sha256(data) != context.file_hash:
        return [Finding(Check.FILE, "file_hash", Kind.INVALID, "the file's SHA-256 is not the announced one")]
    return []


def read_file(data: bytes, context: UnitContext) -> RolloutUnit | Finding:
    """The unit, or why the bytes are not one."""
    try:
        return read_unit(data, context.file_limits)
    except RolloutFileError as error:
        return Finding(Check.FILE, "file_format", Kind.INVALID, str(error))


def check_meta(meta: UnitMeta, context: UnitContext) -> list[Finding]:
    """The file's metadata against the unit it was submitted for."""
    if meta.checkpoint_hash != context.checkpoint_hash:
        text = f"made with another checkpoint than the recorded version {context.version}"
        return [Finding(Check.FILE, "wrong_checkpoint", Kind.STALE, text)]
    problems = [
        (meta.format != FORMAT, f"the file has format {meta.format}, this program reads {FORMAT}"),
        (meta.run_id != context.run.run_id, "the file is for another run"),
        (meta.version != context.version, f"the file is for version {meta.version}, not {context.version}"),
        (meta.node != context.node, "the file was made by another node"),
        (meta.index != context.index, f"the file is for unit {meta.index}, not {context.index}"),
    ]
    return [Finding(Check.FILE, "file_meta", Kind.INVALID, text) for wrong, text in problems if wrong]
