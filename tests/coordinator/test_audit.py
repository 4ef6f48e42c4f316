"""`audit`: anybody's engine comes to the verdict of the validator, or shows that it was wrong."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from audit_site import AuditSite, write_policy
from coordinator_site import FRAUD, said
from example_unit import LocalScorer, load
from hypothesis import given, settings
from hypothesis import strategies as st
from world import STRANGER, VALIDATORS

from intellect_coordinator import cli
from intellect_coordinator.audit import AuditReport, audit, compare, read_bundle
from intellect_coordinator.evidence import read_evidence
from intellect_protocol.engines.supervisor import EngineOptions
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.errors import ConfigError, InvalidDataError, ManifestError, UsageError
from intellect_protocol.messages import JudgeVerdict
from intellect_protocol.validation.pipeline import validate_unit
from intellect_protocol.wire import encode

ENGINE = EngineOptions(device="cpu", dtype="float32")
# Other machines: batch size, attention kernel, implementation of the model.
MACHINES = [
    {},
    {"attention": "eager", "max_rows": 1},
    {"attention": "transformers-sdpa", "max_rows": 5},
    {"attention": "transformers-eager", "max_rows": 32},
]
Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def audit_site(tmp_path_factory: pytest.TempPathFactory) -> AuditSite:
    return AuditSite(write_policy(tmp_path_factory.mktemp("audit") / "policy", seed=0))


@pytest.fixture(scope="module")
def other_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("other") / "policy", seed=1)


@pytest.fixture(scope="module")
def framed(audit_site: AuditSite) -> bytes:
    """Evidence against honest work: a validator lied."""
    return audit_site.bundle(audit_site.unit(load(audit_site.policy)), said("rejected", FRAUD))


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Runs `intellect-coordinator` in this process; exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["intellect-coordinator", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def one_line(text: str) -> str:
    """The only line of an error."""
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    return lines[0]


def audited(bundle: bytes, site: AuditSite, machine: dict[str, Any]) -> AuditReport:
    """What an audit on such a machine says; its engine runs in this process."""
    engine = TorchEngine(device="cpu", dtype="float32", **machine)
    engine.load(site.policy)
    checked = read_evidence(bundle)
    context = site.context(checked.evidence.file)
    judgement = trio.run(validate_unit, checked.evidence.file, context, LocalScorer(engine))
    return compare(checked, judgement, engine.info())


@pytest.mark.parametrize("cheat", ["other model", "temperature"])
def test_every_machine_comes_to_the_validators_verdict_on_a_fraud(
    audit_site: AuditSite, other_policy: Path, cheat: str
) -> None:
    if cheat == "other model":
        file = audit_site.unit(load(other_policy))
    else:
        file = audit_site.unit(load(audit_site.policy), temperature=0.7)
    verdict = trio.run(audit_site.verdict, file, load(audit_site.policy))
    assert verdict.fraud
    bundle = audit_site.bundle(file, verdict)
    for machine in MACHINES:
        report = audited(bundle, audit_site, machine)
        assert report.same, (machine, report)
        assert report.outcome == "rejected"


def test_every_machine_clears_a_node_that_was_framed(audit_site: AuditSite, framed: bytes) -> None:
    for machine in MACHINES:
        report = audited(framed, audit_site, machine)
        assert (report.same, report.outcome, report.findings) == (False, "accepted", []), machine


def test_the_command_shows_that_an_honest_node_was_framed(
    audit_site: AuditSite, framed: bytes, tmp_path: Path, invoke: Invoke
) -> None:
    path = tmp_path / "bundle"
    path.write_bytes(framed)
    (tmp_path / "run.toml").write_text(audit_site.config.to_toml())
    machine = ["--attention", "eager", "--batch-rows", 3, "--dtype", "float32", "--device", "cpu"]
    named = ["--weights", audit_site.policy, "--run", tmp_path / "run.toml"]
    code, out, err = invoke("audit", path, *named, *machine, "--json")
    assert code == 1, err
    report = json.loads(out)
    assert (report["same"], report["outcome"], report["said_outcome"]) == (False, "accepted", "rejected")
    assert (report["engine"]["attention"], report["engine"]["max_rows"]) == ("eager", 3)
    assert report["run_id"] == audit_site.config.run_id.hex()


def test_a_verdict_for_another_reason_than_the_audits_is_another_verdict(
    audit_site: AuditSite, other_policy: Path
) -> None:
    """A validator that accuses a cheat of what it did not do has not looked."""
    file = audit_site.unit(load(other_policy))
    invented = msgspec.structs.replace(FRAUD, check="drift", code="invented")
    report = audited(audit_site.bundle(file, said("rejected", invented)), audit_site, {})
    assert report.outcome == report.said_outcome == "rejected"
    assert not report.same


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


def test_a_file_that_is_no_bundle_is_one_clear_error(tmp_path: Path, invoke: Invoke) -> None:
    with pytest.raises(ConfigError):
        read_bundle(tmp_path / "missing")
    code, _, err = invoke("audit", tmp_path / "missing")
    assert code == 2
    assert "missing" in one_line(err)
    (tmp_path / "junk").write_bytes(os.urandom(1000))
    with pytest.raises(InvalidDataError):
        read_bundle(tmp_path / "junk")
    code, out, err = invoke("audit", tmp_path / "junk", "--json")
    assert (code, out) == (1, "")
    one_line(err)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_bundle_is_refused_wherever_the_damage_is(
    audit_site: AuditSite, framed: bytes, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(framed) - 1))
    if data.draw(st.booleans()):
        damaged = framed[:place]
    else:
        flipped = framed[place] ^ data.draw(st.integers(1, 255))
        damaged = framed[:place] + bytes([flipped]) + framed[place + 1 :]
    try:
        checked = read_evidence(damaged)
    except InvalidDataError:
        return
    # What no signature covers: whose stake it is, and the block. Both are for the ledger to bear out.
    plain, intact = checked.evidence, read_evidence(framed).evidence
    assert (
        msgspec.structs.replace(
            plain, owner=intact.owner, block_number=intact.block_number, block_hash=intact.block_hash
        )
        == intact
    )


@pytest.mark.parametrize("forgery", ["signer", "name", "content", "attempt", "acceptance"])
def test_a_verdict_that_its_validator_did_not_sign_is_no_evidence(
    audit_site: AuditSite, framed: bytes, forgery: str
) -> None:
    evidence = read_evidence(framed).evidence
    harsher = said("rejected", msgspec.structs.replace(FRAUD, measured=0.9))
    changes: dict[str, object] = {
        "signer": {"verdict_signature": STRANGER.sign_digest(b"\x01" * 32)},
        "name": {"validator": VALIDATORS[1].address},
        "content": {"verdict": encode(harsher)},
        "attempt": {"attempt": 1},
        "acceptance": {},
    }[forgery]
    verdict = said("rejected", FRAUD)
    if forgery == "acceptance":
        verdict = JudgeVerdict("accepted", False, [], b"h" * 32, 1, 1, 0.0)
    bundle = audit_site.bundle(evidence.file, verdict, **changes)
    with pytest.raises(InvalidDataError, match="verdict"):
        read_evidence(bundle)


def test_evidence_of_another_run_is_refused_where_the_run_is_named(
    audit_site: AuditSite, framed: bytes, tmp_path: Path, invoke: Invoke
) -> None:
    """A bundle brings its own run configuration; whoever makes up a run can make up evidence."""
    other = AuditSite(audit_site.policy, name="another")
    (tmp_path / "bundle").write_bytes(framed)
    (tmp_path / "run.toml").write_text(other.config.to_toml())
    code, out, err = invoke("audit", tmp_path / "bundle", "--run", tmp_path / "run.toml")
    assert (code, out) == (1, "")
    assert "not of another" in one_line(err)


@pytest.mark.parametrize(
    ("flags", "says"), [(("--attention", "flash"), "attention"), (("--batch-rows", "0"), "batch-rows")]
)
def test_settings_that_make_no_sense_end_with_two(
    audit_site: AuditSite, framed: bytes, tmp_path: Path, invoke: Invoke, flags: tuple[str, ...], says: str
) -> None:
    (tmp_path / "bundle").write_bytes(framed)
    code, _, err = invoke("audit", tmp_path / "bundle", "--weights", audit_site.policy, *flags)
    assert code == 2
    assert says in one_line(err)
