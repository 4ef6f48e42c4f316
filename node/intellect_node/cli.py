"""`intellect-node`: the command line of a contributor.

Only what parsing needs is imported at the top; each command imports its own work.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from intellect_protocol.program import EXIT_CODES, run_program, run_until_signal

from .options import (
    ConfigOption,
    DataDirOption,
    JsonOption,
    PasswordOption,
    RunOption,
    WalletOption,
    print_json,
    settings_from,
)

_LAZY = {
    "wallet": ("intellect_node.wallet_cli", "Make, show and import wallets."),
    "work": ("intellect_node.work_cli", "What became of this node's units of work."),
    "config": ("intellect_node.config_cli", "Show settings; set the default run."),
    "devnet": ("intellect_node.devnet.cli", "The whole swarm on one machine."),
}


class _LazyGroup(TyperGroup):
    """Loads the module of a group of commands when it is used; `--help` needs only their names."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_LAZY]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _LAZY:
            return TyperCommand(cmd_name, help=_LAZY[cmd_name][1])
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in _LAZY:
            module = importlib.import_module(_LAZY[args[0]][0])
            return args[0], typer.main.get_command(module.app), args[1:]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Contribute to a permissionless reinforcement-learning run: generate rollouts, prove them, earn.",
    epilog=f"{EXIT_CODES} --debug with any command shows where an error came from.",
)


@app.callback()
def _root() -> None:
    pass


@app.command(epilog=EXIT_CODES)
def join(
    wallet: WalletOption = None,
    coordinator: Annotated[
        str | None,
        typer.Option(
            "--coordinator", help="Peer to get the run configuration from: /ip4/.../tcp/.../p2p/..."
        ),
    ] = None,
    run: RunOption = None,
    password_file: PasswordOption = None,
    stake: Annotated[
        str | None, typer.Option(help="Tokens to stake if the stake is too low; default: what is missing.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="torch or vllm.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:<index>.")] = None,
    listen: Annotated[
        list[str] | None, typer.Option(help="Address to listen on, e.g. /ip4/0.0.0.0/tcp/4001; repeatable.")
    ] = None,
    data_dir: DataDirOption = None,
    name: Annotated[str | None, typer.Option(help="A name for displays.")] = None,
    pause_when_ahead: Annotated[
        bool | None,
        typer.Option("--pause-when-ahead", help="Wait for the next policy once enough units are made."),
    ] = None,
    max_units_ahead: Annotated[
        int | None, typer.Option(min=1, help="How many units are enough for --pause-when-ahead.")
    ] = None,
    ahead_pause_s: Annotated[
        float | None,
        typer.Option(help="Seconds after which such a pause allows one unit more."),
    ] = None,
    self_check: Annotated[
        bool | None,
        typer.Option(
            "--self-check/--no-self-check",
            help="Judge each unit as a validator would before it is signed; this costs a prefill of it.",
        ),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Join a run and work for it until stopped (Ctrl-C)."""
    settings = settings_from(
        config,
        wallet=wallet,
        coordinator=coordinator,
        run=run,
        password_file=password_file,
        stake=stake,
        engine=engine,
        device=device,
        listen=listen or None,
        data_dir=data_dir,
        name=name,
        pause_when_ahead=pause_when_ahead,
        max_units_ahead=max_units_ahead,
        ahead_pause_s=ahead_pause_s,
        self_check=self_check,
    ).value
    from .prepare import prepared_node

    async def work() -> None:
        async with prepared_node(settings, tell) as node:
            # Not before the keys are known to be right: this import takes a second.
            from .daemon import NodeDaemon

            await NodeDaemon(node).run()

    raise typer.Exit(run_until_signal(work))


def tell(text: str) -> None:
    """One line for the operator, with the time."""
    import time

    print(f"{time.strftime('%H:%M:%S')} {' '.join(text.split())}", flush=True)


@app.command(epilog="Exit code 0 while a node runs in the data directory, 4 otherwise.")
def status(
    run: RunOption = None,
    data_dir: DataDirOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """What this node is doing now."""
    from intellect_protocol.errors import EXIT_OK, EXIT_UNREACHABLE

    from .config import data_dir_for, require_run
    from .outbox import now_ms
    from .status import describe, read_status

    settings = settings_from(config, run=run, data_dir=data_dir).value
    folder = settings.data_dir or data_dir_for(settings, require_run(settings))
    shown, running = describe(folder, now_ms())
    if json:
        print_json({"running": running, "status": read_status(folder)})
    else:
        print_pairs(shown)
    raise typer.Exit(EXIT_OK if running else EXIT_UNREACHABLE)


@app.command(epilog=EXIT_CODES + " 6 also where a validator would not accept the unit at once.")
def verify(
    file: Annotated[Path, typer.Argument(help="Rollout file, from this node's outbox or anywhere.")],
    run: RunOption = None,
    data_dir: DataDirOption = None,
    weights: Annotated[
        Path | None, typer.Option(help="Checkpoint folder of the file's version; else the data directory's.")
    ] = None,
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Fetch the weights from the swarm if they are not here.")
    ] = False,
    block_hash: Annotated[
        str | None, typer.Option(help="Of the block that recorded the version, instead of asking the chain.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:<index>.")] = None,
    attention: Annotated[
        Literal["auto", "sdpa", "eager", "transformers-sdpa", "transformers-eager"],
        typer.Option(help="Attention kernel; transformers-...: its implementation of the model."),
    ] = "auto",
    batch_rows: Annotated[int | None, typer.Option(min=1, help="Rows that are scored at once.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Run the validators' checks on a rollout file: each with what it measured and its limit."""
    import os

    import trio

    from intellect_protocol.engines.supervisor import EngineOptions

    from .config import data_dir_for, require_run
    from .generator import default_threads
    from .verify import VerifyOptions, parse_block_hash, print_verified, verify_file

    settings = settings_from(config, run=run, data_dir=data_dir, device=device).value
    run_config = require_run(settings)
    options = VerifyOptions(
        file=file,
        run=run_config,
        data_dir=data_dir_for(settings, run_config),
        engine=EngineOptions(
            device=settings.device,
            dtype=run_config.terms.model.dtype,
            attention=attention,
            threads=threads or settings.engine_threads or default_threads(os.environ),
            max_rows=batch_rows or settings.engine_rows,
        ),
        weights=weights,
        fetch=fetch,
        block_hash=None if block_hash is None else parse_block_hash(block_hash),
    )
    verified = trio.run(verify_file, options)
    if json:
        print_json(verified)
    else:
        print_verified(verified)
    raise typer.Exit(verified.exit_code)


@app.command()
def whoami(
    wallet: WalletOption = None,
    run: RunOption = None,
    data_dir: DataDirOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Wallet, node key, peer id, registration, stake and last credited version."""
    import trio

    from .config import data_dir_for, require_run
    from .whoami import who_am_i

    settings = settings_from(config, wallet=wallet, run=run, data_dir=data_dir).value
    run_config = require_run(settings)
    shown = trio.run(who_am_i, settings, run_config, data_dir_for(settings, run_config))
    if json:
        print_json(shown)
    else:
        print_pairs(shown)


@app.command(epilog=EXIT_CODES)
def doctor(
    wallet: WalletOption = None,
    coordinator: Annotated[str | None, typer.Option("--coordinator", help="Peer to ask for the run.")] = None,
    run: RunOption = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:<index>.")] = None,
    listen: Annotated[list[str] | None, typer.Option(help="Address to listen on; repeatable.")] = None,
    data_dir: DataDirOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
    report: Annotated[
        bool, typer.Option("--report", help="Hide names, addresses and paths, for a public report.")
    ] = False,
) -> None:
    """Look for whatever keeps a node from working, and say what to do about it."""
    import trio

    from .doctor import examine

    settings = settings_from(
        config,
        wallet=wallet,
        coordinator=coordinator,
        run=run,
        device=device,
        listen=listen or None,
        data_dir=data_dir,
    ).value
    raise typer.Exit(trio.run(examine, settings, json, report))


@app.command()
def reputation(
    address: Annotated[str, typer.Argument(help="Address of a wallet or node key.")],
    run: RunOption = None,
    data_dir: DataDirOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Reputation of a wallet, recomputed from the ledger and the published work."""
    import trio

    from .config import require_run
    from .reputation_view import show_reputation

    settings = settings_from(config, run=run, data_dir=data_dir).value
    trio.run(show_reputation, require_run(settings), address, json)


def print_pairs(shown: dict[str, object]) -> None:
    """Aligned `key  value` lines."""
    width = max(map(len, shown), default=0)
    for key, value in shown.items():
        typer.echo(f"{key:<{width}}  {value}")


def main() -> None:
    """Entry point of the console script."""
    run_program(app, "intellect-node")
