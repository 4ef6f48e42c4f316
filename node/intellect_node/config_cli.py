"""`intellect-node config`: where settings come from, and the run that a bare `join` works for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from intellect_protocol.program import EXIT_CODES

from .options import ConfigOption, JsonOption, print_json, settings_from

app = typer.Typer(help="Show settings; set the default run.", no_args_is_help=True, epilog=EXIT_CODES)


@app.command()
def show(config: ConfigOption = None, json: JsonOption = False) -> None:
    """Every setting with its value and where it came from."""
    from .config import default_config_path, default_run_path

    lines = list(settings_from(config).lines())
    if json:
        print_json({key: {"value": value, "origin": origin} for key, value, origin in lines})
        return
    width = max(len(f"{key} = {value}") for key, value, _ in lines)
    for key, value, origin in lines:
        typer.echo(f"{f'{key} = {value}':<{width}}  # {origin}")
    typer.echo(f"\nsettings file: {default_config_path()}\ndefault run:   {default_run_path()}")


@app.command("set-run")
def set_run(file: Annotated[Path, typer.Argument(help="Run configuration (run.toml).")]) -> None:
    """Make a run the one that `intellect-node join --wallet FILE` works for."""
    from intellect_protocol.run import load_run_config

    from .config import set_default_run

    config = load_run_config(file)
    path = set_default_run(config)
    typer.echo(f"default run: {config.terms.name} ({config.run_id.hex()[:16]}), in {path}")
