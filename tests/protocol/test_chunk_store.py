from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_checkpoints import PUBLISHER, describe, write_checkpoint

from intellect_protocol.checkpoint import Manifest, SignedManifest, checkpoint_hash, verify_folder
from intellect_protocol.chunk_store import ChunkStore
from intellect_protocol.errors import ManifestError, PreflightError
from intellect_protocol.wire import encode

QUOTA = 10 << 20


def seeded(store: ChunkStore, folder: Path, version: int = 1) -> tuple[Manifest, bytes]:
    """The folder imported as `version`, not held."""
    manifest, signed = describe(folder, version=version)
    with store.admit(signed):
        store.import_folder(folder, manifest)
    return manifest, checkpoint_hash(signed.manifest)


def disk_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "chunks").glob("*/*"))


def test_what_is_imported_is_assembled_again(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "v")
    store = ChunkStore(tmp_path / "store", quota_bytes=QUOTA)
    manifest, checkpoint = seeded(store, folder)
    assert store.missing(manifest) == []
    out = store.assemble(manifest, tmp_path / "out" / "v1")
    verify_folder(out, manifest)
    for entry in manifest.files:
        assert (out / entry.name).read_bytes() == (folder / entry.name).read_bytes()
    assert [stored.checkpoint for stored in store.versions()] == [checkpoint]


def test_a_chunk_with_other_bytes_or_of_no_version_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "v")
    manifest, signed = describe(folder)
    store = ChunkStore(tmp_path / "store", quota_bytes=QUOTA)
    with pytest.raises(ManifestError, match="no admitted version"):
        store.put(manifest.chunks[0], b"x")
    with store.admit(signed):
        for data in (b"", b"x", bytes(manifest.chunk_size), bytes(manifest.chunk_size + 1)):
            with pytest.raises(ManifestError, match="does not have its hash"):
                store.put(manifest.chunks[0], data)
    assert disk_bytes(store.root) == 0
    assert len(store.missing(manifest)) == len(manifest.chunks)


@given(
    have=st.sets(st.integers(0, 18)),
    damage=st.sets(st.integers(0, 18)),
    cut=st.integers(min_value=0, max_value=9),
)
@settings(max_examples=25, deadline=None)
def test_a_restarted_store_misses_exactly_what_is_absent_or_damaged(
    tmp_path_factory: pytest.TempPathFactory, have: set[int], damage: set[int], cut: int
) -> None:
    base = tmp_path_factory.mktemp("restart")
    folder = write_checkpoint(base / "v")
    manifest, signed = describe(folder)
    whole = ChunkStore(base / "whole", quota_bytes=QUOTA)
    seeded(whole, folder)
    store = ChunkStore(base / "store", quota_bytes=QUOTA)
    store.admit(signed).release()
    for index in have:
        data = whole.get(manifest.chunks[index])
        assert data is not None
        store.put(manifest.chunks[index], data)
    for index in damage & have:
        path = store.path(manifest.chunks[index])
        path.write_bytes(path.read_bytes()[: -1 - cut] + b"\xff" * cut)
    again = ChunkStore(base / "store", quota_bytes=QUOTA)
    assert again.missing(manifest) == sorted(set(range(len(manifest.chunks))) - (have - damage))


def test_nothing_appears_when_a_chunk_is_missing_or_the_state_hash_is_wrong(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "v")
    store = ChunkStore(tmp_path / "store", quota_bytes=QUOTA)
    manifest, _ = seeded(store, folder)
    with pytest.raises(ManifestError, match="state"):
        store.assemble(msgspec.structs.replace(manifest, state_hash=bytes(32)), tmp_path / "out")
    store.path(manifest.chunks[3]).unlink()
    with pytest.raises(ManifestError, match="not in the store"):
        store.assemble(manifest, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_a_damaged_folder_is_replaced_and_an_intact_one_kept(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "v")
    store = ChunkStore(tmp_path / "store", quota_bytes=QUOTA)
    manifest, _ = seeded(store, folder)
    out = store.assemble(manifest, tmp_path / "out")
    inode = out.stat().st_ino
    assert store.assemble(manifest, out).stat().st_ino == inode
    (out / "config.json").write_text("{}")
    verify_folder(store.assemble(manifest, out), manifest)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store", "v"]


def test_assembling_into_a_full_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "v")
    store = ChunkStore(tmp_path / "store", quota_bytes=QUOTA)
    manifest, _ = seeded(store, folder)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=manifest.size_bytes))
    with pytest.raises(PreflightError, match="free"):
        store.assemble(manifest, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_pruning_keeps_the_newest_the_pinned_and_the_held(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "store", quota_bytes=QUOTA, retain=2)
    hashes = []
    for version in range(6):
        folder = write_checkpoint(tmp_path / f"v{version}", seed=version, size_bytes=40_000)
        hashes.append(seeded(store, folder, version)[1])
    store.pin(hashes[0], "audit-7")
    held = ChunkStore(tmp_path / "store", quota_bytes=QUOTA).hold(hashes[2])
    assert held is not None
    assert store.prune() == [hashes[3], hashes[1]]
    assert [stored.manifest.version for stored in store.versions()] == [0, 2, 4, 5]
    held.release()
    store.unpin(hashes[0], "audit-7")
    assert set(store.prune()) == {hashes[0], hashes[2]}
    assert disk_bytes(store.root) == store.reserved_bytes()
    assert store.hold(hashes[0]) is None


def test_a_chunk_shared_with_an_evicted_version_stays(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "store", quota_bytes=QUOTA)
    folder = write_checkpoint(tmp_path / "v")
    seeded(store, folder, 1)
    (folder / "zz.txt").write_text("changes the last chunk alone")
    newer, _ = seeded(store, folder, 2)
    store.prune(keep=1)
    assert store.missing(newer) == []


@given(
    sizes=st.lists(st.integers(20_000, 120_000), min_size=1, max_size=8), quota=st.integers(50_000, 300_000)
)
@settings(max_examples=15, deadline=None)
def test_the_quota_is_never_exceeded(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], quota: int
) -> None:
    base = tmp_path_factory.mktemp("quota")
    store = ChunkStore(base / "store", quota_bytes=quota)
    for version, size in enumerate(sizes):
        folder = write_checkpoint(base / f"v{version}", seed=version, size_bytes=size)
        manifest, signed = describe(folder, version=version)
        if manifest.size_bytes > quota:
            with pytest.raises(PreflightError, match="quota"):
                store.admit(signed)
        else:
            with store.admit(signed):
                store.import_folder(folder, manifest)
            assert store.missing(manifest) == []
        assert disk_bytes(store.root) <= quota


def test_a_version_in_use_is_not_evicted_for_a_new_one(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "store", quota_bytes=150_000)
    first = write_checkpoint(tmp_path / "a", size_bytes=100_000)
    manifest, checkpoint = seeded(store, first, 1)
    _, wanted = describe(write_checkpoint(tmp_path / "b", size_bytes=100_000, seed=1), version=2)
    hold = store.hold(checkpoint)
    assert hold is not None
    with hold, pytest.raises(PreflightError, match="quota"):
        store.admit(wanted)
    assert store.missing(manifest) == []
    store.admit(wanted).release()
    assert [stored.manifest.version for stored in store.versions()] == [2]


def test_a_damaged_manifest_file_is_dropped_with_its_chunks(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "store", quota_bytes=QUOTA)
    _, checkpoint = seeded(store, write_checkpoint(tmp_path / "v"))
    (store.root / "manifests" / checkpoint.hex()).write_bytes(b"\xc1garbage")
    again = ChunkStore(tmp_path / "store", quota_bytes=QUOTA)
    assert again.versions() == []
    assert disk_bytes(store.root) == 0


def test_a_manifest_that_does_not_decode_is_not_admitted(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "store", quota_bytes=QUOTA)
    with pytest.raises(ManifestError):
        store.admit(SignedManifest(encode([1]), PUBLISHER.sign_digest(bytes(32))))


IMPORTER = """
import sys
from pathlib import Path
from intellect_protocol.chunk_store import ChunkStore
from sample_checkpoints import describe
folder, root = Path(sys.argv[1]), Path(sys.argv[2])
manifest, signed = describe(folder)
store = ChunkStore(root, quota_bytes=int(sys.argv[3]))
with store.admit(signed):
    print("go", flush=True)
    store.import_folder(folder, manifest)
    store.assemble(manifest, root.parent / "out")
print("done", flush=True)
"""


def importer(folder: Path, root: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", IMPORTER, str(folder), str(root), str(QUOTA)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )


def test_a_process_killed_anywhere_leaves_a_store_that_goes_on(tmp_path: Path) -> None:
    """The kill comes when a random number of chunk files (or the partial folder) has appeared."""
    folder = write_checkpoint(tmp_path / "v", size_bytes=4_000_000)
    manifest, _ = describe(folder)
    root = tmp_path / "store"
    chooser = random.Random(5)
    verified = 0
    for _ in range(6):
        with importer(folder, root) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"go\n"
            target = verified + chooser.randint(0, 12)
            while process.poll() is None and len(list((root / "chunks").glob("*/*"))) < target:
                pass
            process.send_signal(signal.SIGKILL)
        store = ChunkStore(root, quota_bytes=QUOTA)
        missing = store.missing(manifest)
        assert len(manifest.chunks) - len(missing) >= verified, "a verified chunk was lost"
        verified = len(manifest.chunks) - len(missing)
        assert list((root / "tmp").iterdir()) == []
        assert disk_bytes(root) <= manifest.size_bytes
    with importer(folder, root) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b"go\ndone\n"
    verify_folder(tmp_path / "out", manifest)
    assert not list(tmp_path.glob(".out*"))


def test_two_processes_fill_one_store_and_one_folder(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "v", size_bytes=2_000_000)
    processes = [importer(folder, tmp_path / "store") for _ in range(2)]
    for process in processes:
        with process:
            assert process.stdout is not None
            assert process.stdout.read() == b"go\ndone\n"
    manifest, _ = describe(folder)
    verify_folder(tmp_path / "out", manifest)
    assert disk_bytes(tmp_path / "store") == manifest.size_bytes
