"""A calibration on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .command import tables
from .detection import Detection, Rate
from .measure_progress import Progress as Measured
from .report import Report

_SPREAD = {
    "exponent_mismatches": "exponents",
    "mantissa_mean": "mantissa mean",
    "max_distance": "distance",
    "mean_distance_row": "mean distance",
    "inexact_share_group": "inexact",
    "logprob_drift_row": "log-prob drift",
}
_MAX_CODES = 3
_FILE_WIDTH = 160


@contextmanager
def progress_line() -> Iterator[Callable[[Measured], None]]:
    """A progress bar on stderr while the block runs; yields what moves it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring", total=None)

        def show(measured: Measured) -> None:
            bar.update(task, description=measured.what, completed=measured.done, total=measured.steps)

        yield show


def print_report(report: Report, *, as_json: bool, with_toml: bool) -> None:
    """Print the report as tables or as JSON, and the TOML of the thresholds if asked to."""
    if as_json:
        typer.echo(report.encoded().decode(), nl=False)
        return
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=_FILE_WIDTH)
    console.print(_spread(report), _limits(report), _detection(report))
    for each in report.steering:
        console.print(
            f"Slack steering up to the limits of {each.limits}: {each.bits:.1f} bits per row of "
            f"{each.tokens_per_row:.0f} tokens, {each.plausible_bits:.1f} with plausible tokens alone."
        )
    if with_toml:
        console.print()
        typer.echo(tables(report), nl=False)


def _spread(report: Report) -> Table:
    table = Table(title=f"Honest spread, {report.chunks} chunks ({report.dtype}): median / largest")
    for name in ("generator", "verifier"):
        table.add_column(name)
    for name in ("chunks", *_SPREAD.values()):
        table.add_column(name, justify="right")
    for pair in report.pairs:
        cells = [f"{pair.middle[name]:.3g} / {pair.largest[name]:.3g}" for name in _SPREAD]
        table.add_row(pair.generator, pair.verifier, str(pair.chunks), *cells)
    return table


def _limits(report: Report) -> Table:
    table = Table(
        title="Thresholds, and honest values of the testing half above them (95 % upper bound of the rate)"
    )
    for name in ("limit", "per"):
        table.add_column(name)
    for name in ("largest", "suspect", "above", "fraud", "above"):
        table.add_column(name, justify="right")
    for each in report.limits:
        table.add_row(
            each.name,
            each.level,
            f"{each.largest:.3g}",
            f"{each.limit.suspect:g}",
            f"{each.over_suspect} of {each.tested_on} ({each.suspect_bound:.2%})",
            f"{each.limit.fraud:g}",
            f"{each.over_fraud} of {each.tested_on} ({each.fraud_bound:.2%})",
        )
    return table


def _detection(report: Report) -> Table:
    bars = " / ".join(f"{limit:g}" for limit in report.intellect_2.values())
    table = Table(title=f"Detected: suspect or fraud (fraud). INTELLECT-2: {bars} on the same proofs")
    table.add_column("work")
    for name in ("chunks", "groups", "units", "INTELLECT-2 chunks", "units"):
        table.add_column(name, justify="right")
    table.add_column("by")
    for each in (report.honest, *report.cheats):
        table.add_row(
            each.cheat,
            *(_share(rate) for rate in (each.chunk, each.group, each.unit)),
            f"{each.intellect_2_chunk:.1%}",
            f"{each.intellect_2_unit:.0%}",
            _codes(each),
        )
    return table


def _share(rate: Rate) -> str:
    return f"{rate.suspect:.1%} ({rate.fraud:.1%}) of {rate.of}"


def _codes(found: Detection) -> str:
    return ", ".join(code for code, _ in found.codes[:_MAX_CODES])
