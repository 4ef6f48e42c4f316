"""The program's surface: settings in layers, errors with their exit codes, quick help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from intellect_protocol.errors import ConfigError
from intellect_trainer.config import RECIPES, TrainerConfig, resolve_config


def _resolve(tmp_path: Path, text: str = "", environ=None, flags=None):
    file = tmp_path / "trainer.toml"
    file.write_text(text)
    return resolve_config(file=file, environ=environ or {}, flags=flags or {})


def test_flags_win_over_environment_over_file_over_recipe_over_defaults(tmp_path) -> None:
    text = 'recipe = "tiny"\nlearning_rate = 1.0\nbeta1 = 0.5\nseed = 1\n'
    settings = _resolve(
        tmp_path, text, {"INTELLECT_TRAINER_BETA1": "0.6", "INTELLECT_SEED": "2"}, {"seed": 3, "beta2": None}
    )
    config = settings.value
    assert (config.seed, config.beta1, config.learning_rate) == (3, 0.6, 1.0)
    assert config.groups_per_step == RECIPES["tiny"]["groups_per_step"]
    assert config.beta2 == TrainerConfig().beta2
    assert settings.origins["groups_per_step"] == "recipe tiny"
    assert settings.origins["learning_rate"].endswith("trainer.toml:2")
    assert settings.origins["beta2"] == "default"


def test_the_defaults_are_the_intellect_2_recipe() -> None:
    config = resolve_config(file=None, environ={}, flags={}).value
    assert (config.groups_per_step, config.updates_per_step) == (256, 8)
    assert (config.learning_rate, config.beta1, config.beta2, config.weight_decay) == (3e-7, 0.9, 0.99, 0.01)
    assert (config.warmup_updates, config.max_grad_norm) == (25, 0.1)
    assert (config.clip_epsilon, config.clip_delta) == (0.2, 4.0)
    assert (config.kl_coefficient, config.entropy_coefficient) == (0.001, 1e-4)
    assert config.advantage_epsilon == 1e-4


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_consistent(recipe) -> None:
    resolve_config(file=None, environ={}, flags={"recipe": recipe})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat = 1", r"trainer.toml:1: unknown key 'learning_rat' \(did you mean learning_rate\?\)"),
        ("seed = 1\nbeta1 = 2.0", "beta1 and beta2 must lie in"),
        ('learning_rate = "fast"', "trainer.toml:1"),
        ("clip_delta = 1.1", "clip_delta must lie between"),
        ('recipe = "huge"', "unknown recipe 'huge'"),
        ("updates_per_step = 300", "updates_per_step is larger than groups_per_step"),
        ("learning_rate = nan", "learning_rate must be positive"),
        ("max_grad_norm = 0", "max_grad_norm must be positive"),
        ("= 3", "trainer.toml"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it(tmp_path, text, message) -> None:
    with pytest.raises(ConfigError, match=message):
        _resolve(tmp_path, text)


def test_an_unknown_variable_of_the_trainer_is_an_error() -> None:
    with pytest.raises(ConfigError, match="INTELLECT_TRAINER_LERNING_RATE"):
        resolve_config(file=None, environ={"INTELLECT_TRAINER_LERNING_RATE": "1"}, flags={})


def _program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "intellect_trainer", *arguments], capture_output=True, text=True, timeout=300
    )


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom intellect_trainer import cli\nfrom typer.testing import CliRunner\n"
        "result = CliRunner().invoke(cli.app, ['run', '--help'])\n"
        "assert result.exit_code == 0 and '--batches' in result.output, result.output\n"
        "heavy = {'torch', 'transformers', 'trio', 'numpy', 'web3', 'libp2p', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_the_exit_codes_are_in_the_help_and_used(tmp_path) -> None:
    assert "130 interrupted" in " ".join(_program("--help").stdout.split())
    unknown = _program("run", "--no-such-flag")
    assert unknown.returncode == 2
    missing = _program(
        "run", "--run", str(tmp_path / "none.toml"), "--data-dir", str(tmp_path), "--batches", str(tmp_path),
        "--key", str(tmp_path / "none.key"),
    )  # fmt: skip
    assert missing.returncode == 2
    assert missing.stderr.strip().splitlines()[-1].endswith("none.toml: No such file or directory")


def test_a_bad_key_file_is_a_key_error(tmp_path) -> None:
    from micro_run import make_run

    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "run.toml").write_text(make_run(tmp_path).to_toml())
    (tmp_path / "bad.key").write_bytes(b"short")
    result = _program(
        "run", "--run", str(tmp_path / "run.toml"), "--data-dir", str(tmp_path), "--batches", str(tmp_path),
        "--key", str(tmp_path / "bad.key"),
    )  # fmt: skip
    assert result.returncode == 5
    assert len(result.stderr.strip().splitlines()) == 1


def test_config_show_tells_where_values_come_from(tmp_path) -> None:
    (tmp_path / "trainer.toml").write_bytes(msgspec.toml.encode({"seed": 4}))
    shown = _program("config", "show", "--recipe", "tiny", "--config", str(tmp_path / "trainer.toml")).stdout
    assert "learning_rate = 0.0005  # recipe tiny" in shown
    assert f"seed = 4  # {tmp_path / 'trainer.toml'}:1" in shown


def test_worker_threads_share_one_heap() -> None:
    program = """
import ctypes, sys, threading
from intellect_trainer.cli import _prepare_torch
if sys.argv[1] == "prepared":
    _prepare_torch(1)
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
barrier = threading.Barrier(4)
def work():
    libc.malloc(ctypes.c_size_t(1000))
    barrier.wait()
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
stream = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, stream)
libc.fflush(stream)
"""
    heaps = {}
    for case in ("prepared", "plain"):
        command = [sys.executable, "-c", program, case]
        heaps[case] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.count(
            "<heap nr="
        )
    assert heaps["prepared"] == 1
    assert heaps["plain"] > 1
