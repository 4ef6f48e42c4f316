"""The command line: every kind of bad input gives one line and the exit code of the design."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from example_run import COORDINATOR, example_run
from world import World

from intellect_node import cli
from intellect_node.config import default_run_path, open_data_dir, set_default_run
from intellect_node.history import History
from intellect_node.identity import lock_data_dir, open_identity
from intellect_protocol.keys import LocalSigner, PeerKey, load_keystore, peer_id_text, write_keystore
from intellect_protocol.messages import (
    FindingNote,
    GetVerdictsResult,
    SubmissionState,
    TrainingState,
    WorkStatus,
)
from intellect_protocol.run import RunConfig

WALLET = LocalSigner(b"\x55" * 32)
_EXPENSIVE = (
    b'{"version": 3, "crypto": {"cipher": "aes-128-ctr", "kdf": "scrypt", '
    b'"kdfparams": {"n": 1073741824, "r": 8, "p": 1, "dklen": 32, "salt": "00"}}}'
)
Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with no configuration, no run and no INTELLECT variables."""
    for name in list(os.environ):
        if name.startswith("INTELLECT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Runs `intellect-node` in this process; exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["intellect-node", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture
def wallet(tmp_path: Path) -> list[str]:
    write_keystore(tmp_path / "wallet.json", WALLET, "secret", light=True)
    (tmp_path / "password").write_text("secret\n")
    return ["--wallet", str(tmp_path / "wallet.json"), "--password-file", str(tmp_path / "password")]


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_run(path: Path, world: World | None = None, **changes: object) -> RunConfig:
    """A run whose chain does not answer."""
    run = example_run()
    terms = run.terms
    if world is not None:
        ledger = msgspec.structs.replace(
            terms.ledger, chain_id=77, contracts=dict(world.ledger.deployment.contracts)
        )
        terms = msgspec.structs.replace(terms, ledger=ledger)
    terms = msgspec.structs.replace(terms, **changes)
    revision = msgspec.structs.replace(run.revision, rpc_urls=[f"http://127.0.0.1:{closed_port()}"])
    config = RunConfig(terms, revision).signed(COORDINATOR)
    path.write_text(config.to_toml())
    return config


def one_line(text: str) -> str:
    """The only line of an error."""
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    assert "Traceback" not in text
    return lines[0]


# Wallets


def test_a_new_wallet_is_private_opens_with_its_password_and_is_never_overwritten(
    invoke: Invoke, tmp_path: Path
) -> None:
    (tmp_path / "password").write_text("secret")
    code, out, _ = invoke("wallet", "new", "keys/w.json", "--password-file", "password")
    file = tmp_path / "keys" / "w.json"
    signer = load_keystore(file, "secret")
    assert code == 0
    assert signer.address in out
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    before = file.read_bytes()
    for command in (("new", file), ("import", file, "password")):
        code, _, err = invoke("wallet", *command, "--password-file", "password")
        assert code == 5
        assert "nothing was changed" in one_line(err)
        assert file.read_bytes() == before
    assert invoke("wallet", "show", file)[:2] == (0, f"{signer.address}\n")


@pytest.mark.parametrize("form", ["raw", "0x"])
def test_a_key_is_imported_as_it_is(invoke: Invoke, tmp_path: Path, form: str) -> None:
    secret = WALLET.secret()
    text = {"raw": secret, "0x": b"0x" + secret.hex().encode() + b"\n"}
    (tmp_path / "key").write_bytes(text[form])
    (tmp_path / "password").write_text("secret")
    code, out, err = invoke("wallet", "import", "w.json", "key", "--password-file", "password")
    assert code == 0
    assert load_keystore(tmp_path / "w.json", "secret").address == WALLET.address
    assert secret.hex() not in out + err


@pytest.mark.parametrize("content", [b"", b"zz" * 32, b"\x00" * 32, b"\xff" * 32, b"1" * 300])
def test_what_is_no_key_is_not_imported(invoke: Invoke, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    (tmp_path / "password").write_text("secret")
    code, _, err = invoke("wallet", "import", "w.json", "key", "--password-file", "password")
    assert code == 5
    one_line(err)
    assert not (tmp_path / "w.json").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such file"),
        (b"", "not JSON"),
        (b"[]", "not a keystore v3"),
        (b'{"version": 1}', "not a keystore v3"),
        (b'{"version": 3, "crypto": {}}', "damaged"),
        (_EXPENSIVE, "expensive"),
        (b" " * 100_000, "too large"),
    ],
)
def test_a_wallet_file_that_is_none_ends_join_with_the_code_for_keys(
    invoke: Invoke, tmp_path: Path, wallet: list[str], content: bytes | None, says: str
) -> None:
    bad = tmp_path / "bad.json"
    if content is not None:
        bad.write_bytes(content)
    code, _, err = invoke("join", *wallet, "--wallet", bad)
    assert code == 5
    assert says in one_line(err)


def test_a_wrong_or_missing_password_ends_join_with_the_code_for_keys(
    invoke: Invoke, tmp_path: Path, wallet: list[str]
) -> None:
    (tmp_path / "password").write_text("guess")
    code, _, err = invoke("join", *wallet)
    assert code == 5
    assert "wrong password" in one_line(err)
    assert "guess" not in err
    code, _, err = invoke("join", "--wallet", tmp_path / "wallet.json")
    assert code == 5
    assert "--password-file" in one_line(err)
    assert invoke("join")[0] == 5


# Configuration and run


def test_an_unknown_key_is_an_error_with_file_and_line(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text('device = "cpu"\nbatch = 3\n')
    code, _, err = invoke("join", "--config", "node.toml")
    assert code == 2
    assert "node.toml:2: unknown key 'batch'" in one_line(err)


def test_an_unknown_variable_is_an_error(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTELLECT_DEVCIE", "cpu")
    code, _, err = invoke("config", "show")
    assert code == 2
    assert "INTELLECT_DEVCIE" in one_line(err)


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("join", "--nonsense"),
        ("join", "--engine", "jax"),
        ("join", "--stake", "many"),
        ("join", "--max-units-ahead", "0"),
        ("work", "explain", "3-4"),
        ("reputation", "0x12"),
    ],
)
def test_wrong_usage_ends_with_two(invoke: Invoke, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    set_default_run(write_run(tmp_path / "run.toml"))
    code, _, err = invoke(*arguments)
    assert code == 2
    one_line(err)


def test_config_show_says_where_each_value_came_from(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "config" / "intellect-node" / "node.toml"
    own.parent.mkdir(parents=True)
    own.write_text('\ndevice = "cpu"\n')
    monkeypatch.setenv("INTELLECT_NODE_MAX_UNITS_AHEAD", "9")
    code, out, _ = invoke("config", "show", "--json")
    shown = json.loads(out)
    assert code == 0
    assert shown["device"] == {"value": '"cpu"', "origin": f"{own}:2"}
    assert shown["max_units_ahead"] == {"value": "9", "origin": "INTELLECT_NODE_MAX_UNITS_AHEAD"}
    assert shown["engine"]["origin"] == "default"


def test_without_a_run_join_says_how_to_name_one(invoke: Invoke, wallet: list[str]) -> None:
    code, _, err = invoke("join", *wallet)
    assert code == 2
    assert "--run" in one_line(err)


@pytest.mark.parametrize("damage", ["absent", "not toml", "unknown key", "signature"])
def test_a_run_configuration_that_is_none_ends_with_two(
    invoke: Invoke, tmp_path: Path, wallet: list[str], damage: str
) -> None:
    path = tmp_path / "run.toml"
    write_run(path)
    if damage == "absent":
        path.unlink()
    elif damage == "not toml":
        path.write_text("terms = [")
    elif damage == "unknown key":
        path.write_text("surprise = 1\n" + path.read_text())
    else:
        path.write_text(path.read_text().replace("head_poll_s = 5.0", "head_poll_s = 6.0"))
    code, _, err = invoke("join", *wallet, "--run", path)
    assert code == 2
    assert "run.toml" in one_line(err) or "signed" in err


def test_a_run_is_not_taken_over_plain_http(invoke: Invoke, wallet: list[str]) -> None:
    code, _, err = invoke("join", *wallet, "--run", "http://192.0.2.1/run.toml")
    assert code == 2
    assert "https" in one_line(err)


def test_a_bare_join_works_for_the_default_run(
    invoke: Invoke, tmp_path: Path, wallet: list[str], world: World
) -> None:
    config = write_run(tmp_path / "run.toml", world)
    code, out, _ = invoke("config", "set-run", "run.toml")
    assert code == 0
    assert config.run_id.hex()[:16] in out
    assert default_run_path().read_text() == config.to_toml()
    code, out, err = invoke("join", *wallet)
    assert code == 4  # it got as far as the chain, which does not answer
    assert "chain" in one_line(err)
    folder = tmp_path / "data" / "intellect-node" / "runs" / config.run_id.hex()[:16] / "node"
    assert (folder / "run.toml").read_text() == config.to_toml()


def test_a_data_directory_belongs_to_one_run(invoke: Invoke, tmp_path: Path, wallet: list[str]) -> None:
    first = write_run(tmp_path / "first.toml")
    settings_dir = tmp_path / "node"
    from intellect_node.config import NodeConfig

    open_data_dir(NodeConfig(data_dir=settings_dir), first)
    write_run(tmp_path / "second.toml", name="second")
    code, _, err = invoke("join", *wallet, "--run", "second.toml", "--data-dir", settings_dir)
    assert code == 2
    assert "belongs to run example" in one_line(err)


def test_a_run_that_needs_a_newer_protocol_ends_with_ten(
    invoke: Invoke, tmp_path: Path, wallet: list[str]
) -> None:
    write_run(tmp_path / "run.toml", protocol=999)
    code, _, err = invoke("join", *wallet, "--run", "run.toml")
    assert code == 10
    assert "needs 999" in one_line(err)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--device", "cuda:9"), "device cuda:9"),
        (("--engine", "vllm"), "vllm engine is not installed"),
    ],
)
def test_an_engine_that_cannot_run_here_ends_join_before_anything_is_sent(
    invoke: Invoke, tmp_path: Path, wallet: list[str], flags: tuple[str, ...], says: str
) -> None:
    write_run(tmp_path / "run.toml")
    code, _, err = invoke("join", *wallet, "--run", "run.toml", "--data-dir", "node", *flags)
    assert code == 3
    assert says in one_line(err)
    assert not (tmp_path / "node" / "node.key").exists()


def test_a_second_node_in_the_same_data_directory_is_refused(
    invoke: Invoke, tmp_path: Path, wallet: list[str]
) -> None:
    from intellect_node.config import NodeConfig

    folder = open_data_dir(NodeConfig(data_dir=tmp_path / "node"), write_run(tmp_path / "run.toml"))
    with lock_data_dir(folder):
        code, _, err = invoke("join", *wallet, "--data-dir", folder)
    assert code == 3
    assert "already running" in one_line(err)


# Peers and signals


def test_a_coordinator_that_does_not_answer_ends_with_four(invoke: Invoke, wallet: list[str]) -> None:
    peer = peer_id_text(PeerKey.create().peer_id)
    code, _, err = invoke("join", *wallet, "--coordinator", f"/ip4/127.0.0.1/tcp/{closed_port()}/p2p/{peer}")
    assert code == 4
    assert "does not answer" in one_line(err)


def test_an_address_that_is_none_ends_with_two(invoke: Invoke, wallet: list[str]) -> None:
    code, _, err = invoke("join", *wallet, "--coordinator", "example.org:4001")
    assert code == 2
    assert "not a peer address" in one_line(err)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_a_waiting_join_with_its_code(
    tmp_path: Path, wallet: list[str], number: int, code: int
) -> None:
    with socket.socket() as silent:  # accepts connections and never says a word
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(60)
        peer = peer_id_text(PeerKey.create().peer_id)
        address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{peer}"
        command = [sys.executable, "-m", "intellect_node", "join", *wallet, "--coordinator", address]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            silent.accept()[0].close()
            process.send_signal(number)
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == code
    assert "Traceback" not in err


# What the node says about itself


def test_status_of_a_node_that_never_ran_is_no_success(invoke: Invoke, tmp_path: Path) -> None:
    code, out, _ = invoke("status", "--data-dir", tmp_path / "nothing", "--json")
    assert code == 4
    assert json.loads(out) == {"running": False, "status": None}


def test_whoami_shows_the_keys_that_exist_and_makes_none(
    invoke: Invoke, tmp_path: Path, world: World, wallet: list[str]
) -> None:
    from intellect_node.config import NodeConfig

    folder = open_data_dir(NodeConfig(data_dir=tmp_path / "node"), write_run(tmp_path / "run.toml", world))
    code, out, _ = invoke("whoami", "--data-dir", folder, "--wallet", wallet[1], "--json")
    shown = json.loads(out)
    assert code == 0
    assert shown["wallet"] == WALLET.address
    assert "none yet" in shown["node key"]
    assert "not read" in shown["ledger"]  # the chain does not answer, and says so
    assert sorted(path.name for path in folder.iterdir()) == ["run.toml"]


def make_history(tmp_path: Path) -> Path:
    """A data directory with one refused and one waiting unit."""
    from intellect_node.config import NodeConfig

    run = write_run(tmp_path / "run.toml")
    folder = open_data_dir(NodeConfig(data_dir=tmp_path / "node"), run)
    identity = open_identity(folder, WALLET, lambda text: None)
    history = History(folder, run.run_id, identity.node.address)
    refused = history.sign_work(identity.node, run.run_id, 7, bytes(32), 0, b"work", 1_000)
    history.sign_work(identity.node, run.run_id, 7, bytes(32), 1, b"more", 2_000)
    finding = FindingNote("sampling", "far_tokens", "fraud", 3, 0.4, 0.01, "tokens are not the draw")
    status = WorkStatus(
        7,
        0,
        refused.file_hash,
        SubmissionState.REJECTED,
        TrainingState.NONE,
        {"rejected": 9_000},
        [finding],
        4,
    )
    history.apply_verdicts(GetVerdictsResult([status], 1, False))
    history.close()
    identity.lock.release()
    return folder


def test_work_list_and_explain_say_check_row_value_limit_and_remedy(invoke: Invoke, tmp_path: Path) -> None:
    folder = make_history(tmp_path)
    code, out, _ = invoke("work", "list", "--data-dir", folder, "--json")
    units = json.loads(out)
    assert code == 0
    assert [(unit["unit"], unit["state"]) for unit in units] == [
        ("7/1", "waiting to be sent"),
        ("7/0", "rejected"),
    ]
    assert units[1]["times_ms"] == {"signed": 1_000, "rejected": 9_000}
    code, out, _ = invoke("work", "explain", "7/0", "--data-dir", folder)
    assert code == 0
    assert "fraud: sampling/far_tokens row 3 measured 0.4 limit 0.01" in out
    assert "what to do (sampling)" in out
    assert "case 4" in out
    code, _, err = invoke("work", "explain", "7/9", "--data-dir", folder)
    assert code == 2
    assert "never signed" in one_line(err)


def test_an_error_shows_its_place_only_when_asked(invoke: Invoke, wallet: list[str]) -> None:
    assert "Traceback" not in invoke("join", *wallet)[2]
    assert "Traceback" in invoke("--debug", "join", *wallet)[2]
    assert "Traceback" in invoke("join", *wallet, "--debug")[2]


@pytest.mark.parametrize("command", [[], ["join"], ["wallet"], ["work"], ["config"], ["devnet"], ["doctor"]])
def test_every_command_has_help_and_the_exit_codes_are_in_it(invoke: Invoke, command: list[str]) -> None:
    code, out, _ = invoke(*command, "--help")
    assert code == 0
    assert "Usage" in out
    assert "--password " not in out  # a flag would show the passphrase to every user of the machine
    if command != ["devnet"]:
        assert "130 interrupted" in " ".join(out.split())
