"""`intellect-trainer`: make a first policy, train a run, serve its checkpoints."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from intellect_protocol.program import EXIT_CODES, run_program, run_until_signal

app = typer.Typer(
    name="intellect-trainer",
    help="Asynchronous GRPO on verified rollouts.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

RunFile = Annotated[Path, typer.Option("--run", help="The run configuration, run.toml.")]
KeyFile = Annotated[Path, typer.Option("--key", help="Publisher key: 32 raw bytes, or a keystore v3.")]
PasswordFile = Annotated[Path | None, typer.Option(help="File with the keystore's password.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Settings, TOML.")]


@app.command("init-model")
def init_model(
    model: Annotated[str, typer.Option(help="tiny, smollm2, or a local Hugging Face folder.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    environment: Annotated[
        str | None, typer.Option(help="Environment that `tiny` is warmed up on, e.g. sort_digits.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of `tiny`.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="float32 or bfloat16, of a local folder's weights.")
    ] = "bfloat16",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Make the folder of a run's version 0."""
    _prepare_torch(threads)
    from .models.registry import make_policy

    typer.echo(make_policy(model, out, environment=environment, seed=seed, dtype=dtype))


@app.command()
def run(
    run_file: RunFile,
    data_dir: Annotated[Path, typer.Option(help="Journal, checkpoints, figures of this run.")],
    batches: Annotated[Path, typer.Option(help="The batch store: accepted rollouts as Parquet.")],
    key: KeyFile,
    password_file: PasswordFile = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder of version 0 (first start only; see init-model).")
    ] = None,
    config: ConfigFile = None,
    recipe: Annotated[str | None, typer.Option(help="intellect-2, tiny or smollm2.")] = None,
    steps: Annotated[int, typer.Option(min=0, help="Stop at this version; 0: no limit.")] = 0,
    minutes: Annotated[
        float, typer.Option(min=0, help="Stop this long after the first step, pauses left out; 0: no limit.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    groups_per_step: Annotated[int | None, typer.Option(min=1)] = None,
    updates_per_step: Annotated[int | None, typer.Option(min=1)] = None,
    learning_rate: Annotated[float | None, typer.Option()] = None,
    eval_every: Annotated[int | None, typer.Option(min=0, help="Versions between evaluations.")] = None,
    eval_tasks: Annotated[int | None, typer.Option(min=0, help="Held-out tasks; 0: none.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
) -> int:
    """Train on the batch store and write signed checkpoints, going on where an earlier start ended."""
    from intellect_protocol.keys import load_signer
    from intellect_protocol.run import load_run_config

    from .config import resolve_config

    flags = {
        "recipe": recipe,
        "seed": seed,
        "groups_per_step": groups_per_step,
        "updates_per_step": updates_per_step,
        "learning_rate": learning_rate,
        "eval_every": eval_every,
        "eval_tasks": eval_tasks,
        "threads": threads,
    }
    settings = resolve_config(file=config, environ=os.environ, flags=flags).value
    run_config = load_run_config(run_file)
    signer = load_signer(key, password_file)
    # Loading takes seconds, and what an earlier start wrote there is no longer so.
    (data_dir / "status.json").unlink(missing_ok=True)
    _prepare_torch(settings.threads)
    from .loop import train
    from .session import RunOptions

    options = RunOptions(
        run=run_config,
        config=settings,
        data_dir=data_dir,
        batches=batches,
        signer=signer,
        checkpoint=checkpoint,
        steps=steps or None,
        minutes=minutes or None,
    )

    async def main() -> None:
        state = await train(options)
        typer.echo(f"version {state.version} after {state.seconds_since_first_step:.0f} s of training")

    return run_until_signal(main)


@app.command()
def seed(
    run_file: RunFile,
    data_dir: Annotated[Path, typer.Option(help="Chunk store, peer key and ledger state of the seeder.")],
    checkpoints: Annotated[Path, typer.Option(help="The trainer's `checkpoints` folder.")],
    key: KeyFile,
    password_file: PasswordFile = None,
    listen: Annotated[
        list[str] | None, typer.Option(help="Multiaddress to listen on; may be repeated.")
    ] = None,
) -> int:
    """Record the trainer's checkpoints on the ledger, announce them, and serve them to the swarm."""
    from intellect_protocol.keys import load_signer
    from intellect_protocol.run import load_run_config

    run_config = load_run_config(run_file)
    signer = load_signer(key, password_file)
    _log_to_stderr()
    from .seeder import SeedOptions
    from .seeder import seed as seed_run

    options = SeedOptions(
        run=run_config,
        data_dir=data_dir,
        checkpoints=checkpoints,
        signer=signer,
        listen=tuple(listen or ("/ip4/0.0.0.0/tcp/0",)),
    )
    return run_until_signal(partial(seed_run, options))


config_app = typer.Typer(help="Settings.", no_args_is_help=True)
app.add_typer(config_app, name="config")


@config_app.command("show")
def config_show(
    config: ConfigFile = None,
    recipe: Annotated[str | None, typer.Option(help="intellect-2, tiny or smollm2.")] = None,
) -> None:
    """Print every setting and where its value comes from."""
    from .config import resolve_config

    settings = resolve_config(file=config, environ=os.environ, flags={"recipe": recipe})
    for name, value, origin in settings.lines():
        typer.echo(f"{name} = {value}  # {origin}")


def _prepare_torch(threads: int) -> None:
    """Must come before the first import of torch: its thread pools are sized then."""
    _use_one_malloc_arena()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _log_to_stderr()
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _use_one_malloc_arena() -> None:
    """Keep glibc from giving every worker thread a heap of its own.

    Steps, copies, publication and evaluation run in different threads, and what one of them frees stays in
    its heap: the trainer of a 135M model grew from 4 to 12 GB within 25 steps. One arena holds it at 4.
    Elsewhere than on glibc nothing is done.
    """
    m_arena_max = -8  # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_arena_max, 1)


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)


def main() -> None:
    """Entry point."""
    run_program(app, "intellect-trainer")
