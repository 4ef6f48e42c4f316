from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from sample_checkpoints import LIMITS, PUBLISHER, RUN_ID, describe, write_checkpoint

from intellect_protocol.checkpoint import (
    Manifest,
    SignedManifest,
    checkpoint_hash,
    chunk_size_for,
    is_checkpoint_file,
    merkle_root,
    read_chunks,
    sign_manifest,
    state_hash,
    verify_folder,
    verify_manifest,
)
from intellect_protocol.errors import ManifestError
from intellect_protocol.keys import LocalSigner
from intellect_protocol.tensor_files import read_header
from intellect_protocol.wire import encode

hashes = st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=40)


def resigned(manifest: Manifest, **changes: Any) -> SignedManifest:
    """The manifest with fields replaced, properly signed: only its content can be at fault."""
    return sign_manifest(msgspec.structs.replace(manifest, **changes), PUBLISHER)


def refuse(signed: SignedManifest, match: str) -> None:
    with pytest.raises(ManifestError, match=match):
        verify_manifest(signed, RUN_ID, PUBLISHER.address, LIMITS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "v1")


@pytest.fixture(scope="module")
def manifest(folder: Path) -> Manifest:
    return describe(folder)[0]


def test_a_signed_manifest_comes_back_as_it_was_made(folder: Path) -> None:
    manifest, signed = describe(folder)
    assert verify_manifest(signed, RUN_ID, PUBLISHER.address, LIMITS) == manifest
    verify_folder(folder, manifest)


def test_making_the_manifest_twice_gives_the_same_checkpoint_hash(folder: Path) -> None:
    assert checkpoint_hash(describe(folder)[1].manifest) == checkpoint_hash(describe(folder)[1].manifest)


@given(size=st.integers(min_value=1, max_value=1 << 40))
def test_chunk_size_is_whole_kib_and_within_its_bounds(size: int) -> None:
    chunk = chunk_size_for(size)
    assert chunk % 1024 == 0
    assert 16 << 10 <= chunk <= 4 << 20
    if 64 * (16 << 10) <= size <= 64 * (4 << 20):
        assert size / 64 <= chunk < size / 64 + 1024


@given(hashes=hashes)
def test_the_merkle_root_follows_its_definition(hashes: list[bytes]) -> None:
    def root(level: list[bytes]) -> bytes:
        if len(level) == 1:
            return level[0]
        width = 1 << ((len(level) - 1).bit_length() - 1)
        return blake3(b"\x01" + root(level[:width]) + root(level[width:])).digest()

    # Promoting an odd node level by level is the tree that splits at the largest power of two.
    assert merkle_root(hashes) == root([blake3(b"\x00" + digest).digest() for digest in hashes])


@given(hashes=hashes, data=st.data())
def test_the_merkle_root_changes_with_any_leaf(hashes: list[bytes], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(hashes) - 1))
    changed = [*hashes[:at], bytes([hashes[at][0] ^ 1]) + hashes[at][1:], *hashes[at + 1 :]]
    assert merkle_root(changed) != merkle_root(hashes)
    assert merkle_root([*hashes, hashes[-1]]) != merkle_root(hashes)


@given(sizes=st.lists(st.integers(0, 90_000), min_size=1, max_size=4), chunk=st.sampled_from([1024, 16384]))
@settings(max_examples=25, deadline=None)
def test_chunks_are_the_concatenated_files(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], chunk: int
) -> None:
    from intellect_protocol.checkpoint import FileEntry

    folder = tmp_path_factory.mktemp("files")
    random = np.random.default_rng(sum(sizes))
    files = [FileEntry(f"{number}.txt", size, {}) for number, size in enumerate(sizes)]
    for file in files:
        (folder / file.name).write_bytes(random.bytes(file.size_bytes))
    chunks = list(read_chunks(folder, files, chunk))
    assert b"".join(chunks) == b"".join((folder / file.name).read_bytes() for file in files)
    assert all(len(piece) == chunk for piece in chunks[:-1])
    assert all(0 < len(piece) <= chunk for piece in chunks)


def test_the_state_hash_follows_its_definition(tmp_path: Path) -> None:
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a.é": np.array(7, dtype=np.int64)}
    save_file(tensors, tmp_path / "model.safetensors")
    expected = b""
    for name, dtype in (("a.é", "I64"), ("b", "F32")):
        raw, tensor = name.encode(), tensors[name]
        expected += struct.pack("<I", len(raw)) + raw + struct.pack("<I", 3) + dtype.encode()
        expected += struct.pack(f"<I{tensor.ndim}Q", tensor.ndim, *tensor.shape) + tensor.tobytes()
    assert state_hash(tmp_path) == blake3(expected).digest()


def test_the_state_hash_ignores_sharding_and_sees_every_bit(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    tensors = {f"t{number}": random.standard_normal((5, 7)).astype(np.float16) for number in range(6)}
    whole, sharded, changed = (tmp_path / name for name in ("whole", "sharded", "changed"))
    for folder in (whole, sharded, changed):
        folder.mkdir()
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    save_file({name: tensors[name] for name in ("t5", "t0", "t3")}, sharded / "a.safetensors")
    save_file({name: tensors[name] for name in ("t1", "t2", "t4")}, sharded / "b.safetensors")
    tensors["t3"].view(np.uint16)[4, 6] ^= 1
    save_file(tensors, changed / "model.safetensors")
    assert state_hash(whole) == state_hash(sharded) != state_hash(changed)


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"same": np.zeros(4, np.float32)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ManifestError, match="two files"):
        state_hash(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"t": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
        {"t": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}},
        {"t": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"t": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}},
        {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "more": 1}},
        {"t": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "u": {"dtype": "U8", "shape": [5],
         "data_offsets": [3, 8]}},
        {"t": {"dtype": "U8", "shape": [7], "data_offsets": [0, 7]}},
        {"t": [1, 2]},
        [],
    ],
)  # fmt: skip
def test_a_header_that_lies_about_its_bytes_is_refused(tmp_path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(ManifestError):
        read_header(path)


@given(data=st.binary(max_size=200), length=st.one_of(st.none(), st.integers(0, 220)))
@settings(max_examples=100, deadline=None)
def test_no_bytes_make_the_header_reader_fail_otherwise(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, length: int | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(data if length is None else struct.pack("<Q", length) + data)
    with contextlib.suppress(ManifestError):
        read_header(path)


@pytest.mark.parametrize(
    "name",
    ["../x.json", "a/b.json", "/etc/x.json", "..", ".hidden.json", "a\\b.json", "x.py", "x.bin", "x.pt",
     "x.json\n", "", "x" * 200 + ".json", "x\0.json", "CON:.json"],
)  # fmt: skip
def test_names_that_could_leave_the_folder_or_hold_code_are_refused(manifest: Manifest, name: str) -> None:
    assert not is_checkpoint_file(name)
    files = sorted(
        [msgspec.structs.replace(manifest.files[0], name=name), *manifest.files[1:]], key=lambda f: f.name
    )
    refuse(resigned(manifest, files=files), "not allowed")


def test_each_field_that_does_not_fit_is_refused(manifest: Manifest) -> None:
    replace = msgspec.structs.replace
    first, *rest = manifest.files
    refuse(resigned(manifest, files=list(reversed(manifest.files))), "ascending")
    refuse(resigned(manifest, files=[replace(first, name="CONFIG.json"), first, *rest]), "distinct")
    refuse(resigned(manifest, files=[replace(first, size_bytes=-1), *rest]), "size out of range")
    refuse(resigned(manifest, files=[replace(first, size_bytes=1 << 40), *rest]), "size out of range")
    refuse(resigned(manifest, files=[replace(first, dtypes={"F32": 1}), *rest]), "only safetensors")
    refuse(resigned(manifest, files=[first, replace(rest[0], dtypes={"X": 1}), *rest[1:]]), "dtype counts")
    refuse(resigned(manifest, files=[first]), "no weights")
    refuse(resigned(manifest, files=[]), "0 files")
    refuse(resigned(manifest, chunk_size=manifest.chunk_size + 1024), "chunk size")
    refuse(resigned(manifest, chunks=manifest.chunks[:-1]), "do not make up")
    refuse(resigned(manifest, chunks=[*manifest.chunks[:-1], b"x" * 31]), "32 bytes")
    refuse(resigned(manifest, chunks=[*manifest.chunks[1:], manifest.chunks[0]]), "Merkle")
    doubled = [*manifest.chunks[:-1], manifest.chunks[0]]
    refuse(resigned(manifest, chunks=doubled, merkle_root=merkle_root(doubled)), "different size")
    refuse(resigned(manifest, parent_version=manifest.version), "parent")
    refuse(resigned(manifest, format=2), "format 2")
    refuse(resigned(manifest, run_id=b"s" * 32), "another run")
    refuse(resigned(manifest, publisher=LocalSigner.create().address), "another run or publisher")
    refuse(resigned(manifest, batches=[b"short"]), "batches")
    refuse(resigned(manifest, created_at_ms=-5), "time out of range")
    refuse(resigned(manifest, probe=replace(manifest.probe, logprobs=[float("nan")])), "finite")
    refuse(resigned(manifest, probe=replace(manifest.probe, prompt=[-1])), "token")


def test_a_manifest_of_another_signer_or_with_one_byte_changed_is_refused(manifest: Manifest) -> None:
    refuse(sign_manifest(manifest, LocalSigner.create()), "not signed")
    signed = sign_manifest(manifest, PUBLISHER)
    refuse(SignedManifest(signed.manifest[:-1] + b"\0", signed.signature), "not signed")
    refuse(SignedManifest(signed.manifest, b""), "not signed")


def test_a_second_encoding_of_the_same_manifest_is_refused(manifest: Manifest) -> None:
    fields = msgspec.to_builtins(manifest, builtin_types=(bytes,))
    other = encode(dict(reversed(fields.items())))
    from intellect_protocol.keys import manifest_digest

    signature = PUBLISHER.sign_digest(manifest_digest(checkpoint_hash(other)))
    refuse(SignedManifest(other, signature), "canonical")


@given(data=st.binary(max_size=300))
def test_signed_rubbish_is_a_manifest_error(data: bytes) -> None:
    from intellect_protocol.keys import manifest_digest

    refuse(SignedManifest(data, PUBLISHER.sign_digest(manifest_digest(checkpoint_hash(data)))), "malformed")


def test_a_folder_with_a_changed_missing_or_extra_file_does_not_verify(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "v")
    manifest, _ = describe(folder)
    (folder / "modeling.py").write_text("print('no')")
    with pytest.raises(ManifestError, match="does not hold the files"):
        verify_folder(folder, manifest)
    (folder / "modeling.py").unlink()
    weights = folder / "model-0.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ManifestError, match="damaged"):
        verify_folder(folder, manifest)
    weights.write_bytes(content[:-1])
    with pytest.raises(ManifestError, match="shorter"):
        verify_folder(folder, manifest)
    weights.unlink()
    with pytest.raises(ManifestError, match="does not hold the files"):
        verify_folder(folder, manifest)


def test_code_and_pickles_beside_the_weights_stay_out_of_the_manifest(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "v")
    for name in ("modeling.py", "pytorch_model.bin", "optimizer.pt", ".gitattributes"):
        (folder / name).write_bytes(b"x")
    assert [file.name for file in describe(folder)[0].files] == [
        "config.json", "model-0.safetensors", "model-1.safetensors",
    ]  # fmt: skip
