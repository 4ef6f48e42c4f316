"""Settings of the coordinator and of a validator, and what they resolve to.

Layers as in `intellect_protocol.settings`: defaults < coordinator.toml < INTELLECT_* < flags.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from intellect_protocol.errors import ConfigError, UsageError
from intellect_protocol.settings import Settings, load_settings

if TYPE_CHECKING:
    from intellect_protocol.keys import LocalSigner
    from intellect_protocol.run import RunConfig

    from .service import ServiceOptions
    from .validator import ValidatorOptions

APPLICATION = "intellect-node"

Positive = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `intellect-coordinator serve`."""

    run: Path | None = None  # run.toml
    data_dir: Path | None = None  # None: one directory per run under the user's data directory
    batches: Path | None = None  # None: batches/ in the data directory
    key: Path | None = None  # raw 32-byte secret or keystore v3
    password_file: Path | None = None
    database: str = ""  # SQLAlchemy URL; "": SQLite in the data directory
    listen: list[str] = msgspec.field(default_factory=lambda: ["/ip4/0.0.0.0/tcp/4001"])
    web_host: str = "127.0.0.1"
    web_port: Port | None = None  # None: no web page
    confirmations: Natural = 0  # blocks on top of one before it is believed
    root_interval_s: Seconds = 10.0
    lease_s: Seconds = 30.0
    max_pending: Positive = 4096  # submissions that may wait for a verdict


class ValidatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `intellect-coordinator validate`."""

    run: Path | None = None
    data_dir: Path | None = None
    key: Path | None = None
    password_file: Path | None = None
    listen: list[str] = msgspec.field(default_factory=lambda: ["/ip4/0.0.0.0/tcp/0"])
    judge: bool = True
    spot_checks: Share = 0.0  # share of the units not drawn that this validator audits nevertheless
    engine: Literal["torch", "vllm"] = "torch"
    device: str = "auto"
    engine_rows: Positive = 64
    engine_threads: Positive | None = None  # None: OMP_NUM_THREADS, else 1


def load_coordinator_config(
    file: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]
) -> Settings[CoordinatorConfig]:
    """Merge the layers.

    Raises:
        ConfigError: an unknown key or a wrong value, with its place.
    """
    return load_settings(CoordinatorConfig, role="coordinator", file=file, environ=environ, flags=flags)


def load_validator_config(
    file: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]
) -> Settings[ValidatorConfig]:
    """Merge the layers. Errors as `load_coordinator_config`."""
    return load_settings(ValidatorConfig, role="validator", file=file, environ=environ, flags=flags)


def open_run(path: Path | None) -> RunConfig:
    """
    Raises:
        UsageError: no run is named.
        ConfigError: the file is unreadable or wrong.
    """
    from intellect_protocol.run import load_run_config

    if path is None:
        raise UsageError("name the run: --run FILE (run.toml)")
    return load_run_config(path)


def open_key(path: Path | None, password_file: Path | None) -> LocalSigner:
    """
    Raises:
        UsageError: no key is named.
        WalletError: the key cannot be opened.
    """
    from intellect_protocol.keys import load_signer

    if path is None:
        raise UsageError("name the key: --key FILE (32 raw bytes, or a keystore with --password-file)")
    from_environment = os.environ.get("INTELLECT_PASSWORD_FILE")
    return load_signer(path, password_file or (Path(from_environment) if from_environment else None))


def data_dir_of(config: CoordinatorConfig | ValidatorConfig, run: RunConfig, role: str) -> Path:
    """Where a role keeps everything; by default one directory per run and role."""
    if config.data_dir is not None:
        return config.data_dir
    import platformdirs

    return platformdirs.user_data_path(APPLICATION) / run.run_id.hex()[:16] / role


def service_options(config: CoordinatorConfig) -> ServiceOptions:
    """What `serve` runs with.

    Raises:
        UsageError, ConfigError, WalletError: run or key are missing or wrong.
    """
    run = open_run(config.run)
    signer = open_key(config.key, config.password_file)
    data_dir = data_dir_of(config, run, "coordinator")

    from .intake import IntakeLimits
    from .job_desk import DeskLimits
    from .service import ServiceOptions

    return ServiceOptions(
        run=run,
        signer=signer,
        data_dir=data_dir,
        batches=config.batches or data_dir / "batches",
        database=config.database,
        listen=config.listen,
        confirmations=config.confirmations,
        root_interval_s=config.root_interval_s,
        intake=IntakeLimits(pending_submissions=config.max_pending),
        desk=DeskLimits(lease_s=config.lease_s),
        web_host=config.web_host,
        web_port=config.web_port,
    )


def validator_options(config: ValidatorConfig, environ: Mapping[str, str]) -> ValidatorOptions:
    """What `validate` runs with. Errors as `service_options`."""
    run = open_run(config.run)
    signer = open_key(config.key, config.password_file)

    from intellect_protocol.engines.supervisor import EngineOptions

    from .validator import ValidatorOptions

    return ValidatorOptions(
        run=run,
        signer=signer,
        data_dir=data_dir_of(config, run, "validator"),
        listen=config.listen,
        judge=config.judge,
        spot_checks=config.spot_checks,
        engine=EngineOptions(
            engine=config.engine,
            device=config.device,
            dtype=run.terms.model.dtype,
            threads=config.engine_threads or _threads(environ),
            max_rows=config.engine_rows,
        ),
    )


def _threads(environ: Mapping[str, str]) -> int:
    """Threads of the engine: OMP_NUM_THREADS where it is set."""
    text = environ.get("OMP_NUM_THREADS", "1")
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"environment variable OMP_NUM_THREADS: not a number of threads: {text!r}")
    return int(text)
