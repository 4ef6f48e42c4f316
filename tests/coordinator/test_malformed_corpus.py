"""A validator and the malformed files: it outlives all of them, calls each what it is, and does not grow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from audit_site import AuditSite, write_policy
from example_unit import load
from malformed_corpus import write_corpus

PROCESS = Path(__file__).with_name("malformed_process.py")
GROWTH_BYTES = 200 << 20
CHILD_BYTES = 2 << 30


def judged(
    tmp_path: Path, *, damaged: int, rounds: int, timeout_s: float
) -> tuple[list[dict[str, Any]], int]:
    """Every file's verdict, in order, and the pid of the one process that gave them."""
    policy = write_policy(tmp_path / "policy", seed=0)
    search = os.pathsep.join([*sys.path, str(PROCESS.parent)])
    site = AuditSite(policy)
    good = site.unit(load(policy))
    write_corpus(tmp_path / "corpus", good, site.context(good).file_limits)
    folders = [str(policy), str(tmp_path / "corpus")]
    command = [sys.executable, str(PROCESS), *folders, str(damaged), "7", str(rounds)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
    )
    try:
        out, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
        process.wait()
    lines = [json.loads(line) for line in out.splitlines()]
    assert process.returncode == 0, lines[-1:]
    return lines, process.pid


def check(lines: list[dict[str, Any]], pid: int) -> None:
    assert {line["pid"] for line in lines} == {pid}
    first, *files, after, without = lines
    assert first["outcome"] == after["outcome"] == "accepted"
    assert (without["outcome"], without["fraud"]) == ("inconclusive", False)
    for line in files:
        assert not line["fault"], line
        if line["expected_fraud"] is None:
            assert line["outcome"] in ("rejected", "suspect") or line["unchanged"], line
        else:
            assert (line["outcome"], line["fraud"]) == ("rejected", line["expected_fraud"]), line
        assert line["codes"] or line["outcome"] == "accepted", line
        assert line["child_rss"] < CHILD_BYTES, line
    settled = files[min(len(files) // 4, 20)]["rss"]
    assert max(line["rss"] for line in files) - settled < GROWTH_BYTES


def test_a_validator_outlives_the_malformed_files_and_calls_each_what_it_is(tmp_path: Path) -> None:
    check(*judged(tmp_path, damaged=120, rounds=1, timeout_s=900))


@pytest.mark.long
def test_a_validator_does_not_grow_over_thousands_of_malformed_files(tmp_path: Path) -> None:
    lines, pid = judged(tmp_path, damaged=2000, rounds=5, timeout_s=9000)
    check(lines, pid)
    half = len(lines) // 2
    assert lines[-1]["rss"] - lines[half]["rss"] < GROWTH_BYTES // 8
