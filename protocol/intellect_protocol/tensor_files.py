"""Strict reading of safetensors files in bounded memory, and the hash of a whole model state.

The state hash names a policy independently of how its tensors are spread over files: sharding,
file names and header padding do not change it, one flipped bit of one weight does. Tensors are
streamed in pieces with plain reads: a memory map would count towards this process's resident size
and turn a file that is truncated under it into a crash instead of an error.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import msgspec
from blake3 import blake3

from .errors import ManifestError, WireError
from .wire import decode_json, u32, u64

# Bytes per element, by the name the safetensors format gives the type.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
# The safetensors library's own limit on a header.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 16
MAX_TENSOR_NAME_BYTES = 1024
_READ_BYTES = 4 << 20


class TensorEntry(msgspec.Struct, frozen=True):
    """Where one tensor lies in its file; `offset` counts from the start of the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


def read_header(path: Path) -> list[TensorEntry]:
    """The tensors of a safetensors file in the order of their bytes.

    Raises:
        ManifestError: not a safetensors file in which the tensors fill the data section exactly.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            return _parse_header(file, size, path.name)
    except OSError as error:
        raise ManifestError(f"{path.name}: {error.strerror or error}") from error


def _parse_header(file: BinaryIO, file_bytes: int, name: str) -> list[TensorEntry]:
    prefix = file.read(8)
    if len(prefix) != 8:
        raise ManifestError(f"{name}: too short for a safetensors file")
    header_bytes: int = struct.unpack("<Q", prefix)[0]
    if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise ManifestError(f"{name}: header of {header_bytes} bytes does not fit")
    try:
        header: Any = decode_json(
            file.read(header_bytes),
            max_bytes=MAX_HEADER_BYTES,
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constants,
        )
    except WireError as error:
        raise ManifestError(f"{name}: malformed safetensors header: {error}") from None
    if not isinstance(header, dict):
        raise ManifestError(f"{name}: malformed safetensors header")
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    entries = [_tensor_entry(key, value, data_start, name) for key, value in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.size_bytes))
    position = data_start
    for entry in entries:
        if entry.offset != position:
            raise ManifestError(f"{name}: gap or overlap before tensor {entry.name!r}")
        position += entry.size_bytes
    if position != file_bytes:
        raise ManifestError(f"{name}: tensors end at byte {position} of {file_bytes}")
    return entries


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _no_constants(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _tensor_entry(tensor: str, value: Any, data_start: int, file: str) -> TensorEntry:
    if len(tensor.encode("utf-8", "surrogatepass")) > MAX_TENSOR_NAME_BYTES:
        raise ManifestError(f"{file}: tensor name longer than {MAX_TENSOR_NAME_BYTES} bytes")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ManifestError(f"{file}: malformed entry for tensor {tensor!r}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ManifestError(f"{file}: tensor {tensor!r} has an unknown dtype")
    if not _naturals(shape) or len(shape) > MAX_DIMENSIONS or not _naturals(offsets) or len(offsets) != 2:
        raise ManifestError(f"{file}: malformed entry for tensor {tensor!r}")
    size = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != size:
        raise ManifestError(f"{file}: tensor {tensor!r} does not have the size of its shape")
    return TensorEntry(tensor, dtype, tuple(shape), data_start + offsets[0], size)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def dtype_counts(path: Path) -> dict[str, int]:
    """Number of tensors of each dtype in a safetensors file, by dtype in ascending order.

    Raises:
        ManifestError: as `read_header`.
    """
    counts: dict[str, int] = {}
    for entry in read_header(path):
        counts[entry.dtype] = counts.get(entry.dtype, 0) + 1
    return dict(sorted(counts.items()))


def state_hash(paths: Iterable[Path]) -> bytes:
    """BLAKE3 over every tensor of the safetensors files `paths`, in order of name (UTF-8 bytes).

    Each tensor adds u32 length and bytes of its name, u32 length and bytes of its dtype
    (safetensors' own, e.g. ``BF16``), u32 number of dimensions, u64 per dimension, and its raw
    little-endian bytes. All integers are little-endian.

    Raises:
        ManifestError: a file is malformed, or one tensor name appears in two files.
    """
    located: dict[bytes, tuple[Path, TensorEntry]] = {}
    for path in paths:
        for entry in read_header(path):
            try:
                key = entry.name.encode()
            except UnicodeEncodeError:
                raise ManifestError(f"{path.name}: a tensor name is not valid Unicode") from None
            if key in located:
                raise ManifestError(f"tensor {entry.name!r} appears in two files")
            located[key] = (path, entry)
    digest = blake3()
    for key in sorted(located):
        path, entry = located[key]
        dtype = entry.dtype.encode()
        digest.update(u32(len(key)) + key + u32(len(dtype)) + dtype)
        digest.update(u32(len(entry.shape)) + b"".join(u64(size) for size in entry.shape))
        for piece in _tensor_bytes(path, entry):
            digest.update(piece)
    return digest.digest()


def _tensor_bytes(path: Path, entry: TensorEntry) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(entry.offset)
            remaining = entry.size_bytes
            while remaining:
                piece = file.read(min(remaining, _READ_BYTES))
                if not piece:
                    raise ManifestError(f"{path.name}: shorter than its header says")
                remaining -= len(piece)
                yield piece
    except OSError as error:
        raise ManifestError(f"{path.name}: {error.strerror or error}") from error
