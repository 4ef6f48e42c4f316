"""A node's settings, where they are found, and the run it works for.

The settings are one operator's own (`node.toml`, see `intellect_protocol.settings` for the layers).
The run is what all peers share (`run.toml`). It is looked for in this order: `--run` (file or URL),
`--coordinator` (asked over the network, see `join`), the data directory, the user's default run.

A data directory belongs to one run and one node:

    run.toml                     the run configuration, newest revision seen
    node.key, peer.key           created on first use, mode 0600
    node.lock                    held while a node runs here
    history.db, outbox/          everything ever signed, and files not yet judged
    status.json                  what `status` shows
    the rest                     weights, chunks and transactions (kept by the network and ledger layers)
"""

from __future__ import annotations

import contextlib
import os
import urllib.parse
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from intellect_protocol.errors import ConfigError, PreflightError, UnreachableError, UsageError
from intellect_protocol.settings import Settings, load_settings

if TYPE_CHECKING:
    from intellect_protocol.run import RunConfig

APPLICATION = "intellect-node"
TOKEN_DECIMALS = 18
_FETCH_TIMEOUT_S = 20.0

Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `intellect-node`; every one can stand in node.toml, the environment or a flag."""

    name: str = ""  # shown to people; empty: the start of the node key's address
    data_dir: Path | None = None  # None: one directory per run under the user's data directory
    run: str | None = None  # file or URL of run.toml
    coordinator: str | None = None  # multiaddress with /p2p/, to get the run configuration from
    wallet: Path | None = None  # keystore v3 file
    password_file: Path | None = None
    stake: str | None = (
        None  # tokens to stake if the node's stake is below the minimum; None: what is missing
    )

    engine: Literal["torch", "vllm"] = "torch"
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1"
    engine_rows: Positive = 64  # sequences decoded at once; halved when memory runs out
    engine_threads: Positive | None = None  # None: OMP_NUM_THREADS, else one per physical core
    stall_s: Seconds = 120.0  # an engine that makes no token for so long is restarted

    listen: list[str] = msgspec.field(default_factory=lambda: ["/ip4/0.0.0.0/tcp/0"])
    data_port: Port = 0  # TCP port of the chunk server; 0: any free one

    max_unreceipted: Positive = 8  # units made but not yet receipted; then generation waits
    pause_when_ahead: bool = False  # wait for the next version after `max_units_ahead` units of one
    max_units_ahead: Positive = 4
    ahead_pause_s: Seconds | None = None  # after so long make one unit more all the same; None: never
    retain_versions: Positive = 5  # versions whose weights are kept and served (SHARDCAST keeps 5)
    keep_files_versions: Positive = 16  # versions for which accepted rollout files are kept
    heartbeat_s: Seconds = 5.0
    verdict_poll_s: Seconds = 3.0
    submit_deadline_s: Seconds = 120.0
    precommit_bytes: Annotated[int, msgspec.Meta(ge=0)] = 1 << 20  # smaller files are sent without Precommit
    request_deadline_s: Seconds = 15.0
    retry_first_s: Seconds = 1.0
    retry_max_s: Seconds = 60.0
    self_check: bool = False  # judge each unit as a validator would before it is signed
    engine_failures: Positive = 3  # identical engine failures on one unit before it is abandoned


def load_config(
    path: Path | None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Settings[NodeConfig]:
    """Settings of this node; `path` None reads the user's `node.toml` if there is one.

    Raises:
        ConfigError: see `load_settings`.
    """
    if path is None and default_config_path().exists():
        path = default_config_path()
    return load_settings(NodeConfig, role="node", file=path, environ=environ, flags=flags)


def default_config_path() -> Path:
    """The user's `node.toml`."""
    from platformdirs import user_config_path

    return user_config_path(APPLICATION) / "node.toml"


def default_run_path() -> Path:
    """The run configuration that a bare `join` uses."""
    from platformdirs import user_config_path

    return user_config_path(APPLICATION) / "run.toml"


def default_data_dir(run_id: bytes) -> Path:
    """The data directory of a run's node."""
    from platformdirs import user_data_path

    return user_data_path(APPLICATION) / "runs" / run_id.hex()[:16] / "node"


def set_default_run(config: RunConfig) -> Path:
    """Make a run the one that a bare `join` works for.

    Returns:
        The file written.

    Raises:
        PreflightError: it cannot be written.
    """
    path = default_run_path()
    write_file(path, config.to_toml().encode())
    return path


def find_run(settings: NodeConfig) -> RunConfig | None:
    """The run configuration from `--run`, the data directory or the user's default run, in the newest
    revision that the data directory knows. None: nowhere, or only by asking `--coordinator`.

    Raises:
        ConfigError: a run configuration is malformed, or the data directory belongs to another run.
        UnreachableError: the URL does not answer.
    """
    from intellect_protocol.run import load_run_config

    if settings.run is not None:
        config = fetch_run(settings.run) if _is_url(settings.run) else load_run_config(Path(settings.run))
    elif settings.coordinator is not None:
        return None
    elif settings.data_dir is not None and (settings.data_dir / "run.toml").exists():
        return load_run_config(settings.data_dir / "run.toml")
    elif default_run_path().exists():
        config = load_run_config(default_run_path())
    else:
        return None
    stored = data_dir_for(settings, config) / "run.toml"
    if not stored.exists():
        return config
    known = load_run_config(stored)
    check_same_run(stored.parent, known, config)
    return max(known, config, key=lambda candidate: candidate.revision.number)


def check_same_run(data_dir: Path, known: RunConfig, config: RunConfig) -> None:
    """
    Raises:
        ConfigError: `data_dir` belongs to the run `known`, which is not `config`.
    """
    if known.run_id != config.run_id:
        raise ConfigError(
            f"{data_dir} belongs to run {known.terms.name} ({known.run_id.hex()[:16]}), not to "
            f"{config.terms.name} ({config.run_id.hex()[:16]}); choose another --data-dir"
        )


def require_run(settings: NodeConfig) -> RunConfig:
    """`find_run`, or an error that says how to name a run.

    Raises:
        ConfigError: none is known, or as `find_run`.
    """
    config = find_run(settings)
    if config is None:
        raise ConfigError(
            "no run is known: give --run FILE or URL, or --coordinator MULTIADDR, or set a default with "
            "'intellect-node config set-run FILE'"
        )
    return config


def data_dir_for(settings: NodeConfig, config: RunConfig) -> Path:
    """The node's data directory (not made here)."""
    return settings.data_dir or default_data_dir(config.run_id)


def open_data_dir(settings: NodeConfig, config: RunConfig) -> Path:
    """Make the node's data directory (mode 0700) and store the run configuration in it.

    Raises:
        ConfigError: it belongs to another run.
        PreflightError: it cannot be made or written.
    """
    from intellect_protocol.run import load_run_config

    data_dir = data_dir_for(settings, config)
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise PreflightError(f"{data_dir}: {error.strerror or error}") from error
    path = data_dir / "run.toml"
    if path.exists():
        known = load_run_config(path)
        check_same_run(data_dir, known, config)
        if known.revision.number >= config.revision.number:
            return data_dir
    write_file(path, config.to_toml().encode())
    return data_dir


def fetch_run(url: str) -> RunConfig:
    """Get a run configuration by HTTPS (plain HTTP from this machine only).

    Raises:
        ConfigError: another kind of URL, or not a run configuration.
        UnreachableError: no answer.
    """
    import urllib3

    from intellect_protocol.run import MAX_RUN_CONFIG_BYTES, parse_run_config

    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(f"{url}: a run configuration is only taken over https")
    timeout = urllib3.Timeout(total=_FETCH_TIMEOUT_S)
    try:
        with urllib3.PoolManager(retries=urllib3.Retry(2, redirect=3), timeout=timeout) as pool:
            response = pool.request("GET", url, preload_content=False)
            try:
                data = response.read(MAX_RUN_CONFIG_BYTES + 1, decode_content=True)
            finally:
                response.release_conn()
    except urllib3.exceptions.HTTPError as error:
        raise UnreachableError(f"{url}: no answer ({type(error).__name__})") from error
    if response.status != 200:
        raise UnreachableError(f"{url}: HTTP status {response.status}")
    return parse_run_config(data, source=url)


def _is_url(text: str) -> bool:
    return text.startswith(("https://", "http://"))


def parse_tokens(text: str) -> int:
    """Tokens as people write them ("1000", "0.5") in the token's smallest unit (10^-18).

    Raises:
        UsageError: not a positive amount.
    """
    try:
        amount = Decimal(text) * 10**TOKEN_DECIMALS
    except InvalidOperation:
        raise UsageError(f"not an amount of tokens: {text[:40]!r}") from None
    if not amount.is_finite() or amount <= 0 or amount != amount.to_integral_value() or amount >= 2**128:
        raise UsageError(f"not an amount of tokens: {text[:40]!r}")
    return int(amount)


def show_tokens(amount: int) -> str:
    """An amount in the smallest unit as tokens, e.g. "1,000" or "0.25"."""
    whole, part = divmod(amount, 10**TOKEN_DECIMALS)
    decimals = f"{part:018d}".rstrip("0")
    return f"{whole:,}" + (f".{decimals}" if decimals else "")


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, durably.

    Raises:
        PreflightError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise PreflightError(f"{path}: {error.strerror or error}") from error
