"""The seeder: serve, record, announce, in this order; first write wins; the ledger is all it remembers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing
from micro_run import COORDINATOR, PUBLISHER, make_run, manifest_of
from safetensors.numpy import save_file

from intellect_protocol.checkpoint import (
    Probe,
    SignedManifest,
    build_manifest,
    checkpoint_hash,
    sign_manifest,
    verify_folder,
)
from intellect_protocol.errors import LedgerError, ManifestError, UnreachableError
from intellect_protocol.ledger.records import RecordedCheckpoint
from intellect_protocol.run import RunConfig
from intellect_protocol.wire import encode
from intellect_trainer.seeder import Seeder


class FirstWriteWins:
    """The contract's rule, without a chain."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.recorded: dict[int, bytes] = {}
        self.down = 0  # calls that get no answer

    def _answer(self) -> None:
        if self.down:
            self.down -= 1
            raise UnreachableError("no chain RPC answers")

    async def checkpoint(self, run_id: bytes, version: int) -> RecordedCheckpoint | None:
        self._answer()
        found = self.recorded.get(version)
        return None if found is None else RecordedCheckpoint(found, 1, b"B" * 32, 0)

    async def record_checkpoint(self, publisher, run_id: bytes, version: int, checkpoint_hash: bytes):
        self._answer()
        if version in self.recorded:
            raise LedgerError("WorkLedgerAlreadyRecorded", "WorkLedgerAlreadyRecorded")
        assert version >= max(self.recorded, default=0)
        self.recorded[version] = checkpoint_hash
        self._log.append(f"record {version}")


class Network:
    """Weights and announcements that only take notes; weights check what they are given."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.announced = trio.Event()

    async def publish(self, signed: SignedManifest, folder: Path) -> None:
        verify_folder(folder, manifest_of(signed))
        self._log.append(f"serve {manifest_of(signed).version}")

    async def announce(self, signed: SignedManifest, version: int, publisher) -> None:
        assert publisher is PUBLISHER
        self._log.append(f"announce {version}")
        self.announced.set()


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    (tmp_path / "tokenizer.json").write_text("{}")
    return make_run(tmp_path)


def _put(folder: Path, run: RunConfig, version: int, *, value: float = 0.0, signer=PUBLISHER) -> bytes:
    """A checkpoint and its manifest on disk; returns C."""
    files = folder / f"v{version:08d}"
    files.mkdir(parents=True, exist_ok=True)
    save_file({"w": np.full(64, version + value, dtype=np.float32)}, files / "model.safetensors")
    manifest = build_manifest(
        files,
        run_id=run.run_id,
        version=version,
        parent_version=version - 1 if version else None,
        probe=Probe([1], []),
        batches=[],
        created_at_ms=1,
        publisher=PUBLISHER.address,
    )
    signed = sign_manifest(manifest, signer)
    (folder / f"v{version:08d}.manifest").write_bytes(encode(signed))
    return checkpoint_hash(signed.manifest)


def _seeder(folder: Path, run: RunConfig, ledger: FirstWriteWins, log: list[str]) -> Seeder:
    network = Network(log)
    return Seeder(run, folder, PUBLISHER, ledger=ledger, weights=network, heads=network)


async def test_a_version_is_served_then_recorded_then_announced(run, tmp_path) -> None:
    log: list[str] = []
    ledger = FirstWriteWins(log)
    seeder = _seeder(tmp_path, run, ledger, log)
    assert not await seeder.publish_newest()
    first = _put(tmp_path, run, 0)
    assert await seeder.publish_newest()
    assert not await seeder.publish_newest()
    second = _put(tmp_path, run, 1)
    assert await seeder.publish_newest()
    assert log == [f"{act} {version}" for version in (0, 1) for act in ("serve", "record", "announce")]
    assert ledger.recorded == {0: first, 1: second}


async def test_after_a_restart_the_recorded_head_is_served_and_announced_again(run, tmp_path) -> None:
    log: list[str] = []
    ledger = FirstWriteWins(log)
    _put(tmp_path, run, 3)
    await _seeder(tmp_path, run, ledger, log).publish_newest()
    log.clear()
    await _seeder(tmp_path, run, ledger, log).publish_newest()
    assert log == ["serve 3", "announce 3"]


async def test_a_version_recorded_with_another_hash_is_never_announced(run, tmp_path) -> None:
    log: list[str] = []
    ledger = FirstWriteWins(log)
    ledger.recorded[2] = b"\x05" * 32
    _put(tmp_path, run, 2)
    with pytest.raises(LedgerError, match="version 2 is recorded with hash 0505"):
        await _seeder(tmp_path, run, ledger, log).publish_newest()
    assert log == []


async def test_a_record_that_gets_through_meanwhile_counts(run, tmp_path) -> None:
    log: list[str] = []
    ledger = FirstWriteWins(log)
    checkpoint = _put(tmp_path, run, 0)
    seeder = _seeder(tmp_path, run, ledger, log)
    record = ledger.record_checkpoint

    async def overtaken(*arguments) -> None:
        # A transaction sent before a crash is mined just before ours.
        ledger.recorded[0] = checkpoint
        await record(*arguments)

    ledger.record_checkpoint = overtaken
    assert await seeder.publish_newest()
    assert log == ["serve 0", "announce 0"]


async def test_the_seeder_waits_for_a_chain_that_does_not_answer(run, tmp_path, autojump_clock) -> None:
    log: list[str] = []
    ledger = FirstWriteWins(log)
    ledger.down = 5
    _put(tmp_path, run, 0)
    seeder = _seeder(tmp_path, run, ledger, log)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(seeder.run)
        await seeder._heads.announced.wait()
        nursery.cancel_scope.cancel()
    assert log[-1] == "announce 0"
    assert log.count("record 0") == 1


async def test_versions_that_were_overtaken_are_left_out(run, tmp_path) -> None:
    log: list[str] = []
    ledger = FirstWriteWins(log)
    for version in (0, 1, 2):
        _put(tmp_path, run, version)
    shutil.rmtree(tmp_path / "v00000001")
    await _seeder(tmp_path, run, ledger, log).publish_newest()
    assert log == ["serve 2", "record 2", "announce 2"]


async def test_a_folder_that_is_pruned_meanwhile_is_no_error_if_a_newer_version_is_there(
    run, tmp_path
) -> None:
    log: list[str] = []
    seeder = _seeder(tmp_path, run, FirstWriteWins(log), log)
    _put(tmp_path, run, 1)
    shutil.rmtree(tmp_path / "v00000001")
    with pytest.raises(ManifestError):
        await seeder.publish_newest()
    publish = seeder._weights.publish

    async def newer_comes(signed: SignedManifest, folder: Path) -> None:
        if not (tmp_path / "v00000002").exists():
            _put(tmp_path, run, 2)
        await publish(signed, folder)

    seeder._weights.publish = newer_comes
    while await seeder.publish_newest():
        pass
    assert log == ["serve 2", "record 2", "announce 2"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder, run: _put(folder, run, 0, signer=COORDINATOR), "not signed by the run's publisher"),
        (lambda folder, run: (folder / "v00000000.manifest").write_bytes(b"\xc1"), "malformed"),
        (
            lambda folder, run: shutil.copy(folder / "v00000000.manifest", folder / "v00000007.manifest"),
            "is the manifest of version 0",
        ),
        (
            lambda folder, run: save_file(
                {"w": np.ones(64, dtype=np.float32)}, folder / "v00000000" / "model.safetensors"
            ),
            "damaged",
        ),
    ],
)
async def test_a_checkpoint_that_does_not_verify_is_not_recorded(run, tmp_path, spoil, message) -> None:
    log: list[str] = []
    _put(tmp_path, run, 0)
    spoil(tmp_path, run)
    with pytest.raises(ManifestError, match=message):
        await _seeder(tmp_path, run, FirstWriteWins(log), log).publish_newest()
    assert log == []
