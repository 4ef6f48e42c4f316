"""`intellect-coordinator calibrate`: measure, fit, and put the limits into the run configuration.

<work>/plan.json      what is measured; another plan needs another folder, more units do not
<work>/generated, scored, choices.msgpack      what has been measured
<work>/report.json    the result
<work>/measure.log    what the measuring process said
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import msgspec
import trio

from intellect_protocol.errors import (
    ConfigError,
    EngineError,
    IntellectError,
    NumericError,
    PreflightError,
    UsageError,
    WalletError,
)
from intellect_protocol.keys import LocalSigner
from intellect_protocol.run import RunConfig, load_run_config
from intellect_protocol.toploc import chunk_count

from .measure_progress import Progress
from .plan import PLAN_FILE, Plan, make_sources, read_plan
from .report import Report, honest_chunks, make_report
from .workload import Workload, make_workload, weights_hash

_MAX_LINE_BYTES = 1 << 16
_MAX_GROWTH = 8
_MAX_UNITS = 4096
_ERRORS = {kind.__name__: kind for kind in (ConfigError, NumericError, PreflightError, UsageError)}

Show = Callable[[Progress], None]


class CalibrateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for.

    Attributes:
        chunks: honest ones to verify, at least, counted once per pair of settings.
        cheat_units: units of each cheat.
        signer: the coordinator's; with it the run's next revision is written.
        from_version: from which that revision holds; None: as the one before.
        out: where the result goes; None: over `run` with a signer, else nowhere.
    """

    model: Path
    work: Path
    run: Path | None = None
    chunks: int = 2000
    cheat_units: int = 2
    seed: int = 0
    learning_rate: float = 1e-5
    signer: LocalSigner | None = None
    from_version: int | None = None
    out: Path | None = None

    def check(self) -> None:
        """
        Raises:
            UsageError: a value makes no sense.
        """
        if not 1 <= self.chunks <= 1 << 24:
            raise UsageError(f"--chunks must be from 1 to {1 << 24}")
        if not 1 <= self.cheat_units <= _MAX_UNITS:
            raise UsageError(f"--cheat-units must be from 1 to {_MAX_UNITS}")
        if not 0 < self.learning_rate < 1:
            raise UsageError("--learning-rate must be between 0 and 1")
        if not 0 <= self.seed < 1 << 32:
            raise UsageError("--seed must be from 0 to 2**32 - 1")
        if self.signer is not None and self.run is None:
            raise UsageError("--key signs a revision of a run: name its run.toml with --run")
        if self.from_version is not None and (self.signer is None or self.from_version < 0):
            raise UsageError("--from-version is a version, and goes with --run and --key")


async def calibrate(options: CalibrateOptions, show: Show) -> Report:
    """Measure what is not measured yet, and write the results.

    Raises:
        UsageError: options that make no sense, or a folder that holds another calibration.
        ConfigError: the model, the run configuration or a measurement cannot be used.
        WalletError: the key is not the run's coordinator key.
        EngineError: the measuring process ended.
    """
    options.check()
    config = None if options.run is None else load_run_config(options.run)
    if config is not None and options.signer is not None:
        coordinator = config.terms.keys.coordinator
        if options.signer.address != coordinator:
            raise WalletError(
                f"the key is of {options.signer.address}, the run's coordinator is {coordinator}"
            )
    folder = options.model.resolve()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{options.model}: no checkpoint folder (`intellect-trainer init-model` makes one)")
    workload = make_workload(folder, None if config is None else config.terms, options.seed)
    digest = await trio.to_thread.run_sync(weights_hash, folder)
    units = _first_units(workload, options)
    while True:
        plan = _plan(workload, options, digest, units)
        _settle(options.work, plan)
        await _measure(options.work, show)
        found = honest_chunks(options.work, plan)
        if found >= options.chunks:
            break
        # Rows ended before their longest.
        units = min(units * _MAX_GROWTH, -(-units * options.chunks // max(found, 1)))
        if units > _MAX_UNITS:
            raise UsageError(f"{options.chunks} chunks of this model's short answers are too many")
    report = await trio.to_thread.run_sync(make_report, options.work, plan)
    _write_whole(options.work / "report.json", report.encoded())
    _deliver(options, config, report)
    return report


def _first_units(workload: Workload, options: CalibrateOptions) -> int:
    """Units of each source that give the chunks asked for if all rows are of full length."""
    rows = workload.prompts_per_unit * workload.samples
    per_unit = rows * chunk_count(workload.max_tokens)
    for units in range(2, _MAX_UNITS):
        sources = make_sources(workload.model.dtype, units, 1, options.learning_rate)
        scored = sum(source.units * len(source.verifiers) for source in sources if not source.cheat)
        if scored * per_unit >= options.chunks:
            return units
    raise UsageError(f"{options.chunks} chunks are too many")


def _plan(workload: Workload, options: CalibrateOptions, digest: str, units: int) -> Plan:
    return Plan(
        model=str(workload.folder),
        weights_hash=digest,
        dtype=workload.model.dtype,
        sampling=workload.sampling,
        max_tokens=workload.max_tokens,
        samples=workload.samples,
        prompts=workload.prompts(max(units, options.cheat_units)),
        seed=options.seed,
        learning_rate=options.learning_rate,
        sources=make_sources(workload.model.dtype, units, options.cheat_units, options.learning_rate),
    )


def _settle(work: Path, plan: Plan) -> None:
    """Write the plan, unless the folder belongs to another one."""
    path = work / PLAN_FILE
    if path.exists() and not plan.extends(read_plan(work)):
        raise UsageError(
            f"{work} holds a calibration of another model or workload; --work names another folder"
        )
    work.mkdir(parents=True, exist_ok=True)
    _write_whole(path, msgspec.json.encode(plan))


async def _measure(work: Path, show: Show) -> None:
    """Run the measuring process to its end."""
    module = f"{__package__}.measure"
    command = [sys.executable, "-m", module, str(work)]
    # Threads that wait for each other sleep: spinning, they keep each other from a machine that is shared.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    last = Progress(0, 1, "")
    with (work / "measure.log").open("wb") as log:
        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(
                partial(
                    trio.run_process,
                    command,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    check=False,
                    env=environment,
                )
            )
            assert process.stdout is not None
            async for line in _lines(process.stdout):
                last = msgspec.json.decode(line, type=Progress)
                if not last.error:
                    show(last)
    if last.error:
        raise _error_of(last)
    if process.returncode != 0:
        reason = "killed" if (process.returncode or 0) < 0 else "crashed"
        raise EngineError(
            reason, f"measuring ended after {last.done} of {last.steps} units; see {work}/measure.log"
        )


def _error_of(progress: Progress) -> IntellectError:
    kind = _ERRORS.get(progress.error_kind)
    return EngineError("crashed", progress.error) if kind is None else kind(progress.error)


async def _lines(stream: trio.abc.ReceiveStream) -> AsyncIterator[bytes]:
    rest = b""
    async for part in stream:
        rest += part
        *lines, rest = rest.split(b"\n")
        for line in lines:
            yield line
        if len(rest) > _MAX_LINE_BYTES:
            raise EngineError("protocol", "the measuring process said something that is no report")


def _deliver(options: CalibrateOptions, config: RunConfig | None, report: Report) -> None:
    """Write the next revision, or the tables for one."""
    if config is not None and options.signer is not None:
        path = options.out or options.run
        assert path is not None
        signed = next_revision(config, report, options.signer, options.from_version)
        _write_whole(path, signed.to_toml().encode())
    elif options.out is not None:
        _write_whole(options.out, tables(report).encode())


def next_revision(
    config: RunConfig, report: Report, signer: LocalSigner, from_version: int | None
) -> RunConfig:
    """The run with the calibrated thresholds in a new revision.

    Raises:
        ConfigError: the key is not the run's coordinator key.
    """
    revision = msgspec.structs.replace(
        config.revision,
        number=config.revision.number + 1,
        from_version=config.revision.from_version if from_version is None else from_version,
        thresholds=report.thresholds,
        calibration=report.record(),
    )
    signed = RunConfig(config.terms, revision).signed(signer)
    signed.check()
    return signed


def tables(report: Report) -> str:
    """The TOML tables that a revision takes over."""
    part = {"revision": {"thresholds": report.thresholds, "calibration": report.record()}}
    return msgspec.toml.encode(part).decode()


def _write_whole(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
