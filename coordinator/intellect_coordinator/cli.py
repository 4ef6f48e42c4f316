"""`intellect-coordinator`: the command line of who runs, judges and audits a run.

Only what parsing needs is imported at the top; each command imports its own work.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from intellect_protocol.program import EXIT_CODES, run_program, run_until_signal

from .cli_options import (
    ConfigOption,
    DatabaseOption,
    DataDirOption,
    JsonOption,
    KeyOption,
    ListenOption,
    PasswordOption,
    RunOption,
)
from .verification_cli import app as verification_app

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Coordinate, validate and audit a reinforcement-learning run over a permissionless swarm.",
    epilog=f"{EXIT_CODES} --debug with any command shows where an error came from.",
)
submissions_app = typer.Typer(no_args_is_help=True, help="What became of submissions.")
config_app = typer.Typer(no_args_is_help=True, help="Settings and where they come from.")
app.add_typer(submissions_app, name="submissions")
app.add_typer(config_app, name="config")
app.add_typer(verification_app)


@app.command(epilog=EXIT_CODES)
def serve(
    run: RunOption = None,
    data_dir: DataDirOption = None,
    batches: Annotated[Path | None, typer.Option(help="Folder of accepted batches.")] = None,
    key: KeyOption = None,
    password_file: PasswordOption = None,
    listen: ListenOption = None,
    database: DatabaseOption = None,
    web_host: Annotated[str | None, typer.Option(help="Address of the web page.")] = None,
    web_port: Annotated[int | None, typer.Option(help="Port of the web page; none without it.")] = None,
    config: ConfigOption = None,
) -> None:
    """Run the coordinator: take in work, hand out jobs, carry cases and work roots to the ledger."""
    from .config import load_coordinator_config, service_options

    settings = load_coordinator_config(
        config,
        os.environ,
        {
            "run": run,
            "data_dir": data_dir,
            "batches": batches,
            "key": key,
            "password_file": password_file,
            "listen": listen or None,
            "database": database,
            "web_host": web_host,
            "web_port": web_port,
        },
    )
    options = service_options(settings.value)
    _log()

    from .service import serve as serve_until_cancelled

    raise typer.Exit(run_until_signal(lambda: serve_until_cancelled(options)))


@app.command(epilog=EXIT_CODES)
def validate(
    run: RunOption = None,
    data_dir: DataDirOption = None,
    key: KeyOption = None,
    password_file: PasswordOption = None,
    listen: ListenOption = None,
    judge: Annotated[
        bool | None, typer.Option("--judge/--no-judge", help="Judge fresh submissions, or only the rest.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="torch or vllm.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:<index>.")] = None,
    config: ConfigOption = None,
) -> None:
    """Run a validator: judge submissions, replay the evidence of cases, sign work roots."""
    from .config import load_validator_config, validator_options

    settings = load_validator_config(
        config,
        os.environ,
        {
            "run": run,
            "data_dir": data_dir,
            "key": key,
            "password_file": password_file,
            "listen": listen or None,
            "judge": judge,
            "engine": engine,
            "device": device,
        },
    )
    options = validator_options(settings.value, os.environ)
    _log()

    from .validator import validate as validate_until_cancelled

    raise typer.Exit(run_until_signal(lambda: validate_until_cancelled(options)))


@app.command(epilog=EXIT_CODES)
def devchain(
    data_dir: Annotated[Path, typer.Option("--data-dir", help="Where the chain is kept.")],
    port: Annotated[int, typer.Option(help="Loopback TCP port; 0 takes a free one.")] = 8545,
    chain_id: Annotated[int | None, typer.Option(help="Id of a chain begun now; default: random.")] = None,
) -> None:
    """Run a development chain: its keys are public, its tokens are worth nothing."""
    from .devchain import run_devchain

    run_devchain(data_dir, port, chain_id=chain_id)


@app.command(epilog=EXIT_CODES)
def init(
    name: Annotated[str, typer.Option(help="Name of the run.")],
    out: Annotated[Path, typer.Option(help="Folder for run.toml and deployment.json.")],
    rpc: Annotated[list[str], typer.Option(help="URL of the chain's JSON-RPC, repeatable.")],
    key: Annotated[Path, typer.Option("--key", help="The coordinator's key.")],
    checkpoint: Annotated[Path, typer.Option(help="Folder with version 0 of the policy.")],
    environment: Annotated[list[str], typer.Option(help="name[*weight][:param=value,...], repeatable.")],
    validator: Annotated[list[str], typer.Option(help="Address of a validator, repeatable.")],
    bootstrap: Annotated[list[str], typer.Option(help="Full multiaddress of a first peer, repeatable.")],
    publisher: Annotated[str | None, typer.Option(help="Address of the publisher's key.")] = None,
    publisher_key: Annotated[Path | None, typer.Option(help="Or the key file itself.")] = None,
    password_file: PasswordOption = None,
    preset: Annotated[str, typer.Option(help="tiny, smollm2 or intellect-2.")] = "intellect-2",
    temperature: Annotated[float | None, typer.Option(help="Instead of the preset's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Instead of the preset's.")] = None,
    prompts_per_unit: Annotated[int | None, typer.Option(help="Instead of the preset's.")] = None,
    samples_per_prompt: Annotated[int | None, typer.Option(help="Instead of the preset's.")] = None,
    units_per_version: Annotated[int | None, typer.Option(help="Per owner, instead of the preset's.")] = None,
    async_level: Annotated[int | None, typer.Option(help="Versions of lag, instead of the preset's.")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Prompts through the chat template or not.")
    ] = None,
    development: Annotated[
        bool, typer.Option("--development", help="Development chain: short delays, public deployer key.")
    ] = False,
    token: Annotated[str | None, typer.Option(help="Address of the stake token (ERC-20).")] = None,
    window_s: Annotated[int | None, typer.Option(help="Seconds to appeal.")] = None,
    voting_s: Annotated[int | None, typer.Option(help="Seconds to decide after that.")] = None,
    unit_value: Annotated[
        float | None,
        typer.Option(help="Stake tokens an accepted unit is worth at most: audit a share. Else all units."),
    ] = None,
    min_audit_share: Annotated[float, typer.Option(help="Least share of units to audit.")] = 0.1,
    probation_units: Annotated[
        int, typer.Option(help="Accepted units before an owner's share falls below 1.")
    ] = 16,
    audit_safety: Annotated[
        float, typer.Option(help="At least 1 / (chance that an audit finds a cheat).")
    ] = 2.0,
) -> None:
    """Start a run: deploy the contracts and write the signed run configuration."""
    import msgspec
    import trio

    from intellect_protocol.errors import UsageError
    from intellect_protocol.keys import address_bytes, checksum_address, load_signer

    from .new_run import AuditChoice, NewRun, create_run, parse_environment
    from .presets import preset as preset_of

    if (publisher is None) == (publisher_key is None):
        raise UsageError("name the publisher: --publisher ADDRESS or --publisher-key FILE")
    address = (
        checksum_address(address_bytes(publisher))
        if publisher is not None
        else load_signer(publisher_key, password_file).address  # type: ignore[arg-type]
    )
    chosen = {
        "temperature": temperature,
        "max_tokens": max_tokens,
        "prompts_per_unit": prompts_per_unit,
        "samples_per_prompt": samples_per_prompt,
        "units_per_version": units_per_version,
        "async_level": async_level,
    }
    new = NewRun(
        name=name,
        out=out,
        rpc=rpc,
        signer=load_signer(key, password_file),
        publisher=address,
        validators=validator,
        checkpoint=checkpoint,
        environments=[parse_environment(text) for text in environment],
        preset=msgspec.structs.replace(
            preset_of(preset), **{field: value for field, value in chosen.items() if value is not None}
        ),
        bootstrap=bootstrap,
        chat=chat,
        development=development,
        token=token,
        window_s=window_s,
        voting_s=voting_s,
        audit=None
        if unit_value is None
        else AuditChoice(
            unit_value=unit_value,
            min_share=min_audit_share,
            probation_units=probation_units,
            safety=audit_safety,
        ),
    )
    trio.run(create_run, new, typer.echo)


@submissions_app.command("list")
def list_submissions(
    data_dir: DataDirOption = None,
    database: DatabaseOption = None,
    node: Annotated[str | None, typer.Option(help="Only this node key.")] = None,
    state: Annotated[str | None, typer.Option(help="Only this state.")] = None,
    limit: Annotated[int, typer.Option(help="At most this many, newest first.")] = 50,
    json: JsonOption = False,
) -> None:
    """List submissions, newest first."""
    from .explain import print_submissions

    print_submissions(data_dir, database, node=node, state=state, limit=limit, as_json=json)


@submissions_app.command("explain")
def explain_submission(
    submission: Annotated[int, typer.Argument(help="Id, as in `submissions list`.")],
    data_dir: DataDirOption = None,
    database: DatabaseOption = None,
    json: JsonOption = False,
) -> None:
    """Say what happened to a submission: states, times, findings with measured value and limit, verdicts."""
    from .explain import print_submission

    print_submission(data_dir, database, submission, as_json=json)


@config_app.command("show")
def show_config(
    role: Annotated[str, typer.Option(help="coordinator or validator.")] = "coordinator",
    config: ConfigOption = None,
) -> None:
    """Show settings and where each value came from."""
    from intellect_protocol.errors import UsageError

    from .config import load_coordinator_config, load_validator_config

    if role == "coordinator":
        lines = load_coordinator_config(config, os.environ, {}).lines()
    elif role == "validator":
        lines = load_validator_config(config, os.environ, {}).lines()
    else:
        raise UsageError("--role is coordinator or validator")
    for key, value, origin in lines:
        typer.echo(f"{key} = {value}  # {origin}")


@app.command(epilog=EXIT_CODES)
def web(
    data_dir: DataDirOption = None,
    database: DatabaseOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port.")] = 8080,
    until_stdin_closes: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Serve the read-only web page, JSON and metrics of a coordinator's database."""
    from .explain import database_url
    from .web.server import run_web

    run_web(database_url(data_dir, database), data_dir, host, port, until_stdin_closes=until_stdin_closes)


def _log() -> None:
    """Log lines on stderr; `INTELLECT_DEBUG=1` shows more."""
    import logging

    level = logging.DEBUG if os.environ.get("INTELLECT_DEBUG", "0") not in ("", "0") else logging.INFO
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for package in ("intellect_coordinator", "intellect_protocol"):
        logging.getLogger(package).setLevel(level)


def main() -> None:
    """Entry point of the console script."""
    run_program(app, "intellect-coordinator")
