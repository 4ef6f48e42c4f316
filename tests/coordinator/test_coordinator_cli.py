"""The command line: what it loads, what it refuses, and a run made from nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import trio
from audit_site import write_policy
from coordinator_site import FRAUD, NODE, Site, plain_file
from devchain_process import DevchainProcess
from world import COORDINATOR, PUBLISHER, VALIDATORS

from intellect_coordinator.cli import main
from intellect_coordinator.new_run import model_terms, parse_environment
from intellect_protocol.errors import ConfigError, UsageError
from intellect_protocol.keys import write_secret
from intellect_protocol.ledger.client import Ledger
from intellect_protocol.ledger.deployment import Deployment
from intellect_protocol.run import load_run_config


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("INTELLECT_")}
    return subprocess.run(
        [sys.executable, "-m", "intellect_coordinator", *arguments],
        capture_output=True,
        text=True,
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        timeout=180,
        check=False,
    )


def test_parsing_the_command_line_loads_nothing_heavy() -> None:
    heavy = "torch transformers web3 libp2p sqlalchemy aiohttp pyarrow numpy msgspec trio"
    code = f"import sys, intellect_coordinator.cli\nprint(sorted(set({heavy.split()!r}) & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_wrong_use_is_one_line_and_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    write_secret(key, b"\x01" * 31)
    bad_config = tmp_path / "coordinator.toml"
    bad_config.write_text("lease_s = 5\nleese_s = 3\n")
    cases: list[tuple[list[str], dict[str, str], int, str]] = [
        (["serve"], {}, 2, "--run"),
        (["serve", "--run", str(tmp_path / "missing.toml")], {}, 2, "missing.toml"),
        (["serve", "--config", str(bad_config)], {}, 2, "coordinator.toml:2"),
        (["serve"], {"INTELLECT_COORDINATOR_LEESE_S": "3"}, 2, "LEESE_S"),
        (["validate", "--engine", "abacus"], {}, 2, "--engine"),
        (["audit", str(tmp_path / "missing")], {}, 2, "missing"),
        (["audit", str(key)], {}, 1, "malformed"),
        (["submissions", "list"], {}, 2, "--data-dir"),
        (["submissions", "list", "--data-dir", str(tmp_path)], {}, 2, "no coordinator"),
        (["nonsense"], {}, 2, "nonsense"),
    ]
    for name in [name for name in os.environ if name.startswith("INTELLECT_")]:
        monkeypatch.delenv(name)
    for arguments, environment, code, text in cases:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["intellect-coordinator", *arguments])
            for name, value in environment.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main()
        output = capsys.readouterr().err
        assert ended.value.code == code, (arguments, output)
        assert text in output
        assert len(output.strip().splitlines()) == 1, output


def test_a_new_run_is_deployed_opened_and_signed(tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "policy", seed=0)
    keys = {"coordinator": COORDINATOR, "publisher": PUBLISHER}
    for name, signer in keys.items():
        write_secret(tmp_path / "keys" / name, signer.secret())
    chain = DevchainProcess(tmp_path / "chain")
    arguments = [
        *("init", "--name", "trial", "--out", str(tmp_path / "run"), "--rpc", chain.url),
        *("--key", str(tmp_path / "keys/coordinator"), "--publisher-key", str(tmp_path / "keys/publisher")),
        *("--checkpoint", str(policy), "--environment", "sort_digits*2:max_digits=5", "--preset", "tiny"),
        *("--environment", "arithmetic", "--bootstrap", "/ip4/127.0.0.1/tcp/4001/p2p/x", "--development"),
        *("--async-level", "1", "--temperature", "1"),
        *(word for validator in VALIDATORS for word in ("--validator", validator.address)),
    ]
    try:
        run = command(*arguments)
        assert run.returncode == 0, run.stderr
        config = load_run_config(tmp_path / "run" / "run.toml")
        assert config.terms.sampling.stop_ids == [1]
        assert [(each.name, each.weight, each.params) for each in config.terms.environments] == [
            ("sort_digits", 2, {"max_digits": 5}),
            ("arithmetic", 1, {}),
        ]
        assert config.revision.window.async_level == 1

        async def on_ledger() -> tuple[str | None, int, int]:
            ledger = Ledger([chain.url], Deployment.load(tmp_path / "run" / "deployment.json"))
            try:
                opened = await ledger.run(config.run_id)
                tokens = await ledger.token_balance(COORDINATOR.address)
                members = await ledger.validator_set()
                return opened.publisher if opened else None, tokens, len(members.members)
            finally:
                ledger.close()

        publisher, tokens, members = trio.run(on_ledger)
        assert publisher == PUBLISHER.address
        assert tokens > 0  # a reporter's bond can be paid
        assert members == 3
        again = command(*arguments)
        assert again.returncode == 2
        assert "nothing was changed" in again.stderr
        # Interrupted before run.toml: the same contracts, the same run.
        (tmp_path / "run" / "run.toml").unlink()
        assert command(*arguments).returncode == 0
        assert load_run_config(tmp_path / "run" / "run.toml").run_id == config.run_id
    finally:
        chain.kill()


@pytest.mark.parametrize("text", ["", "nothing", "sort_digits:x", "sort_digits:nope=1", "sort_digits*two"])
def test_an_environment_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises((UsageError, ConfigError)):
        parse_environment(text)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_terms(tmp_path, None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer"):
        model_terms(tmp_path, None)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        model_terms(tmp_path, None)


def test_submissions_are_listed_and_explained(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def says(*arguments: str) -> tuple[int, str]:
        argv = ["intellect-coordinator", "submissions", *arguments, "--data-dir", str(site.folder)]
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", argv)
            with pytest.raises(SystemExit) as ended:
                main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, capsys.readouterr().out

    async def work() -> None:
        await site.submit(plain_file(site, 0), 0)
        await site.judge("rejected", FRAUD, msgspec.structs.replace(FRAUD, measured=0.2, text="a lesser one"))

    trio.run(work)
    (entry,) = json.loads(says("list", "--json")[1])
    assert (entry["node"], entry["state"]) == (f"0x{NODE.address_bytes.hex()}", "rejected")
    assert "rejected" in says("list", "--node", NODE.address)[1]
    assert says("list", "--state", "accepted") == (0, "")
    code, text = says("explain", str(entry["id"]))
    assert code == 0
    assert "fraud: sampling/sampling_distance: row 3: not what the seed draws: 0.5, limit 0.1" in text
    assert "the worst of 2" in text
    assert "a lesser one" not in text
    assert VALIDATORS[0].address in text
    assert says("explain", "99")[0] == 2
