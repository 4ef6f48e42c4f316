"""Rollout files that end the process that reads them, and the guard that dies in its place."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from test_rollouts import LIMITS, META, row

from intellect_protocol.errors import RolloutFileError
from intellect_protocol.parquet_guard import ParquetGuard
from intellect_protocol.rollouts import RolloutUnit, read_unit, write_unit

GOOD = write_unit(RolloutUnit(META, [row(sample=s) for s in range(4)]))
TRIES = 4000


@pytest.fixture(scope="module")
def deadly() -> bytes:
    """A file with a byte or two of its footer changed that aborts pyarrow; about one in 500 does."""
    footer = len(GOOD) - 8 - int.from_bytes(GOOD[-8:-4], "little")
    rng = random.Random(1)
    for _ in range(TRIES):
        damaged = bytearray(GOOD)
        for _ in range(rng.choice([1, 1, 2, 3])):
            damaged[rng.randrange(footer, len(GOOD) - 8)] = rng.randrange(256)
        try:
            read_unit(bytes(damaged), LIMITS)
        except RolloutFileError as error:
            if "ends its reader" in str(error):
                return bytes(damaged)
    pytest.fail(f"none of {TRIES} damaged files ended the reader: is the guard still needed?")


def test_a_deadly_file_is_refused_and_the_next_good_one_is_read(deadly: bytes) -> None:
    with pytest.raises(RolloutFileError, match="ends its reader"):
        read_unit(deadly, LIMITS)
    assert len(read_unit(GOOD, LIMITS).rows) == 4


def test_a_good_file_is_not_blamed_for_a_reader_that_died_of_something_else() -> None:
    guard = ParquetGuard()
    try:
        guard.screen("unit", GOOD, LIMITS)
        assert guard._child is not None
        os.kill(guard._child.pid, signal.SIGSTOP)  # it has not been seen to die when the next file comes
        killer = threading.Timer(0.2, os.kill, (guard._child.pid, signal.SIGKILL))
        killer.start()
        guard.screen("unit", GOOD, LIMITS)
        killer.join()
    finally:
        guard.close()


def test_without_the_guard_that_file_ends_the_process(deadly: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(deadly)
    code = (
        "import sys; from pathlib import Path; from intellect_protocol import rollouts\n"
        "limits = rollouts.FileLimits(max_rows=64, max_prompt_tokens=16, max_completion_tokens=16)\n"
        "try:\n    rollouts.parse('unit', Path(sys.argv[1]).read_bytes(), limits)\n"
        "except Exception:\n    pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "file")],
        check=False,
        timeout=60,
        stderr=subprocess.DEVNULL,
    )
    assert done.returncode in (-signal.SIGABRT, -signal.SIGSEGV)


def test_a_reader_that_hangs_or_was_killed_is_replaced() -> None:
    guard = ParquetGuard(deadline_s=20.0)
    try:
        guard.screen("unit", GOOD, LIMITS)
        child = guard._child
        assert child is not None
        child.send_signal(signal.SIGSTOP)
        guard._deadline_s = 0.2
        with pytest.raises(RolloutFileError, match="too long"):
            guard.screen("unit", GOOD + bytes(1 << 20), LIMITS)  # more than a pipe holds
        assert child.poll() is not None
        guard._deadline_s = 20.0
        guard.screen("unit", GOOD, LIMITS)
        os.kill(guard._child.pid, signal.SIGKILL)
        guard._child.wait()
        guard.screen("unit", GOOD, LIMITS)
    finally:
        guard.close()


def test_malformed_files_keep_their_own_words() -> None:
    guard = ParquetGuard()
    try:
        with pytest.raises(RolloutFileError, match="columns"):
            guard.screen("batch", GOOD, LIMITS)
        with pytest.raises(RolloutFileError, match="not a readable Parquet file"):
            guard.screen("unit", b"PAR1 nothing PAR1", LIMITS)
    finally:
        guard.close()
