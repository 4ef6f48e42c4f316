"""The rollout file: schema, writer and a reader that trusts nothing.

One file holds one unit of work: every sample of every prompt, one row each, ordered by (prompt,
sample). A **rollout file** is what a node signs. A **batch file** is what a validator makes of it:
the same rows with the validator's log-probs and recomputed rewards and without proofs; the trainer
reads nothing else. A unit that was not drawn for an audit has no log-probs but the node's; its batch
file is marked, and the trainer computes them anew.

Both are Parquet. The schema is exact (names, order, types, no nulls), metadata sits in one msgpack
value under the key ``intellect``, and the reader looks at the footer's declared sizes before it
decompresses anything, so a zip bomb is refused by arithmetic. A child process reads every file first
(`parquet_guard`), because pyarrow aborts on some hostile footers.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .errors import RolloutFileError, WireError
from .parquet_guard import GUARD, FileKind
from .wire import decode_canonical, encode

_METADATA_KEY = b"intellect"
_MAX_METADATA_BYTES = 64 * 1024
_MAX_FOOTER_BYTES = 1 << 20
_MAX_VALUE_BYTES = 1024  # of a name or a proof; a proof has 258

M = TypeVar("M", "UnitMeta", "BatchMeta")


class EngineNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What generated the rows; recorded for reports, decides nothing."""

    engine: str
    version: str
    dtype: str
    attention: str
    device: str


class UnitMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metadata of a rollout file."""

    format: int
    run_id: bytes
    version: int
    checkpoint_hash: bytes
    node: bytes  # 20 address bytes
    index: int
    engine: EngineNote


class Rollout(msgspec.Struct, frozen=True):
    """One row of a rollout file."""

    prompt: int  # p: which prompt of the unit
    sample: int  # s: which sample of the prompt
    environment: str
    task_index: int
    target_length: int  # 0: none asked
    prompt_tokens: list[int]
    completion_tokens: list[int]
    logprobs: np.ndarray  # float32 [completion tokens]: log-softmax(logits / T)
    finish_reason: str  # "stop" | "length"
    reward: float  # task reward, as the node computed it
    proofs: list[bytes]


class RolloutUnit(msgspec.Struct, frozen=True):
    """A rollout file, read."""

    meta: UnitMeta
    rows: list[Rollout]


class BatchMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Metadata of a batch file: an accepted unit, ready to train on."""

    format: int
    run_id: bytes
    version: int
    checkpoint_hash: bytes
    node: bytes
    index: int
    file_hash: bytes  # SHA-256 of the rollout file it was judged from
    validator: str  # address
    audited: bool = True  # False: the log-probs are the node's claims, which nobody has checked


class BatchRow(msgspec.Struct, frozen=True):
    """One row of a batch file. Rows of one `prompt` form a group."""

    prompt: int
    sample: int
    environment: str
    task_index: int
    target_length: int
    prompt_tokens: list[int]
    completion_tokens: list[int]
    logprobs: np.ndarray  # float32 [completion tokens]: the validator's, if the unit was audited
    finish_reason: str
    reward: float  # task reward, recomputed by the validator


class Batch(msgspec.Struct, frozen=True):
    """A batch file, read."""

    meta: BatchMeta
    rows: list[BatchRow]


class FileLimits(msgspec.Struct, frozen=True):
    """Bounds that are checked against the footer before any row is decoded."""

    max_rows: int
    max_prompt_tokens: int  # per row
    max_completion_tokens: int  # per row
    max_file_bytes: int = 64 << 20

    @property
    def max_uncompressed_bytes(self) -> int:
        """Upper bound of what rows within the limits can occupy, with room for page headers."""
        proofs = 258 + 8
        row = 8 * self.max_prompt_tokens + (8 + 8 + proofs / 32) * self.max_completion_tokens + 1024
        return int(self.max_rows * row) + (1 << 20)

    def max_values(self, column: str) -> int:
        """Upper bound of the values of a column of the rollout file, all rows together."""
        of_row = {
            "prompt_tokens": self.max_prompt_tokens,
            "completion_tokens": self.max_completion_tokens,
            "logprobs": self.max_completion_tokens,
            "proofs": -(-self.max_completion_tokens // 32) + 1,
        }
        return self.max_rows * max(1, of_row.get(column, 1))


def _column(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


_SHARED = [
    _column("prompt", pa.uint32()),
    _column("sample", pa.uint32()),
    _column("environment", pa.string()),
    _column("task_index", pa.uint64()),
    _column("target_length", pa.uint32()),
    _column("prompt_tokens", _list(pa.uint32())),
    _column("completion_tokens", _list(pa.uint32())),
    _column("logprobs", _list(pa.float32())),
    _column("finish_reason", pa.string()),
    _column("reward", pa.float32()),
]
BATCH_SCHEMA = pa.schema(_SHARED)
ROLLOUT_SCHEMA = pa.schema([*_SHARED, _column("proofs", _list(pa.binary()))])


def write_unit(unit: RolloutUnit) -> bytes:
    """Parquet bytes of a rollout file (zstd)."""
    return _write(ROLLOUT_SCHEMA, unit.meta, unit.rows)


def write_batch(batch: Batch) -> bytes:
    """Parquet bytes of a batch file (zstd)."""
    return _write(BATCH_SCHEMA, batch.meta, batch.rows)


def _write(schema: pa.Schema, meta: UnitMeta | BatchMeta, rows: Sequence[Rollout | BatchRow]) -> bytes:
    columns = [pa.array([getattr(row, field.name) for row in rows], type=field.type) for field in schema]
    table = pa.Table.from_arrays(columns, schema=schema.with_metadata({_METADATA_KEY: encode(meta)}))
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", row_group_size=max(1, len(rows)))
    return sink.getvalue()


def read_unit(data: bytes, limits: FileLimits) -> RolloutUnit:
    """Read an untrusted rollout file.

    Raises:
        RolloutFileError: not Parquet, another schema, over a limit, or non-finite numbers.
    """
    meta, columns = _screened("unit", data, ROLLOUT_SCHEMA, UnitMeta, limits)
    return RolloutUnit(meta=meta, rows=[Rollout(*values) for values in zip(*columns, strict=True)])


def read_batch(data: bytes, limits: FileLimits) -> Batch:
    """Read a batch file.

    Raises:
        RolloutFileError: as `read_unit`.
    """
    meta, columns = _screened("batch", data, BATCH_SCHEMA, BatchMeta, limits)
    return Batch(meta=meta, rows=[BatchRow(*values) for values in zip(*columns, strict=True)])


def parse(kind: FileKind, data: bytes, limits: FileLimits) -> None:
    """Read a file in this process, for the guard's child: a hostile footer may end the process.

    Raises:
        RolloutFileError: as `read_unit`.
    """
    if kind == "unit":
        _read(data, ROLLOUT_SCHEMA, UnitMeta, limits)
    else:
        _read(data, BATCH_SCHEMA, BatchMeta, limits)


def _screened(
    kind: FileKind, data: bytes, schema: pa.Schema, shape: type[M], limits: FileLimits
) -> tuple[M, list[list[object]]]:
    if len(data) > limits.max_file_bytes:
        raise RolloutFileError(f"file of {len(data)} bytes exceeds the limit of {limits.max_file_bytes}")
    GUARD.screen(kind, data, limits)
    return _read(data, schema, shape, limits)


def _read(data: bytes, schema: pa.Schema, shape: type[M], limits: FileLimits) -> tuple[M, list[list[object]]]:
    try:
        file = pq.ParquetFile(
            io.BytesIO(data), thrift_string_size_limit=_MAX_FOOTER_BYTES, thrift_container_size_limit=1 << 16
        )
        footer = file.metadata
        if footer.num_rows > limits.max_rows:
            raise RolloutFileError(f"{footer.num_rows} rows exceed the limit of {limits.max_rows}")
        if footer.num_row_groups > max(1, footer.num_rows):
            raise RolloutFileError("more row groups than rows")
        _check_declared_sizes(footer, limits)
        if not file.schema_arrow.equals(schema):
            raise RolloutFileError("the columns are not those of the agreed schema")
        meta = _read_meta(footer.metadata, shape)
        table = file.read(use_threads=False)
        if table.num_rows != footer.num_rows:
            raise RolloutFileError("the footer's row count is wrong")
        table.validate(full=True)
        return meta, _checked_columns(table, limits)
    except RolloutFileError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise RolloutFileError(f"not a readable Parquet file: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _check_declared_sizes(footer: pq.FileMetaData, limits: FileLimits) -> None:
    total = 0
    values: Counter[str] = Counter()
    for group in range(footer.num_row_groups):
        row_group = footer.row_group(group)
        for column in range(row_group.num_columns):
            chunk = row_group.column(column)
            if chunk.compression not in ("ZSTD", "UNCOMPRESSED", "SNAPPY"):
                raise RolloutFileError(f"compression {chunk.compression} is not allowed")
            total += max(chunk.total_uncompressed_size, 0)
            # A run of one value takes a few bytes however long it is, so sizes alone bound nothing.
            name = chunk.path_in_schema.partition(".")[0]
            values[name] += max(chunk.num_values, 0)
            if values[name] > limits.max_values(name):
                raise RolloutFileError(
                    f"{values[name]} values of {name[:40]} exceed the limit of {limits.max_values(name)}"
                )
    if total > limits.max_uncompressed_bytes:
        raise RolloutFileError(
            f"{total} bytes once decompressed exceed the limit of {limits.max_uncompressed_bytes}"
        )


def _read_meta(metadata: dict[bytes, bytes] | None, shape: type[M]) -> M:
    try:
        return decode_canonical(
            (metadata or {}).get(_METADATA_KEY, b""), shape, max_bytes=_MAX_METADATA_BYTES
        )
    except WireError as error:
        raise RolloutFileError(f"metadata: {error}") from error


def _checked_columns(table: pa.Table, limits: FileLimits) -> list[list[object]]:
    """Python lists per column, once counts, nulls, sizes and finiteness are known to be right."""
    columns = {field.name: _checked_column(table, field) for field in table.schema}
    lengths = {
        name: np.diff(column.offsets.to_numpy())
        for name, column in columns.items()
        if pa.types.is_list(column.type)
    }
    _check_lengths(lengths, limits)
    return [
        _floats_per_row(column, lengths[name])
        if pa.types.is_list(column.type) and pa.types.is_float32(column.type.value_type)
        else column.to_pylist()
        for name, column in columns.items()
    ]


def _checked_column(table: pa.Table, field: pa.Field) -> pa.Array:
    """A column in one piece, without nulls, numbers that are not finite, and overlong strings."""
    column = table.column(field.name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], type=field.type)
    values = column.flatten() if pa.types.is_list(field.type) else column
    if column.null_count or values.null_count:
        raise RolloutFileError(f"column {field.name} has nulls")
    if pa.types.is_float32(values.type):
        if not np.isfinite(values.to_numpy(zero_copy_only=False)).all():
            raise RolloutFileError(f"column {field.name} has non-finite values")
    elif pa.types.is_string(values.type) or pa.types.is_binary(values.type):
        longest = pc.max(pc.binary_length(values)).as_py() or 0
        if longest > _MAX_VALUE_BYTES:
            raise RolloutFileError(f"column {field.name} has a value of {longest} bytes")
    return column


def _floats_per_row(column: pa.Array, lengths: np.ndarray) -> list[object]:
    if not len(column):
        return []
    return list(np.split(column.flatten().to_numpy(zero_copy_only=False), np.cumsum(lengths)[:-1]))


def _check_lengths(lengths: dict[str, np.ndarray], limits: FileLimits) -> None:
    prompt, completion = lengths["prompt_tokens"], lengths["completion_tokens"]
    if (prompt > limits.max_prompt_tokens).any():
        raise RolloutFileError(f"a prompt is longer than {limits.max_prompt_tokens} tokens")
    if (completion > limits.max_completion_tokens).any():
        raise RolloutFileError(f"a completion is longer than {limits.max_completion_tokens} tokens")
    if (lengths["logprobs"] != completion).any():
        raise RolloutFileError("log-probs and completion tokens differ in number")
