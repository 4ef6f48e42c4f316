"""`python -m intellect_node.devnet.cheat_node KIND ...`: a node with one dishonest part.

Everything but the unit builder is what `intellect-node join` runs. Only the devnet starts it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from intellect_protocol.program import run_program, run_until_signal

from ..cli import tell
from ..options import settings_from
from .kinds import CHEAT_KINDS

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def cheat(
    kind: Annotated[str, typer.Argument(help=", ".join(CHEAT_KINDS))],
    wallet: Annotated[Path, typer.Option()],
    password_file: Annotated[Path, typer.Option()],
    coordinator: Annotated[str, typer.Option()],
    data_dir: Annotated[Path, typer.Option()],
    listen: Annotated[list[str], typer.Option()],
    stake: Annotated[str, typer.Option()],
    name: Annotated[str, typer.Option()] = "",
    pause_when_ahead: Annotated[bool, typer.Option("--pause-when-ahead")] = False,
    max_units_ahead: Annotated[int, typer.Option()] = 4,
    ahead_pause_s: Annotated[float | None, typer.Option()] = None,
) -> None:
    """Join a run and cheat until slashed or stopped."""
    settings = settings_from(
        None,
        wallet=wallet,
        password_file=password_file,
        coordinator=coordinator,
        data_dir=data_dir,
        listen=listen,
        stake=stake,
        name=name,
        pause_when_ahead=pause_when_ahead,
        max_units_ahead=max_units_ahead,
        ahead_pause_s=ahead_pause_s,
    ).value
    from ..daemon import NodeDaemon
    from ..prepare import prepared_node
    from .cheats import CHEATS

    async def work() -> None:
        async with prepared_node(settings, tell) as node:
            await NodeDaemon(node, builder_factory=CHEATS[kind]).run()

    raise typer.Exit(run_until_signal(work))


if __name__ == "__main__":
    run_program(app, "cheat-node")
