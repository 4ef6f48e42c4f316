"""Versions that travel between real peers: each a process with a libp2p host and a data plane."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chunk_worker import ChunkWorker
from sample_checkpoints import describe, write_checkpoint

from intellect_protocol.checkpoint import Manifest, verify_folder
from intellect_protocol.chunk_store import ChunkStore
from intellect_protocol.wire import encode


class Swarm:
    """Workers of one test, ended with it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.workers: list[ChunkWorker] = []

    def start(self, name: str, **options: Any) -> ChunkWorker:
        """A worker that knows the first one's address, if there is one; not ready yet."""
        bootstrap = [self.workers[0].address] if self.workers else []
        worker = ChunkWorker(self.root / name, bootstrap=bootstrap, dht=False, **options)
        self.workers.append(worker)
        return worker

    def seeder(self, **options: Any) -> ChunkWorker:
        """The first worker, an origin."""
        return self.start("seeder", origin=True, **options).ready()

    def version(self, number: int, **options: Any) -> tuple[Manifest, dict[str, str]]:
        """A checkpoint on disk: its manifest and the arguments of `publish`."""
        folder = write_checkpoint(self.root / f"v{number}", seed=number, **options)
        manifest, signed = describe(folder, version=number)
        path = self.root / f"manifest-{number}"
        path.write_bytes(encode(signed))
        return manifest, {"folder": str(folder), "manifest": str(path)}

    def end(self) -> None:
        for worker in self.workers:
            for pid in worker.pids:
                try:
                    os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:
                    continue
            worker.kill()


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path)
    yield swarm
    swarm.end()


def test_versions_in_a_row_reach_all_and_mostly_from_peers(swarm: Swarm) -> None:
    seeder = swarm.seeder()
    nodes = [swarm.start(f"n{number}") for number in range(3)]
    for node in nodes:
        node.ready()
    from_origin = total = 0
    for number in range(1, 4):
        manifest, published = swarm.version(number)
        assert seeder.ask("publish", **published) == {"done": True}
        for node in nodes:
            node.tell("fetch", manifest=published["manifest"], out=str(node.folder / f"out{number}"))
        for node in nodes:
            report = node.answer()
            assert sum(report["bytes_from"].values()) == manifest.size_bytes
            verify_folder(node.folder / f"out{number}", manifest)
            from_origin += report["bytes_from"].get(seeder.peer_id, 0)
            total += manifest.size_bytes
    assert from_origin <= total / 2
    sent = sum(sum(worker.ask("report")["bytes_to"].values()) for worker in [seeder, *nodes])
    deadline = time.monotonic() + 20
    while sent < total and time.monotonic() < deadline:  # counted by another process
        sent = sum(sum(worker.ask("report")["bytes_to"].values()) for worker in [seeder, *nodes])
    assert sent >= total


def test_a_peer_that_serves_bad_chunks_is_banned_and_no_bad_byte_arrives(swarm: Swarm) -> None:
    seeder = swarm.seeder()
    manifest, published = swarm.version(1)
    seeder.ask("publish", **published)
    liar, victim = swarm.start("liar"), swarm.start("victim")
    liar.ready()
    victim.ready()
    liar.ask("fetch", manifest=published["manifest"])
    for path in (liar.folder / "store" / "chunks").glob("*/*"):
        path.write_bytes(bytes(path.stat().st_size))
    report = victim.ask("fetch", manifest=published["manifest"], out=str(victim.folder / "out"))
    assert report["banned"] == [liar.peer_id]
    assert report["bytes_from"] == {seeder.peer_id: manifest.size_bytes}
    verify_folder(victim.folder / "out", manifest)


def test_a_stopped_donor_is_left(swarm: Swarm) -> None:
    seeder = swarm.seeder()
    manifest, published = swarm.version(1)
    seeder.ask("publish", **published)
    donor, node = swarm.start("donor"), swarm.start("node")
    donor.ready()
    node.ready()
    donor.ask("fetch", manifest=published["manifest"])
    # The data plane alone: the donor goes on saying what it has and gives out tickets.
    os.kill(donor.pids[1], signal.SIGSTOP)
    report = node.ask("fetch", manifest=published["manifest"], out=str(node.folder / "out"))
    assert report["bytes_from"] == {seeder.peer_id: manifest.size_bytes}
    assert report["banned"] == []
    verify_folder(node.folder / "out", manifest)


def test_a_killed_download_goes_on_where_it_was(swarm: Swarm) -> None:
    seeder = swarm.seeder()
    manifest, published = swarm.version(1, size_bytes=2_000_000)
    seeder.ask("publish", **published)
    node = swarm.start("node", config={"download_bytes_per_s": 400_000}).ready()
    node.tell("fetch", manifest=published["manifest"])
    chunks = node.folder / "store" / "chunks"
    deadline = time.monotonic() + 60
    while len(list(chunks.glob("*/*"))) < 10:
        assert time.monotonic() < deadline
    node.kill()
    store = ChunkStore(node.folder / "store", quota_bytes=1 << 30)
    missing = store.missing(manifest)
    assert 0 < len(missing) <= len(manifest.chunks) - 10
    again = swarm.start("node").ready()
    report = again.ask("fetch", manifest=published["manifest"], out=str(again.folder / "out"))
    assert sum(report["bytes_from"].values()) == sum(manifest.chunk_length(index) for index in missing)
    verify_folder(again.folder / "out", manifest)


def test_chunks_come_over_the_stream_when_the_data_plane_cannot_be_reached(swarm: Swarm) -> None:
    # The data plane listens at an address other than the one peers see and are told.
    seeder = swarm.seeder(config={"http_host": "127.0.0.2"})
    manifest, published = swarm.version(1)
    seeder.ask("publish", **published)
    node = swarm.start("node").ready()
    report = node.ask("fetch", manifest=published["manifest"], out=str(node.folder / "out"))
    assert report["bytes_from"] == {seeder.peer_id: manifest.size_bytes}
    verify_folder(node.folder / "out", manifest)


def test_a_version_of_equal_chunks_is_fetched_once(swarm: Swarm) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    seeder = swarm.seeder()
    folder = swarm.root / "zeros"
    folder.mkdir()
    save_file({"w": np.zeros(400_000, np.float32)}, folder / "model.safetensors")
    manifest, signed = describe(folder)
    assert len(set(manifest.chunks)) < len(manifest.chunks) / 2
    path = swarm.root / "manifest-zeros"
    path.write_bytes(encode(signed))
    seeder.ask("publish", folder=str(folder), manifest=str(path))
    node = swarm.start("node").ready()
    report = node.ask("fetch", manifest=str(path), out=str(node.folder / "out"))
    assert sum(report["bytes_from"].values()) == sum(manifest.chunk_sizes().values())
    verify_folder(node.folder / "out", manifest)
