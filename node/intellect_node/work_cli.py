"""`intellect-node work`: what became of this node's units, in the coordinator's words."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from intellect_protocol.program import EXIT_CODES

from .options import ConfigOption, DataDirOption, JsonOption, RunOption, print_json, settings_from

if TYPE_CHECKING:
    from intellect_protocol.messages import FindingNote

    from .entries import Entry
    from .history import History

app = typer.Typer(help="What became of this node's units of work.", no_args_is_help=True, epilog=EXIT_CODES)

# What to do about a finding, by the check that made it.
REMEDIES = {
    "envelope": "check the clock of this machine, and that only one node uses this key",
    "standing": "look at `whoami`: binding and stake must be older than the policy, and not be withdrawn",
    "window": "nothing: the unit was too late or out of order; a faster device or connection helps",
    "file": "upgrade intellect-node; if it goes on, report it with the file",
    "assignment": "upgrade intellect-node; if it goes on, report it with the file",
    "tokens": "upgrade intellect-node; if it goes on, report it with the file",
    "termination": "upgrade intellect-node; if it goes on, report it with the file",
    "reward": "the environments here differ from the run's: reinstall with the pinned versions",
    "commitment": "the engine computes something else than the policy: check dtype, device and memory",
    "sampling": "the engine computes something else than the policy: check dtype, device and memory",
    "drift": "the engine is near the limit: check dtype, device and attention kernel",
}


@app.command("list")
def list_(
    run: RunOption = None,
    data_dir: DataDirOption = None,
    version: Annotated[int | None, typer.Option(help="Only units of this policy version.")] = None,
    newest: Annotated[int, typer.Option(min=1, max=100_000, help="How many at most.")] = 50,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Units, newest first, with the time of each state as the coordinator has it."""
    entries = _history(config, run, data_dir, lambda history: history.entries(version=version, newest=newest))
    if json:
        print_json([as_record(entry) for entry in entries])
        return
    if not entries:
        typer.echo("no units yet")
    for entry in entries:
        times = ", ".join(f"{state} {_time(at_ms)}" for state, at_ms in times_of(entry).items())
        reason = f"  {entry.code}" if entry.code else ""
        typer.echo(f"{unit_id(entry):>10}  {word(entry):<24}{reason}  {times}")


@app.command()
def explain(
    unit: Annotated[str, typer.Argument(help="Unit as `work list` names it, VERSION/INDEX.")],
    run: RunOption = None,
    data_dir: DataDirOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Why a unit was refused: check, row, measured value, limit, and what to do."""
    from intellect_protocol.errors import UsageError

    match = re.fullmatch(r"(\d{1,18})/(\d{1,9})", unit)
    if match is None:
        raise UsageError(f"not a unit: {unit[:40]!r}; write VERSION/INDEX, as `work list` does")
    found = _history(config, run, data_dir, lambda history: history.entry(int(match[1]), int(match[2])))
    if found is None:
        raise UsageError(f"this node never signed unit {unit}")
    if json:
        print_json(as_record(found))
        return
    for line in explanation(found):
        typer.echo(line)


def _history(config: Any, run: str | None, data_dir: Any, read: Any) -> Any:
    """The result of `read` on the history of the node that the options name."""
    from intellect_protocol.errors import UsageError
    from intellect_protocol.keys import load_or_create_node_key

    from .config import data_dir_for, require_run
    from .history import History

    settings = settings_from(config, run=run, data_dir=data_dir).value
    run_config = require_run(settings)
    folder = data_dir_for(settings, run_config)
    if not (folder / "history.db").exists():
        raise UsageError(f"no node has worked in {folder} yet")
    node, _ = load_or_create_node_key(folder / "node.key")
    history: History = History(folder, run_config.run_id, node.address)
    try:
        return read(history)
    finally:
        history.close()


def unit_id(entry: Entry) -> str:
    """VERSION/INDEX."""
    return f"{entry.version}/{entry.index}"


def word(entry: Entry) -> str:
    """The state of a unit in one or two words; what training made of it is a word of its own."""
    from .entries import SIGNED, Kind

    if entry.kind is Kind.ABANDON:
        return "abandoned"
    if entry.state == SIGNED:
        return "waiting to be sent"
    training = entry.status.training if entry.status is not None else "none"
    return entry.state if training == "none" else f"{entry.state}, {training}"


def times_of(entry: Entry) -> dict[str, int]:
    """Unix ms of each state, in order of time."""
    times = {"signed": entry.signed_at_ms}
    if entry.received_at_ms is not None:
        times["received"] = entry.received_at_ms
    if entry.status is not None:
        times |= entry.status.times_ms
    return dict(sorted(times.items(), key=lambda item: item[1]))


def as_record(entry: Entry) -> dict[str, Any]:
    """A unit for JSON."""
    findings = [] if entry.status is None else entry.status.findings
    return {
        "unit": unit_id(entry),
        "state": word(entry),
        "code": entry.code,
        "file_hash": entry.file_hash.hex(),
        "size_bytes": entry.size_bytes,
        "times_ms": times_of(entry),
        "attempts": entry.attempts,
        "error": entry.error,
        "case_id": None if entry.status is None else entry.status.case_id,
        "findings": [
            {name: getattr(finding, name) for name in finding.__struct_fields__} for finding in findings
        ],
    }


def explanation(entry: Entry) -> Iterator[str]:
    """Lines that say what happened to a unit and what to do."""
    yield f"unit {unit_id(entry)}: {word(entry)}"
    for state, at_ms in times_of(entry).items():
        yield f"  {state:<14} {_time(at_ms)}"
    if entry.error:
        yield f"  last delivery: {entry.error} (attempts: {entry.attempts})"
    findings = [] if entry.status is None else entry.status.findings
    for finding in findings:
        yield f"  {_finding(finding)}"
    for check in dict.fromkeys(finding.check for finding in findings if finding.kind != "note"):
        yield f"  what to do ({check}): {REMEDIES.get(check, 'look at the documentation of this check')}"
    if entry.status is not None and entry.status.case_id is not None:
        yield f"  slashing case {entry.status.case_id} is open over this unit"


def _finding(finding: FindingNote) -> str:
    row = "" if finding.row is None else f" row {finding.row}"
    measured = "" if finding.measured is None else f" measured {finding.measured:.4g}"
    limit = "" if finding.limit is None else f" limit {finding.limit:.4g}"
    return f"{finding.kind}: {finding.check}/{finding.code}{row}{measured}{limit}: {finding.text}"


def _time(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ms / 1000))
