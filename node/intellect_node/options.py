"""Options that several commands share. Nothing heavy is imported here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from intellect_protocol.settings import Settings

    from .config import NodeConfig

WalletOption = Annotated[Path | None, typer.Option("--wallet", help="Keystore v3 file of the wallet.")]
PasswordOption = Annotated[
    Path | None,
    typer.Option(
        "--password-file", help="File with its passphrase; else INTELLECT_PASSWORD_FILE, else asked."
    ),
]
RunOption = Annotated[str | None, typer.Option("--run", help="Run configuration: file or https URL.")]
DataDirOption = Annotated[
    Path | None, typer.Option("--data-dir", help="Where this node keeps everything; default: one per run.")
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="Settings file (node.toml).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def settings_from(config: Path | None, **flags: object) -> Settings[NodeConfig]:
    """Settings from all layers; flags by setting name, None where not given.

    Raises:
        ConfigError: an unknown key or a wrong value, with its place.
    """
    from .config import load_config

    return load_config(config, os.environ, flags)


def print_json(value: object) -> None:
    """Indented JSON on stdout."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
