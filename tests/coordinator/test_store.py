"""What was acknowledged is there after kill -9; what was not is whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from coordinator_site import NODE, Site
from hypothesis import given, settings
from hypothesis import strategies as st
from intake_process import UNITS, VERSIONS, content, run_until
from sqlalchemy import insert, select, update

from intellect_coordinator import schema
from intellect_coordinator.blobs import BlobStore
from intellect_coordinator.store import Store, add_event, cursor_value, set_cursor
from intellect_protocol.errors import ConfigError, InvalidDataError
from intellect_protocol.messages import GetVerdicts, SubmissionState


def test_every_receipt_survives_kill_minus_nine(
    populated_site: Path, tmp_path: Path, model_folder: Path
) -> None:
    import shutil

    folder = tmp_path / "site"
    shutil.copytree(populated_site, folder)
    receipts: dict[str, str] = {}
    for stop_after in (11, 1_000):
        lines = run_until(folder, model_folder, stop_after)
        for line in lines:
            if line != "done":
                version, index, signature = line.split()
                # The same unit again after the kill: the same receipt.
                assert receipts.setdefault(f"{version} {index}", signature) == signature
    assert len(receipts) == VERSIONS * UNITS
    site = Site(folder, model_folder)
    try:
        answer = trio.run(site.intake.verdicts, NODE.address, GetVerdicts(cursor=0, limit=500))
        assert {f"{entry.version} {entry.index}" for entry in answer.entries} == set(receipts)
        assert {entry.state for entry in answer.entries} == {SubmissionState.QUEUED}
        for entry in answer.entries:
            assert site.blobs.get(entry.file_hash, max_bytes=1 << 20) == content(entry.version, entry.index)
        assert list((site.blobs.root / "tmp").iterdir()) == []
    finally:
        site.close()


def test_a_failed_step_leaves_nothing_behind(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'a.sqlite'}")
    try:

        def fails() -> None:
            with store.transaction() as connection:
                add_event(connection, 1, "half")
                raise RuntimeError

        with pytest.raises(RuntimeError):
            fails()
        with store.snapshot() as connection:
            assert connection.scalars(select(schema.events.c.text)).all() == []
    finally:
        store.close()


def test_a_database_is_opened_again_and_a_newer_one_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.sqlite'}"
    store = Store(url)
    with store.transaction() as connection:
        set_cursor(connection, "here", 7)
        set_cursor(connection, "here", 8)
    store.close()
    store = Store(url)
    with store.snapshot() as connection:
        assert cursor_value(connection, "here") == 8
    with store.transaction() as connection:
        connection.execute(update(schema.schema_version).values(version=99))
    store.close()
    with pytest.raises(ConfigError, match="schema version 99"):
        Store(url)


def test_a_migration_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'a.sqlite'}"
    Store(url).close()

    def broken(connection: object) -> None:
        connection.execute(insert(schema.cursors).values(name="half", value=1))  # type: ignore[attr-defined]
        raise ConfigError("no")

    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, broken))
    with pytest.raises(ConfigError):
        Store(url)
    monkeypatch.undo()
    store = Store(url)
    with store.snapshot() as connection:
        assert cursor_value(connection, "half") is None
    store.close()


@pytest.mark.parametrize("url", ["nonsense", "oracle2://x", "sqlite:////nowhere/at/all/a.sqlite"])
def test_a_database_that_cannot_be_used_is_one_line(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Store(url)
    assert "\n" not in str(caught.value)


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=4096))
def test_a_blob_is_found_by_its_hash_and_only_by_that(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        blobs = BlobStore(Path(folder) / "blobs")
        digest = blobs.put(data)
        assert blobs.put(data) == digest
        assert blobs.get(digest, max_bytes=4096) == data
        assert blobs.get(bytes(32), max_bytes=4096) is None
        blobs.path(digest).write_bytes(data + b"!")
        with pytest.raises(InvalidDataError, match=r"damaged|larger"):
            blobs.get(digest, max_bytes=4096)


def test_what_a_kill_left_half_written_is_swept(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "blobs")
    (blobs.root / "tmp" / "deadbeef").write_bytes(b"half")
    BlobStore(tmp_path / "blobs")
    assert list((blobs.root / "tmp").iterdir()) == []


def test_a_database_from_before_the_audit_share_says_that_everything_was_audited(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.sqlite'}"
    store = Store(url)
    with store.transaction() as connection:
        connection.exec_driver_sql("ALTER TABLE submissions DROP COLUMN audit")
        connection.execute(update(schema.schema_version).values(version=1))
        present = [c.name for c in schema.submissions.columns if c.name not in ("audit", "case_id")]
        values = ", ".join("1" for _ in present)
        connection.exec_driver_sql(f"INSERT INTO submissions ({', '.join(present)}) VALUES ({values})")
    store.close()
    store = Store(url)
    try:
        with store.snapshot() as connection:
            assert connection.scalars(select(schema.submissions.c.audit)).all() == [True]
            assert connection.scalar(select(schema.schema_version.c.version)) == len(schema.MIGRATIONS)
    finally:
        store.close()
