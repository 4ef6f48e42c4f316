"""What `doctor` finds, what it advises, and what its report hides."""

from pathlib import Path

import msgspec
import pytest
import trio
from example_run import COORDINATOR, example_run
from world import OWNER, STRANGER, World

from intellect_node import doctor
from intellect_node.config import NodeConfig
from intellect_node.doctor import Severity, cheap_checks
from intellect_node.identity import open_identity, register
from intellect_node.redaction import redact
from intellect_node.status import NodeStatus, describe, read_status, write_status
from intellect_protocol.errors import ConfigError, PreflightError, UpgradeRequiredError
from intellect_protocol.keys import LocalSigner
from intellect_protocol.run import RunConfig


def run_with(**model: object) -> RunConfig:
    run = example_run()
    terms = msgspec.structs.replace(run.terms, model=msgspec.structs.replace(run.terms.model, **model))
    return RunConfig(terms, run.revision).signed(COORDINATOR)


def severities(findings: list[doctor.Finding]) -> dict[str, Severity]:
    return {finding.check: finding.severity for finding in findings}


def test_a_fit_machine_has_no_errors(tmp_path: Path) -> None:
    findings = cheap_checks(NodeConfig(), example_run(), tmp_path)
    assert {finding.severity for finding in findings} == {Severity.OK}
    assert {"python", "version", "memory", "disk", "engine"} <= set(severities(findings))


def test_a_model_that_fits_neither_memory_nor_disk_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    findings = cheap_checks(NodeConfig(), run_with(vocab_size=1 << 22, hidden_size=1 << 16), tmp_path)
    bad = [finding for finding in findings if finding.severity is Severity.ERROR]
    assert {finding.check for finding in bad} == {"memory", "disk"}
    for finding in bad:
        assert finding.remedy
        assert isinstance(finding.error(), PreflightError)
        assert finding.remedy in str(finding.error())


@pytest.mark.parametrize("address", ["0.0.0.0:4001", "/ip4/0.0.0.0/udp/1/quic", "/dns/x/tcp/1", ""])
def test_an_address_to_listen_on_that_is_none_is_a_configuration_error(tmp_path: Path, address: str) -> None:
    findings = cheap_checks(NodeConfig(listen=[address]), example_run(), tmp_path)
    (bad,) = [finding for finding in findings if finding.severity is not Severity.OK]
    assert isinstance(bad.error(), ConfigError)


def test_a_newer_protocol_asks_for_an_upgrade(tmp_path: Path) -> None:
    run = example_run()
    newer = RunConfig(msgspec.structs.replace(run.terms, protocol=2), run.revision).signed(COORDINATOR)
    (bad,) = [f for f in cheap_checks(NodeConfig(), newer, tmp_path) if f.severity is Severity.ERROR]
    assert isinstance(bad.error(), UpgradeRequiredError)


async def test_the_account_is_judged_by_stake_tokens_coins_and_binding(world: World, tmp_path: Path) -> None:
    poor = LocalSigner(b"\x44" * 32)
    found = severities(await doctor._check_account(world.ledger, poor.address, None))
    assert found["balance"] is not Severity.OK
    identity = open_identity(tmp_path, OWNER, lambda text: None)
    unbound = await doctor._check_account(world.ledger, OWNER.address, identity.node.address)
    assert severities(unbound) == {"balance": Severity.OK, "registration": Severity.WARNING}
    await register(world.ledger, identity, None, lambda text: None)
    bound = await doctor._check_account(world.ledger, OWNER.address, identity.node.address)
    assert severities(bound) == {"balance": Severity.OK, "registration": Severity.OK}
    others = await doctor._check_account(world.ledger, STRANGER.address, identity.node.address)
    assert severities(others)["registration"] is Severity.ERROR


async def test_silent_chain_and_peers_are_findings_and_no_crash() -> None:
    run = example_run()
    terms = msgspec.structs.replace(run.terms.ledger, contracts={})
    revision = msgspec.structs.replace(run.revision, bootstrap=["not an address"])
    broken = RunConfig(msgspec.structs.replace(run.terms, ledger=terms), revision)
    with trio.fail_after(60):
        chain = await doctor._check_chain(broken, None, None)
        peers = await doctor._check_coordinator(broken)
    assert [finding.severity for finding in chain] == [Severity.ERROR]
    assert peers.severity is Severity.ERROR
    assert all(finding.remedy for finding in [*chain, peers])


def test_a_report_hides_names_paths_and_addresses_but_not_the_runs_own(monkeypatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "alice")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/alice"))
    wallet = LocalSigner(b"\x44" * 32).address
    contract = COORDINATOR.address
    text = f"{wallet} in /home/alice/w.json on 203.0.113.9 of alice, {contract}, http://a:b@rpc, 127.0.0.1"
    hidden = redact(text, example_run())
    for secret in (wallet, "alice", "203.0.113.9", "a:b@"):
        assert secret not in hidden
    assert contract in hidden
    assert "127.0.0.1" in hidden


def test_a_status_file_survives_a_reader_at_any_time_and_garbage_is_none(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    write_status(tmp_path, NodeStatus(state="generating", version=3, head=5, lag=2))
    found = read_status(tmp_path)
    assert found is not None
    assert (found.state, found.version) == ("generating", 3)
    shown, running = describe(tmp_path, found.written_ms + 90_000)
    assert not running
    assert shown["state"] == "stopped 2 min ago"
    assert shown["policy"] == "version 3, 2 behind the head"
    (tmp_path / "status.json").write_bytes(b"\xff{")
    assert read_status(tmp_path) is None


def test_a_node_that_writes_no_status_any_more_is_said_to_hang(tmp_path: Path) -> None:
    from intellect_node.identity import lock_data_dir

    write_status(tmp_path, NodeStatus(state="generating", pid=1234))
    status = read_status(tmp_path)
    assert status is not None
    with lock_data_dir(tmp_path):
        assert describe(tmp_path, status.written_ms + 1_000)[0]["state"] == "generating"
        shown, running = describe(tmp_path, status.written_ms + 60_000)
    assert running
    assert "hanging" in str(shown["state"])
    assert "1234" in str(shown["state"])
