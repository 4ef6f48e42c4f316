"""`audit`: anybody's engine comes to the verdict of the validator, or shows that it was wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from audit_site import AuditSite, write_policy
from coordinator_site import FRAUD, said
from example_unit import load

from intellect_coordinator.audit import audit, read_bundle
from intellect_coordinator.evidence import read_evidence
from intellect_protocol.engines.supervisor import EngineOptions
from intellect_protocol.errors import ConfigError, InvalidDataError, ManifestError, UsageError

ENGINE = EngineOptions(device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def audit_site(tmp_path_factory: pytest.TempPathFactory) -> AuditSite:
    return AuditSite(write_policy(tmp_path_factory.mktemp("audit") / "policy", seed=0))


@pytest.fixture(scope="module")
def other_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("other") / "policy", seed=1)


def test_work_of_another_model_is_fraud_to_the_validator_and_to_the_auditor(
    audit_site: AuditSite, other_policy: Path
) -> None:
    file = audit_site.unit(load(other_policy))
    verdict = trio.run(audit_site.verdict, file, load(audit_site.policy))
    assert verdict.fraud
    checked = read_evidence(audit_site.bundle(file, verdict))

    async def run() -> object:
        return await audit(checked, ENGINE, weights=audit_site.policy)

    report = trio.run(run)
    assert report.same  # type: ignore[attr-defined]
    assert report.outcome == "rejected"  # type: ignore[attr-defined]


def test_the_command_shows_that_an_honest_node_was_framed(audit_site: AuditSite, tmp_path: Path) -> None:
    file = audit_site.unit(load(audit_site.policy))
    path = tmp_path / "bundle"
    path.write_bytes(audit_site.bundle(file, said("rejected", FRAUD)))
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "intellect_coordinator",
            "audit",
            str(path),
            "--weights",
            str(audit_site.policy),
            "--json",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert run.returncode == 1, run.stderr
    report = json.loads(run.stdout)
    assert (report["same"], report["outcome"], report["said_outcome"]) == (False, "accepted", "rejected")


async def test_other_weights_than_the_manifests_are_refused(
    audit_site: AuditSite, other_policy: Path
) -> None:
    checked = read_evidence(audit_site.bundle(b"anything", said("rejected", FRAUD)))
    with pytest.raises(ManifestError):
        await audit(checked, ENGINE, weights=other_policy)


async def test_without_weights_and_without_a_key_there_is_nothing_to_audit_with(
    audit_site: AuditSite,
) -> None:
    checked = read_evidence(audit_site.bundle(b"anything", said("rejected", FRAUD)))
    with pytest.raises(UsageError, match="--weights"):
        await audit(checked, ENGINE)


def test_a_file_that_is_no_bundle_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read_bundle(tmp_path / "missing")
    (tmp_path / "junk").write_bytes(os.urandom(1000))
    with pytest.raises(InvalidDataError):
        read_bundle(tmp_path / "junk")
