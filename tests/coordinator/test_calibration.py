"""`intellect-coordinator calibrate` on a small random model: real engines, a real measuring process."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
import torch
import trio
from example_run import COORDINATOR, PUBLISHER, example_run

from intellect_coordinator.calibration.command import CalibrateOptions, calibrate, next_revision, tables
from intellect_coordinator.calibration.detection import findings_of
from intellect_coordinator.calibration.measured import completions_of, scores_of
from intellect_coordinator.calibration.plan import Plan, Setting, read_plan, scored_file
from intellect_coordinator.calibration.report import Report
from intellect_coordinator.calibration.values import UnitScores
from intellect_coordinator.new_run import model_terms
from intellect_protocol.errors import ConfigError, UsageError, WalletError
from intellect_protocol.run import EnvironmentTerms, RunConfig, SamplingTerms, Thresholds, load_run_config
from intellect_protocol.wire import encode
from intellect_trainer.models.folder import write_model_folder
from intellect_trainer.models.tiny import character_tokenizer, new_model

CHUNKS = 80


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = character_tokenizer()
    eos = tokenizer.eos_token_id
    policy = new_model(len(tokenizer), eos_id=eos, pad_id=tokenizer.pad_token_id, seed=0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)  # opinions, without which no cheat would change a token
            elif name == "model.norm.weight":
                parameter.mul_(2.0)
    folder = tmp_path_factory.mktemp("model") / "policy"
    write_model_folder(policy, tokenizer, folder, dtype="float32", stop_ids=[eos])
    return folder


@pytest.fixture(scope="module")
def run_file(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = example_run()
    terms, stop_ids = model_terms(model, False)
    terms = msgspec.structs.replace(
        run.terms,
        model=terms,
        environments=[EnvironmentTerms("sort_digits")],
        sampling=SamplingTerms(1.0, 40, stop_ids, prompts_per_unit=2, samples_per_prompt=4),
    )
    path = tmp_path_factory.mktemp("run") / "run.toml"
    path.write_text(RunConfig(terms, run.revision).signed(COORDINATOR).to_toml())
    return path


def options(model: Path, work: Path, **changes: object) -> CalibrateOptions:
    chosen = CalibrateOptions(model=model, work=work, chunks=CHUNKS, cheat_units=1)
    return msgspec.structs.replace(chosen, **changes)


def calibrated(chosen: CalibrateOptions) -> Report:
    return trio.run(calibrate, chosen, lambda progress: None)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibration")


@pytest.fixture(scope="module")
def report(model: Path, run_file: Path, work: Path) -> Report:
    return calibrated(options(model, work, run=run_file))


def honest_units(work: Path, plan: Plan) -> list[UnitScores]:
    return [
        UnitScores(
            [one for group in completions_of(work, source, unit) for one in group],
            scores_of(work, source, verifier, unit),
            plan.samples,
        )
        for source in plan.honest
        for verifier in source.verifiers
        for unit in plan.units_of(source)
    ]


def test_the_limits_contain_all_honest_work_that_was_measured(report: Report, work: Path) -> None:
    units = honest_units(work, read_plan(work))
    assert sum(unit.chunks for unit in units) == report.chunks >= CHUNKS
    assert [finding for unit in units for finding in findings_of(unit, report.thresholds)] == []
    assert report.honest.unit.suspect == 0
    assert 0 < report.honest.unit.fraud_bound < 1
    assert 2 * report.tested_chunks == pytest.approx(report.chunks, rel=0.6)


def test_kernels_dtypes_batch_sizes_threads_and_padding_vary_on_both_sides(
    report: Report, work: Path
) -> None:
    plan = read_plan(work)
    generators = [source.setting for source in plan.honest]
    verifiers = [verifier for source in plan.honest for verifier in source.verifiers]
    for side in (generators, verifiers):
        assert {1, 32} <= {each.rows for each in side}
        assert {1, 2} == {each.threads for each in side}
        assert {"sdpa", "eager"} <= {each.attention for each in side}
        assert any(each.attention.startswith("transformers-") for each in side)  # pads on the left
    assert len(report.pairs) < len(set(generators)) * len(set(verifiers))


@pytest.mark.parametrize("cheat", ["int4", "dropped_layer", "temperature_0.9", "constant_polynomial"])
def test_a_gross_cheat_is_fraud_in_every_unit(report: Report, cheat: str) -> None:
    found = {each.cheat: each for each in report.cheats}
    assert found[cheat].unit.fraud == 1
    assert found[cheat].codes[0][1] == 1


def test_intellect_2s_limits_are_judged_on_the_same_proofs(report: Report) -> None:
    found = {each.cheat: each for each in report.cheats}
    assert found["dropped_layer"].intellect_2_chunk == 1
    assert found["older_1"].intellect_2_unit == 0
    assert found["temperature_0.9"].intellect_2_unit == 0


def test_more_slack_gives_a_cheat_more_freedom(report: Report) -> None:
    suspect, fraud = report.steering
    assert 0 <= suspect.plausible_bits <= suspect.bits <= fraud.bits


def test_the_next_revision_is_signed_and_says_where_its_thresholds_come_from(
    report: Report, model: Path, run_file: Path, work: Path, tmp_path: Path
) -> None:
    out = tmp_path / "next.toml"
    calibrated(options(model, work, run=run_file, signer=COORDINATOR, from_version=7, out=out))
    before, after = load_run_config(run_file), load_run_config(out)
    assert after.run_id == before.run_id
    assert after.revision.number == before.revision.number + 1
    assert after.revision.from_version == 7
    assert after.revision.thresholds == report.thresholds
    record = after.revision.calibration
    assert record is not msgspec.UNSET
    assert record.report_hash == hashlib.sha256((work / "report.json").read_bytes()).hexdigest()
    assert record.chunks >= CHUNKS
    assert 0 < record.false_fraud_chunk < 0.1
    assert {rate.cheat: rate.fraud for rate in record.detection}["int4"] == 1
    tampered = msgspec.structs.replace(record, false_fraud_chunk=0.0)
    revision = msgspec.structs.replace(after.revision, calibration=tampered)
    with pytest.raises(ConfigError, match="not signed"):
        msgspec.structs.replace(after, revision=revision).check()


def test_a_revision_without_calibration_has_the_bytes_it_always_had() -> None:
    assert b"calibration" not in encode(example_run().revision)
    assert "calibration" not in example_run().to_toml()


def test_without_a_key_the_tables_are_what_a_revision_takes(report: Report) -> None:
    plain = tomllib.loads(tables(report))["revision"]
    assert msgspec.convert(plain["thresholds"], Thresholds) == report.thresholds
    signed = next_revision(example_run(), report, COORDINATOR, None)
    assert plain["calibration"] == msgspec.to_builtins(signed.revision.calibration)


def test_a_calibration_that_was_killed_goes_on_and_ends_alike(
    report: Report, model: Path, run_file: Path, work: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    again.mkdir()
    (again / "plan.json").write_bytes((work / "plan.json").read_bytes())
    module = "intellect_coordinator.calibration.measure"
    with subprocess.Popen([sys.executable, "-m", module, str(again)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(5):
            assert process.stdout.readline()
        process.kill()
    measured = sorted((again / "generated").rglob("*.msgpack"))
    times = {path: path.stat().st_mtime_ns for path in measured}
    assert times
    assert calibrated(options(model, again, run=run_file)) == report
    assert {path: path.stat().st_mtime_ns for path in measured} == times


def test_what_is_measured_is_not_measured_again(
    report: Report, model: Path, run_file: Path, work: Path
) -> None:
    files = {path: path.stat().st_mtime_ns for path in work.rglob("*.msgpack")}
    assert calibrated(options(model, work, run=run_file)) == report
    assert {path: path.stat().st_mtime_ns for path in work.rglob("*.msgpack")} == files


def test_a_damaged_measurement_is_named(report: Report, model: Path, run_file: Path, work: Path) -> None:
    plan = read_plan(work)
    source = plan.honest[0]
    path = scored_file(work, source, source.verifiers[0], 0)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    try:
        with pytest.raises(ConfigError, match=path.name):
            calibrated(options(model, work, run=run_file))
    finally:
        path.write_bytes(whole)


def test_a_folder_takes_one_calibration(report: Report, model: Path, run_file: Path, work: Path) -> None:
    with pytest.raises(UsageError, match="--work"):
        calibrated(options(model, work, run=run_file, seed=1))


def test_bad_input_is_refused_before_anything_is_measured(
    model: Path, run_file: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    with pytest.raises(ConfigError, match="checkpoint folder"):
        calibrated(options(tmp_path / "nowhere", work))
    with pytest.raises(UsageError, match="--chunks"):
        calibrated(options(model, work, chunks=0))
    with pytest.raises(UsageError, match="--run"):
        calibrated(options(model, work, signer=COORDINATOR))
    with pytest.raises(UsageError, match="--from-version"):
        calibrated(options(model, work, run=run_file, from_version=3))
    with pytest.raises(WalletError, match="coordinator"):
        calibrated(options(model, work, run=run_file, signer=PUBLISHER))
    other = example_run()
    (tmp_path / "other.toml").write_text(other.to_toml())
    with pytest.raises(ConfigError, match="not the run's model"):
        calibrated(options(model, work, run=tmp_path / "other.toml"))
    assert not work.exists()


def test_an_error_of_the_measuring_process_is_the_commands_error(
    model: Path, run_file: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in model.iterdir():
        data = path.read_bytes()
        (broken / path.name).write_bytes(data[:-1000] if path.name == "model.safetensors" else data)
    with pytest.raises(ConfigError, match="safetensors"):
        calibrated(options(broken, tmp_path / "work", run=run_file))


def test_a_setting_names_its_files() -> None:
    assert Setting("bfloat16", "eager", 8, 2).name == "bf16-eager-8-2"
