"""Checkpoint manifests: what a version of the policy consists of, byte for byte.

A checkpoint is a folder of safetensors, configuration and tokenizer files. Its bytes, the files
concatenated in the manifest's order, are cut into chunks; each chunk is named by its BLAKE3 hash, so
it can come from anybody. The manifest lists the hashes and is signed by the publisher; its own
hash C is the checkpoint hash that goes on the ledger. A receiver therefore needs to trust one
signature and nothing of what peers send.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from blake3 import blake3

from . import tensor_files
from .errors import ManifestError, WalletError, WireError
from .keys import Signer, address_bytes, manifest_digest, recover_address
from .wire import decode_canonical, encode, sha256

FORMAT = 1
HASH_BYTES = 32
MIN_CHUNK_BYTES = 16 << 10
MAX_CHUNK_BYTES = 4 << 20
CHUNKS_AIMED_AT = 64

# Nothing here is ever executed: code files and pickles are no part of a checkpoint.
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SUFFIXES = (".safetensors", ".json", ".txt", ".jinja", ".model")
_WEIGHTS = ".safetensors"


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file; `dtypes` counts the tensors of each dtype and is empty for other files."""

    name: str
    size_bytes: int
    dtypes: dict[str, int]


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Proof of loading: log-probabilities (nats) the policy gives `prompt` (token ids), in order."""

    prompt: list[int]
    logprobs: list[float]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint's unsigned description; its canonical msgpack hashes to C."""

    format: int
    run_id: bytes
    version: int
    parent_version: int | None
    files: list[FileEntry]  # ascending by name
    chunk_size: int
    chunks: list[bytes]  # BLAKE3 of each chunk, 32 bytes
    merkle_root: bytes
    state_hash: bytes
    probe: Probe
    batches: list[bytes]  # hashes of the accepted batches this version was trained on
    created_at_ms: int
    publisher: str  # EIP-55 address

    @property
    def size_bytes(self) -> int:
        """Sum of the file sizes."""
        return sum(file.size_bytes for file in self.files)

    def chunk_length(self, index: int) -> int:
        """Bytes in chunk `index`; all but the last have `chunk_size`."""
        return min(self.chunk_size, self.size_bytes - index * self.chunk_size)

    def chunk_sizes(self) -> dict[bytes, int]:
        """Size in bytes of each distinct chunk, by hash."""
        return {digest: self.chunk_length(index) for index, digest in enumerate(self.chunks)}


class SignedManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Canonical bytes of a `Manifest` and the publisher's 65-byte signature over C."""

    manifest: bytes
    signature: bytes


class ManifestLimits(msgspec.Struct, frozen=True):
    """What a receiver is ready to take."""

    max_checkpoint_bytes: int
    max_manifest_bytes: int = 8 << 20
    max_files: int = 1024
    max_probe_tokens: int = 4096
    max_batches: int = 65_536


def checkpoint_hash(manifest_bytes: bytes) -> bytes:
    """C: SHA-256 of a manifest's canonical bytes."""
    return sha256(manifest_bytes)


def chunk_size_for(size_bytes: int) -> int:
    """clamp(size / 64, 16 KiB, 4 MiB), rounded up to a whole KiB."""
    size = min(max(math.ceil(size_bytes / CHUNKS_AIMED_AT), MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
    return math.ceil(size / 1024) * 1024


def merkle_root(hashes: Sequence[bytes]) -> bytes:
    """Merkle root over chunk hashes: leaf BLAKE3(0x00 | h), node BLAKE3(0x01 | left | right).

    A node without a sibling moves up unchanged. The prefixes keep a leaf from passing for a node.

    Raises:
        ManifestError: no hashes.
    """
    if not hashes:
        raise ManifestError("a checkpoint has at least one chunk")
    level = [blake3(b"\x00" + digest).digest() for digest in hashes]
    while len(level) > 1:
        paired = [blake3(b"\x01" + level[at] + level[at + 1]).digest() for at in range(0, len(level) - 1, 2)]
        level = paired + level[len(paired) * 2 :]
    return level[0]


def is_checkpoint_file(name: str) -> bool:
    """Whether a file of this name may be part of a checkpoint (a plain name with an allowed suffix)."""
    return _FILE_NAME.fullmatch(name) is not None and name.endswith(_SUFFIXES)


def state_hash(folder: Path) -> bytes:
    """Hash of the whole model state in `folder`; see `tensor_files.state_hash`.

    Raises:
        ManifestError: a safetensors file is malformed or a tensor name appears twice.
    """
    return tensor_files.state_hash(path for path in sorted(folder.iterdir()) if path.name.endswith(_WEIGHTS))


def build_manifest(
    folder: Path,
    *,
    run_id: bytes,
    version: int,
    parent_version: int | None,
    probe: Probe,
    batches: Sequence[bytes],
    created_at_ms: int,
    publisher: str,
) -> Manifest:
    """Describe the checkpoint in `folder`; files that may not be part of one are left out.

    Raises:
        ManifestError: no safetensors file, or one is malformed.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if is_checkpoint_file(path.name) and path.is_file())
        files = [
            FileEntry(
                path.name,
                path.stat().st_size,
                tensor_files.dtype_counts(path) if path.name.endswith(_WEIGHTS) else {},
            )
            for path in paths
        ]
    except OSError as error:
        raise ManifestError(f"{folder}: {error.strerror or error}") from error
    if not any(file.dtypes for file in files):
        raise ManifestError(f"{folder} holds no safetensors file with weights")
    chunk_size = chunk_size_for(sum(file.size_bytes for file in files))
    chunks = [blake3(chunk).digest() for chunk in read_chunks(folder, files, chunk_size)]
    return Manifest(
        format=FORMAT,
        run_id=run_id,
        version=version,
        parent_version=parent_version,
        files=files,
        chunk_size=chunk_size,
        chunks=chunks,
        merkle_root=merkle_root(chunks),
        state_hash=tensor_files.state_hash(path for path in paths if path.name.endswith(_WEIGHTS)),
        probe=probe,
        batches=list(batches),
        created_at_ms=created_at_ms,
        publisher=publisher,
    )


def sign_manifest(manifest: Manifest, signer: Signer) -> SignedManifest:
    """Sign C with the publisher's key."""
    content = encode(manifest)
    return SignedManifest(content, signer.sign_digest(manifest_digest(checkpoint_hash(content))))


def read_chunks(folder: Path, files: Sequence[FileEntry], chunk_size: int) -> Iterator[bytes]:
    """The chunks of the concatenated files, in order; memory stays within a few chunks.

    Raises:
        ManifestError: a file is missing or does not have the size the entry says.
    """
    buffer = bytearray()
    for file in files:
        remaining = file.size_bytes
        try:
            with (folder / file.name).open("rb") as source:
                while remaining:
                    piece = source.read(min(remaining, chunk_size - len(buffer)))
                    if not piece:
                        raise ManifestError(f"{file.name}: shorter than {file.size_bytes} bytes")
                    remaining -= len(piece)
                    buffer += piece
                    if len(buffer) == chunk_size:
                        yield bytes(buffer)
                        buffer.clear()
                if source.read(1):
                    raise ManifestError(f"{file.name}: longer than {file.size_bytes} bytes")
        except OSError as error:
            raise ManifestError(f"{file.name}: {error.strerror or error}") from error
    if buffer:
        yield bytes(buffer)


def verify_manifest(
    signed: SignedManifest, run_id: bytes, publisher: str, limits: ManifestLimits
) -> Manifest:
    """Check everything about a manifest that can be checked without the checkpoint's bytes.

    Raises:
        ManifestError: wrong signer or run, unsafe names, sizes or counts that do not fit together
            or exceed `limits`, or bytes that are not canonical.
    """
    if recover_address(manifest_digest(checkpoint_hash(signed.manifest)), signed.signature) != publisher:
        raise ManifestError("the manifest is not signed by the run's publisher")
    try:
        manifest = decode_canonical(signed.manifest, Manifest, max_bytes=limits.max_manifest_bytes)
        address_bytes(manifest.publisher)
    except (WireError, WalletError) as error:
        raise ManifestError(f"malformed manifest: {error}") from error
    if manifest.format != FORMAT:
        raise ManifestError(f"manifest format {manifest.format} is not supported")
    if manifest.run_id != run_id or manifest.publisher != publisher:
        raise ManifestError("the manifest belongs to another run or publisher")
    if manifest.version < 0 or not 0 <= manifest.created_at_ms < 1 << 63:
        raise ManifestError("version or time out of range")
    if manifest.parent_version is not None and not 0 <= manifest.parent_version < manifest.version:
        raise ManifestError("the parent version does not come before the version")
    _check_files(manifest.files, limits)
    _check_chunks(manifest, limits)
    _check_probe(manifest.probe, limits)
    if len(manifest.batches) > limits.max_batches or any(len(h) != HASH_BYTES for h in manifest.batches):
        raise ManifestError("malformed list of batches")
    return manifest


def _check_files(files: Sequence[FileEntry], limits: ManifestLimits) -> None:
    if not 0 < len(files) <= limits.max_files:
        raise ManifestError(f"{len(files)} files; the limit is {limits.max_files}")
    names = [file.name for file in files]
    for name in names:
        if not is_checkpoint_file(name):
            raise ManifestError(f"file name {name[:64]!r} is not allowed")
    # Distinct even where the file system ignores case.
    if names != sorted(names) or len({name.lower() for name in names}) != len(names):
        raise ManifestError("file names are not distinct and in ascending order")
    for file in files:
        if not 0 <= file.size_bytes <= limits.max_checkpoint_bytes:
            raise ManifestError(f"{file.name}: size out of range")
        if bool(file.dtypes) and not file.name.endswith(_WEIGHTS):
            raise ManifestError(f"{file.name}: only safetensors files hold tensors")
        if list(file.dtypes) != sorted(file.dtypes):
            raise ManifestError(f"{file.name}: dtypes are not in ascending order")
        for dtype, count in file.dtypes.items():
            if dtype not in tensor_files.DTYPE_BYTES or not 0 < count < 1 << 31:
                raise ManifestError(f"{file.name}: malformed dtype counts")
    if not any(file.dtypes for file in files):
        raise ManifestError("the checkpoint holds no weights")


def _check_chunks(manifest: Manifest, limits: ManifestLimits) -> None:
    size = manifest.size_bytes
    if not 0 < size <= limits.max_checkpoint_bytes:
        raise ManifestError(f"checkpoint of {size} bytes; the limit is {limits.max_checkpoint_bytes}")
    if manifest.chunk_size != chunk_size_for(size):
        raise ManifestError(f"chunk size {manifest.chunk_size} does not follow from the checkpoint's size")
    if len(manifest.chunks) != math.ceil(size / manifest.chunk_size):
        raise ManifestError(f"{len(manifest.chunks)} chunks do not make up {size} bytes")
    if any(len(digest) != HASH_BYTES for digest in (*manifest.chunks, manifest.state_hash)):
        raise ManifestError("a hash does not have 32 bytes")
    if manifest.merkle_root != merkle_root(manifest.chunks):
        raise ManifestError("the Merkle root does not match the chunks")
    # Equal hashes at the short end and elsewhere would give one chunk two sizes.
    if manifest.chunk_length(len(manifest.chunks) - 1) != manifest.chunk_size and (
        manifest.chunks[-1] in manifest.chunks[:-1]
    ):
        raise ManifestError("two chunks of different size have one hash")


def _check_probe(probe: Probe, limits: ManifestLimits) -> None:
    if len(probe.prompt) > limits.max_probe_tokens or len(probe.logprobs) > limits.max_probe_tokens:
        raise ManifestError("probe too long")
    if any(not 0 <= token < 1 << 31 for token in probe.prompt):
        raise ManifestError("probe token out of range")
    if any(not math.isfinite(value) or value > 0 for value in probe.logprobs):
        raise ManifestError("probe log-probabilities are not finite and at most 0")


def verify_folder(folder: Path, manifest: Manifest) -> None:
    """Check that `folder` holds exactly the checkpoint `manifest` describes.

    Raises:
        ManifestError: a file is missing, extra or different, or the state hash does not match.
    """
    try:
        present = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise ManifestError(f"{folder}: {error.strerror or error}") from error
    if present != [file.name for file in manifest.files]:
        raise ManifestError(f"{folder} does not hold the files of version {manifest.version}")
    for index, chunk in enumerate(read_chunks(folder, manifest.files, manifest.chunk_size)):
        if index >= len(manifest.chunks) or blake3(chunk).digest() != manifest.chunks[index]:
            raise ManifestError(f"{folder}: chunk {index} of version {manifest.version} is damaged")
    verify_state(folder, manifest)


def verify_state(folder: Path, manifest: Manifest) -> None:
    """Check the tensors in `folder` against the manifest's dtypes and state hash.

    Raises:
        ManifestError: they do not match.
    """
    weights = [file for file in manifest.files if file.name.endswith(_WEIGHTS)]
    for file in weights:
        if tensor_files.dtype_counts(folder / file.name) != file.dtypes:
            raise ManifestError(f"{file.name}: tensors are not of the dtypes the manifest says")
    if tensor_files.state_hash(folder / file.name for file in weights) != manifest.state_hash:
        raise ManifestError(f"the state of version {manifest.version} does not have the manifest's hash")
