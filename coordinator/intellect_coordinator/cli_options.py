"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunOption = Annotated[Path | None, typer.Option("--run", help="Run configuration (run.toml).")]
DataDirOption = Annotated[Path | None, typer.Option("--data-dir", help="Where this role keeps everything.")]
KeyOption = Annotated[Path | None, typer.Option("--key", help="Key: 32 raw bytes or a keystore v3 file.")]
PasswordOption = Annotated[
    Path | None, typer.Option("--password-file", help="File with the keystore's passphrase.")
]
ListenOption = Annotated[list[str] | None, typer.Option("--listen", help="Address to listen on, repeatable.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="Settings file (TOML).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DatabaseOption = Annotated[
    str | None, typer.Option("--database", help="SQLAlchemy URL; default: SQLite in the data directory.")
]
