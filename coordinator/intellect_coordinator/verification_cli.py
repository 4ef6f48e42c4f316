"""`audit`, `calibrate`, `audit-draws`: judging the judges, and the limits they judge by.

Only what parsing needs is imported at the top; each command imports its own work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from intellect_protocol.program import EXIT_CODES

from .cli_options import DataDirOption, JsonOption, PasswordOption, RunOption

app = typer.Typer()


@app.command(epilog=EXIT_CODES + " 1 also where the audit comes to another verdict.")
def audit(
    bundle: Annotated[Path, typer.Argument(help="Evidence bundle.")],
    weights: Annotated[
        Path | None, typer.Option(help="Folder with the version's checkpoint; else it is fetched.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", help="Key of a validator or bound node, to fetch weights with.")
    ] = None,
    password_file: PasswordOption = None,
    data_dir: DataDirOption = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="The run's own run.toml; evidence of another run is refused.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:<index>.")] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, typer.Option(help="Instead of the run's.")
    ] = None,
    attention: Annotated[
        Literal["auto", "sdpa", "eager", "transformers-sdpa", "transformers-eager"],
        typer.Option(help="Attention kernel; transformers-...: its implementation of the model."),
    ] = "auto",
    batch_rows: Annotated[int, typer.Option(min=1, help="Rows that are scored at once.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    json: JsonOption = False,
) -> None:
    """Judge the evidence of a slashing case again and compare the verdicts."""
    from functools import partial

    import trio

    from intellect_protocol.engines.supervisor import EngineOptions
    from intellect_protocol.keys import load_signer
    from intellect_protocol.run import load_run_config

    from .audit import audit as judge_again
    from .audit import read_bundle, same_run
    from .explain import print_audit

    checked = read_bundle(bundle)
    if run is not None:
        same_run(checked, load_run_config(run))
    engine = EngineOptions(
        device=device,
        dtype=dtype or checked.config.terms.model.dtype,
        attention=attention,
        max_rows=batch_rows,
        threads=threads,
    )
    signer = None if key is None else load_signer(key, password_file)
    report = trio.run(
        partial(judge_again, checked, engine, weights=weights, signer=signer, data_dir=data_dir)
    )
    print_audit(report, as_json=json)
    raise typer.Exit(0 if report.same else 1)


@app.command(epilog=EXIT_CODES + " A calibration that was ended goes on where it stood.")
def calibrate(
    model: Annotated[Path, typer.Option(help="Folder with a checkpoint of the policy.")],
    run: RunOption = None,
    key: Annotated[
        Path | None, typer.Option("--key", help="The coordinator's key, to sign the run's next revision.")
    ] = None,
    password_file: PasswordOption = None,
    work: Annotated[Path, typer.Option(help="Where measurements and report.json are kept.")] = Path(
        "calibration"
    ),
    chunks: Annotated[int, typer.Option(help="Honest chunks to verify, at least.")] = 2000,
    cheat_units: Annotated[int, typer.Option(help="Units of each cheat.")] = 2,
    learning_rate: Annotated[float, typer.Option(help="Size of a step, for policies some steps old.")] = 1e-5,
    seed: Annotated[int, typer.Option(help="Chooses prompts and samples.")] = 0,
    from_version: Annotated[
        int | None, typer.Option(help="Version from which the revision holds; default: as the last one.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the result; default: --run, or the terminal without --key.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure honest spread and cheats on this machine, and derive the thresholds of the checks."""
    from functools import partial

    import trio

    from intellect_protocol.keys import load_signer

    from .calibration.command import CalibrateOptions
    from .calibration.command import calibrate as measure_and_fit
    from .calibration.show import print_report, progress_line

    options = CalibrateOptions(
        model=model,
        work=work,
        run=run,
        chunks=chunks,
        cheat_units=cheat_units,
        seed=seed,
        learning_rate=learning_rate,
        signer=None if key is None else load_signer(key, password_file),
        from_version=from_version,
        out=out,
    )
    with progress_line() as show:
        report = trio.run(partial(measure_and_fit, options, show))
    print_report(report, as_json=json, with_toml=out is None and key is None)


@app.command("audit-draws", epilog=EXIT_CODES + " 1 also where a version was not audited as drawn.")
def audit_draws(
    run: RunOption = None,
    version: Annotated[int | None, typer.Option(help="Only this version.")] = None,
    json: JsonOption = False,
) -> None:
    """Draw the audits of all published versions again, and show what was skipped."""
    import trio

    from .config import open_run
    from .explain import print_draws
    from .public_record import published_draws

    reports = trio.run(published_draws, open_run(run), version)
    print_draws(reports, as_json=json)
    raise typer.Exit(1 if any(report.problems for report in reports) else 0)
