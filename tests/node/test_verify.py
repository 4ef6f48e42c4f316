"""`verify` and the self-check: a node hears from itself what a validator would say."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from audit_site import BLOCK_HASH, INDEX, NODE, VERSION, AuditSite, write_policy
from example_unit import LocalScorer, load, with_row
from test_node_cli import closed_port, one_line
from world import COORDINATOR

from intellect_node import cli
from intellect_node.history import History
from intellect_node.own_checks import check_own, own_context, self_check
from intellect_node.rollout import Policy
from intellect_protocol.checkpoint import Probe
from intellect_protocol.engines.base import RowScore, Sampling, ScoreRow
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.errors import EngineError
from intellect_protocol.keys import LocalSigner
from intellect_protocol.rollouts import RolloutUnit, read_unit, write_unit
from intellect_protocol.run import RunConfig
from intellect_protocol.validation.findings import Check
from intellect_protocol.wire import encode

Invoke = Callable[..., tuple[int, str, str]]
BLOCK = ("--block-hash", f"0x{BLOCK_HASH.hex()}")


@pytest.fixture(scope="module")
def verify_site(tmp_path_factory: pytest.TempPathFactory) -> AuditSite:
    return AuditSite(write_policy(tmp_path_factory.mktemp("verify") / "policy", seed=0))


@pytest.fixture(scope="module")
def engine(verify_site: AuditSite) -> TorchEngine:
    return load(verify_site.policy)


@pytest.fixture(scope="module")
def honest(verify_site: AuditSite, engine: TorchEngine) -> bytes:
    return verify_site.unit(engine)


def unit_of(site: AuditSite, data: bytes) -> RolloutUnit:
    return read_unit(data, site.context(data).file_limits)


@pytest.fixture
def folder(tmp_path: Path, verify_site: AuditSite, honest: bytes) -> Path:
    """The data directory of the node that made the honest unit, signed it and still has the weights."""
    folder = tmp_path / "node"
    policy = folder / "policies" / f"v{VERSION:08d}"
    shutil.copytree(verify_site.policy, policy)
    manifest = folder / "chunks" / "manifests" / verify_site.checkpoint.hex()
    manifest.parent.mkdir(parents=True)
    manifest.write_bytes(encode(verify_site.signed))
    config = verify_site.config
    (folder / "run.toml").write_text(config.to_toml())
    (folder / "node.key").write_bytes(NODE.secret())
    (folder / "node.key").chmod(0o600)
    history = History(folder, config.run_id, NODE.address)
    history.sign_work(NODE, config.run_id, VERSION, verify_site.checkpoint, INDEX, honest, 1)
    history.close()
    return folder


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Invoke:
    """Runs `intellect-node verify` in this process; exit code, stdout, stderr."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["intellect-node", "verify", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_an_honest_unit_of_the_outbox_passes_every_check_and_says_how_clearly(
    invoke: Invoke, folder: Path
) -> None:
    file = next((folder / "outbox").iterdir())
    code, out, err = invoke(file, "--data-dir", folder, *BLOCK, "--attention", "eager", "--batch-rows", 5)
    assert code == 0, err
    lines = out.splitlines()
    results = {line.split()[0]: line for line in lines if line.split()[0] in set(Check)}
    assert set(results) == set(Check)
    elsewhere = {name for name, line in results.items() if "elsewhere" in line}
    assert elsewhere == {"standing", "window"}  # its signature is in the history, so that is checked too
    assert all("passed" in line for name, line in results.items() if name not in elsewhere)
    assert "as its manifest says" in out
    assert "engine torch eager float32 on cpu" in out
    exponents = next(line for line in lines if "exponents of the hidden states" in line)
    assert "suspect above 4, fraud above 10" in exponents
    assert lines[-1] == "a validator would accept this unit"


def test_a_unit_of_another_temperature_is_refused_with_value_limit_and_remedy(
    invoke: Invoke, folder: Path, verify_site: AuditSite, engine: TorchEngine, tmp_path: Path
) -> None:
    (tmp_path / "hot").write_bytes(verify_site.unit(engine, temperature=0.5))
    code, out, _ = invoke(tmp_path / "hot", "--data-dir", folder, *BLOCK, "--json")
    assert code == 6
    verified = json.loads(out)
    assert (verified["version"], verified["index"], verified["report"]["outcome"]) == (
        VERSION,
        INDEX,
        "rejected",
    )
    checks = {line["check"]: line for line in verified["report"]["checks"]}
    assert checks["envelope"]["result"] == "elsewhere"  # another file than the signed one
    assert (checks["commitment"]["result"], checks["sampling"]["result"]) == ("passed", "refused")
    distance = next(each for each in checks["sampling"]["measured"] if each["code"] == "sampling_distance")
    finding = next(each for each in checks["sampling"]["findings"] if each["code"] == "sampling_distance")
    assert finding["measured"] > finding["limit"] == distance["fraud"]
    assert distance["measured"] >= finding["measured"]


@pytest.mark.parametrize("what", ["junk", "forged reward", "another node", "another run"])
def test_what_no_model_is_needed_for_is_refused_without_one(
    invoke: Invoke, folder: Path, verify_site: AuditSite, honest: bytes, tmp_path: Path, what: str
) -> None:
    unit = unit_of(verify_site, honest)
    if what == "forged reward":
        unit = with_row(unit, 2, reward=0.75)
    elif what == "another node":
        unit = RolloutUnit(msgspec.structs.replace(unit.meta, node=b"\x01" * 20), unit.rows)
    elif what == "another run":
        unit = RolloutUnit(msgspec.structs.replace(unit.meta, run_id=b"\x01" * 32), unit.rows)
    (tmp_path / "file").write_bytes(b"junk" * 100 if what == "junk" else write_unit(unit))
    code, out, err = invoke(tmp_path / "file", "--data-dir", folder, *BLOCK)
    assert code == 6, err
    refused = [line for line in out.splitlines() if " refused" in line[:24]]
    assert len(refused) == 1
    assert refused[0].startswith("reward" if what == "forged reward" else "file")
    assert "engine" not in out  # none was started
    assert "a validator would refuse this unit" in out
    assert "what to do" in out


def test_input_that_is_missing_is_named_in_one_line_with_the_code_of_the_design(
    invoke: Invoke, folder: Path, verify_site: AuditSite, honest: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    code, _, err = invoke(file, "--data-dir", folder, *BLOCK)
    assert (code, str(file) in one_line(err)) == (2, True)
    code, _, err = invoke(tmp_path, "--data-dir", folder, *BLOCK)
    assert code == 2
    one_line(err)
    file.write_bytes(honest)
    code, _, err = invoke(file, "--data-dir", folder, "--block-hash", "0x12")
    assert (code, "block hash" in one_line(err)) == (2, True)
    code, _, err = invoke(file, "--data-dir", folder, *BLOCK, "--weights", tmp_path / "none")
    assert (code, "none" in one_line(err)) == (2, True)
    code, _, err = invoke(file, "--data-dir", folder, *BLOCK, "--attention", "flash")
    assert (code, "attention" in one_line(err)) == (2, True)
    shutil.rmtree(folder / "policies")
    code, _, err = invoke(file, "--data-dir", folder, *BLOCK)
    assert (code, "--weights DIR" in one_line(err), "--fetch" in err) == (2, True, True)
    (folder / "node.key").unlink()
    code, _, err = invoke(file, "--data-dir", folder, *BLOCK, "--fetch")
    assert (code, "no node key" in one_line(err)) == (2, True)
    assert not (folder / "node.key").exists()


def test_weights_that_are_not_the_manifests_are_not_used(
    invoke: Invoke, folder: Path, honest: bytes, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(honest)
    other = write_policy(tmp_path / "other", seed=1)
    code, out, err = invoke(tmp_path / "file", "--data-dir", folder, *BLOCK, "--weights", other)
    assert (code, out) == (1, "")
    assert "version 3" in one_line(err)


def test_without_a_block_hash_the_chain_is_asked_and_a_silent_one_ends_with_four(
    invoke: Invoke, folder: Path, verify_site: AuditSite, honest: bytes, tmp_path: Path
) -> None:
    config = verify_site.config
    urls = [f"http://127.0.0.1:{closed_port()}"]
    revision = msgspec.structs.replace(config.revision, number=1, rpc_urls=urls)
    (folder / "run.toml").write_text(RunConfig(config.terms, revision).signed(COORDINATOR).to_toml())
    (tmp_path / "file").write_bytes(honest)
    code, _, err = invoke(tmp_path / "file", "--data-dir", folder)
    assert code == 4, err
    one_line(err)


async def test_what_is_measured_is_what_findings_are_made_of(
    verify_site: AuditSite, engine: TorchEngine, honest: bytes
) -> None:
    """Whatever exceeds a limit in the table is a finding, and the other way round."""
    for temperature in (1.0, 0.9, 0.5):
        data = verify_site.unit(engine, temperature=temperature)
        report = await check_own(data, verify_site.context(data), LocalScorer(engine))
        measured = [each for line in report.checks for each in line.measured]
        found = {note.code for line in report.checks for note in line.findings}
        graded = {each.code for each in measured if each.measured > each.suspect}
        assert graded >= found
        if temperature == 1.0:
            assert not graded
        # A share of few far tokens is forgiven; everything else that is too large is a finding.
        assert {code for code in graded if "far" not in code} <= found | {"drift"}
        assert len({each.code for each in measured}) == len(measured) >= 13


class Raw:
    """The engine in this process with its client's `score`."""

    def __init__(self, engine: TorchEngine) -> None:
        self._scorer = LocalScorer(engine)

    async def score(
        self, rows: Sequence[ScoreRow], sampling: Sampling, *, secret: bytes = b""
    ) -> list[RowScore]:
        return await self._scorer.score(rows, sampling, secret)


class Broken:
    """An engine that fails at scoring."""

    async def score(
        self, rows: Sequence[ScoreRow], sampling: Sampling, *, secret: bytes = b""
    ) -> list[RowScore]:
        raise EngineError("killed", "probably out of memory")


async def checked(site: AuditSite, data: bytes, engine: Raw | Broken) -> str:
    policy = Policy(VERSION, site.checkpoint, BLOCK_HASH, 1, site.policy, Probe([], []))
    return await self_check(site.config, site.tasks, NODE.address_bytes, policy, INDEX, data, engine)


async def test_the_self_check_lets_honest_units_pass_and_stops_damaged_ones(
    verify_site: AuditSite, engine: TorchEngine, honest: bytes
) -> None:
    assert await checked(verify_site, honest, Raw(engine)) == ""
    unit = unit_of(verify_site, honest)
    flipped = [
        token ^ 1 if place == 1 else token for place, token in enumerate(unit.rows[0].completion_tokens)
    ]
    reward = verify_site.tasks.reward(verify_site.context(honest).slots[0], flipped)
    damaged = write_unit(with_row(unit, 0, completion_tokens=flipped, reward=reward))
    with pytest.raises(EngineError, match="a validator would refuse this unit") as stopped:
        await checked(verify_site, damaged, Raw(engine))
    assert stopped.value.reason == "self-check"


async def test_a_unit_that_could_not_be_checked_is_not_taken_for_a_good_one(
    verify_site: AuditSite, honest: bytes
) -> None:
    with pytest.raises(EngineError, match=r"could not be checked.*out of memory"):
        await checked(verify_site, honest, Broken())


def test_the_unit_of_a_key_is_judged_as_that_keys(verify_site: AuditSite, honest: bytes) -> None:
    other = LocalSigner(b"\x09" * 32)
    fields = (VERSION, verify_site.checkpoint, BLOCK_HASH, INDEX, honest)
    own = own_context(verify_site.config, verify_site.tasks, NODE.address_bytes, *fields)
    theirs = own_context(verify_site.config, verify_site.tasks, other.address_bytes, *fields)
    assert own.seed == verify_site.context(honest).seed != theirs.seed
    assert Check.ENVELOPE not in own.checks
