"""kill -9 at any moment, restart, same curve; and what others saw before the crash still holds."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import msgspec
import pytest
import trio
from micro_run import CONFIG, COORDINATOR, NODE, PUBLISHER, feed, make_model, make_run, manifest_of, manifests
from safetensors.torch import load_file

from intellect_protocol.checkpoint import ManifestLimits, verify_folder, verify_manifest
from intellect_protocol.errors import ConfigError, PreflightError, WalletError
from intellect_protocol.wire import sha256
from intellect_trainer.config import TrainerConfig
from intellect_trainer.session import RunOptions, open_session

STEPS = 8
DEADLINE_S = 300.0
FORK = get_context("fork")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "v0"
    make_model(folder)
    return folder


def _options(folder: Path, root: Path, config: TrainerConfig = CONFIG, **changes) -> RunOptions:
    run = make_run(folder)
    return RunOptions(
        run=run,
        config=config,
        data_dir=root / "trainer",
        batches=root / "batches",
        signer=PUBLISHER,
        **{"checkpoint": folder, "steps": STEPS, **changes},
    )


def _train(options: RunOptions) -> None:
    from intellect_trainer.loop import train

    trio.run(train, options)


def _start(options: RunOptions):
    process = FORK.Process(target=_train, args=(options,))
    process.start()
    return process


def _feed_until(done, options: RunOptions) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline, "the trainer does not get on"
        feed(options.data_dir / "checkpoints", options.batches, options.run)
        time.sleep(0.005)


def _train_undisturbed(options: RunOptions) -> None:
    process = _start(options)
    _feed_until(lambda: not process.is_alive(), options)
    assert process.exitcode == 0


def _curve(options: RunOptions) -> list[dict]:
    """The lines of metrics.jsonl without those that depend on the clock."""
    timed = {"tokens_per_s", "step_s", "idle_share", "seconds_since_first_step"}
    lines = (options.data_dir / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in timed} for line in lines]


def _final_state(options: RunOptions) -> dict:
    return load_file(options.data_dir / "resume" / f"v{STEPS:08d}" / "model.safetensors")


def _outcomes(options: RunOptions) -> dict[str, dict[str, str]]:
    return {path.name: json.loads(path.read_text()) for path in (options.batches / "outcomes").glob("*.json")}


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory: pytest.TempPathFactory) -> RunOptions:
    options = _options(folder, tmp_path_factory.mktemp("undisturbed"))
    _train_undisturbed(options)
    return options


def test_every_version_is_published_with_a_manifest_that_verifies(undisturbed) -> None:
    checkpoints = undisturbed.data_dir / "checkpoints"
    found = manifests(checkpoints)
    assert sorted(found) == list(range(STEPS + 1))
    run = undisturbed.run
    for version, signed in found.items():
        manifest = verify_manifest(
            signed, run.run_id, PUBLISHER.address, ManifestLimits(max_checkpoint_bytes=1 << 30)
        )
        assert manifest.parent_version == (version - 1 if version else None)
        batch = undisturbed.batches / f"v{version - 1:08d}" / f"{NODE.hex()}-000000.parquet"
        assert manifest.batches == ([sha256(batch.read_bytes())] if version else [])
        kept = version == 0 or version > STEPS - CONFIG.keep_checkpoints
        assert (checkpoints / f"v{version:08d}").exists() is kept
        if kept:
            verify_folder(checkpoints / f"v{version:08d}", manifest)
    assert len({manifest_of(signed).state_hash for signed in found.values()}) == STEPS + 1


def test_the_probe_is_what_an_engine_that_loads_the_checkpoint_computes(undisturbed) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    checkpoints = undisturbed.data_dir / "checkpoints"
    probe = manifest_of(manifests(checkpoints)[STEPS]).probe
    model = AutoModelForCausalLM.from_pretrained(checkpoints / f"v{STEPS:08d}")
    with torch.no_grad():
        log_p = torch.log_softmax(model(torch.tensor([probe.prompt])).logits[0], dim=-1)
    expected = [float(log_p[at, token]) for at, token in enumerate(probe.prompt[1:])]
    assert probe.logprobs == pytest.approx(expected, abs=1e-5)


def test_every_unit_has_its_outcome_in_the_file_of_its_step(undisturbed) -> None:
    outcomes = _outcomes(undisturbed)
    for version in range(1, STEPS + 1):
        batch = undisturbed.batches / f"v{version - 1:08d}" / f"{NODE.hex()}-000000.parquet"
        assert outcomes[f"{version:08d}.json"] == {sha256(batch.read_bytes()).hex(): "trained"}


def test_a_run_killed_again_and_again_has_the_same_curve_and_the_same_weights(
    folder, undisturbed, tmp_path
) -> None:
    options = _options(folder, tmp_path)
    chance = random.Random(4)
    published: dict[int, bytes] = {}
    checkpoints = options.data_dir / "checkpoints"
    for kill in range(STEPS + 1):
        process = _start(options)
        # Somewhere in start-up, training or publication of about the next version.
        _feed_until(lambda: len(manifests(checkpoints)) >= kill, options)  # noqa: B023
        kill_at = time.monotonic() + chance.uniform(0.0, 0.15)
        _feed_until(lambda: time.monotonic() > kill_at, options)  # noqa: B023
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        for version, signed in manifests(checkpoints).items():
            # What was published before a crash is never published differently after it.
            assert published.setdefault(version, signed.manifest) == signed.manifest
    _train_undisturbed(options)
    assert _curve(options) == _curve(undisturbed)
    assert _outcomes(options).keys() == _outcomes(undisturbed).keys()
    ours, theirs = _final_state(options), _final_state(undisturbed)
    assert ours.keys() == theirs.keys()
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)


def test_a_published_version_without_its_resume_checkpoint_is_refused(folder, tmp_path) -> None:
    options = _options(folder, tmp_path, steps=2)
    _train_undisturbed(options)
    shutil.rmtree(options.data_dir / "resume")
    with pytest.raises(ConfigError, match="version 2 is published"):
        open_session(options)


def test_pieces_that_do_not_belong_together_are_refused(folder, tmp_path) -> None:
    with pytest.raises(WalletError, match="the run's publisher is"):
        open_session(dataclasses.replace(_options(folder, tmp_path / "a"), signer=COORDINATOR))
    with pytest.raises(ConfigError, match="--checkpoint"):
        open_session(_options(folder, tmp_path / "b", checkpoint=None))
    with pytest.raises(ConfigError, match="not a model folder"):
        open_session(_options(folder, tmp_path / "c", checkpoint=tmp_path))
    options = _options(folder, tmp_path / "d")
    terms = msgspec.structs.replace(options.run.terms.model, hidden_size=65)
    run = msgspec.structs.replace(options.run, terms=msgspec.structs.replace(options.run.terms, model=terms))
    with pytest.raises(ConfigError, match="hidden_size is 64, the run says 65"):
        open_session(dataclasses.replace(options, run=run))


def test_two_trainers_do_not_share_a_data_directory(folder, tmp_path) -> None:
    options = _options(folder, tmp_path)
    session = open_session(options)
    with pytest.raises(PreflightError, match="in use by another trainer"):
        open_session(options)
    session.close()
    open_session(options).close()


def test_sigterm_ends_the_program_cleanly_and_it_goes_on_later(folder, undisturbed, tmp_path) -> None:
    options = _options(folder, tmp_path)
    (tmp_path / "run.toml").write_text(options.run.to_toml())
    (tmp_path / "publisher.key").write_bytes(PUBLISHER.secret())
    (tmp_path / "trainer.toml").write_bytes(msgspec.toml.encode(CONFIG))
    command = [
        sys.executable, "-m", "intellect_trainer", "run", "--run", str(tmp_path / "run.toml"),
        "--config", str(tmp_path / "trainer.toml"), "--data-dir", str(options.data_dir),
        "--batches", str(options.batches), "--key", str(tmp_path / "publisher.key"),
        "--checkpoint", str(folder), "--steps", str(STEPS),
    ]  # fmt: skip
    with subprocess.Popen(command) as process:
        try:
            _feed_until(lambda: 3 in manifests(options.data_dir / "checkpoints"), options)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=DEADLINE_S) == 0
        finally:
            process.kill()
    status = json.loads((options.data_dir / "status.json").read_text())
    assert (status["state"], status["finished"]) == ("stopped", False)
    _train_undisturbed(options)
    assert _curve(options) == _curve(undisturbed)
    status = json.loads((options.data_dir / "status.json").read_text())
    assert status["finished"] is True
    assert status["version"] == STEPS
    assert len(status["reward_history"]) == STEPS
