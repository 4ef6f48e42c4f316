"""`intellect-node devnet`: options of the one-machine swarm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .kinds import CHEAT_KINDS

app = typer.Typer(help="The whole swarm on one machine.", no_args_is_help=True, add_completion=False)


@app.callback()
def _root() -> None:
    """A callback keeps `up` a command of its own."""


@app.command()
def up(
    nodes: Annotated[int | None, typer.Option(min=1, max=64, help="Honest nodes (default 3).")] = None,
    cheat: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Add a cheating node; repeatable. {', '.join(CHEAT_KINDS)}, or none. Default best-of-n."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="tiny, smollm2, or a local Hugging Face folder (default tiny).")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Environment, e.g. sort_digits, spell_backward, arithmetic.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=0, help="End after this many steps; 0: no limit. Default by model.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="End this long after the first step; 0: no limit. Default by model."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the first policy and of the trainer.")] = None,
    data_dir: Annotated[
        Path, typer.Option(help="Where the devnet lives; the same directory goes on from its last version.")
    ] = Path("demo-data"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the summary to this file.")] = None,
    no_tui: Annotated[
        bool, typer.Option("--no-tui", help="Plain log lines instead of the live view.")
    ] = False,
    set_default: Annotated[
        bool, typer.Option("--set-default", help="Make it the default run of `intellect-node join`.")
    ] = False,
) -> None:
    """Start chain, coordinator, validators, trainer, seeder and nodes; show them learn; stop them."""
    import trio

    from intellect_protocol.errors import UsageError

    from .up import UpOptions
    from .up import up as run_devnet

    kinds = None if cheat is None else tuple(kind for kind in cheat if kind != "none")
    unknown = [kind for kind in kinds or () if kind not in CHEAT_KINDS]
    if unknown:
        raise UsageError(f"unknown kind of cheat {unknown[0]!r}; known: {', '.join(CHEAT_KINDS)}")
    options = UpOptions(
        data_dir=data_dir.resolve(),
        nodes=nodes,
        cheats=kinds,
        model=model,
        task=task,
        steps=steps,
        minutes=minutes,
        seed=seed,
        json_file=json_file,
        tui=not no_tui,
        set_default=set_default,
    )
    raise typer.Exit(trio.run(run_devnet, options))
