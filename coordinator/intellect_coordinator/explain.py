"""`submissions list`, `submissions explain` and `audit` in words for a terminal."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import typer
from sqlalchemy import Connection, select

from intellect_protocol.errors import UsageError, WalletError
from intellect_protocol.keys import address_bytes
from intellect_protocol.messages import FindingNote

from . import schema, submissions
from .audit import AuditReport, reasons
from .store import Record, Store

_MAX_LISTED = 10_000
_SUBMISSIONS = schema.submissions


def database_url(data_dir: Path | None, database: str | None) -> str:
    """The database of a coordinator that is named by either.

    Raises:
        UsageError: neither is given, or there is no database.
    """
    if database:
        return database
    if data_dir is None:
        raise UsageError("name the coordinator: --data-dir DIR or --database URL")
    path = data_dir / "coordinator.sqlite"
    if not path.exists():
        raise UsageError(f"{path}: no coordinator keeps its database there")
    return f"sqlite:///{path}"


def print_submissions(
    data_dir: Path | None,
    database: str | None,
    *,
    node: str | None,
    state: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """One line per submission, newest first."""
    query = select(_SUBMISSIONS).order_by(_SUBMISSIONS.c.id.desc()).limit(min(max(limit, 1), _MAX_LISTED))
    if node is not None:
        try:
            query = query.where(_SUBMISSIONS.c.node == address_bytes(node))
        except WalletError as error:
            raise UsageError(str(error)) from error
    if state is not None:
        query = query.where(_SUBMISSIONS.c.state == state)
    store = Store(database_url(data_dir, database))
    try:
        with store.snapshot() as connection:
            rows = connection.execute(query).all()
    finally:
        store.close()
    if as_json:
        _print_json([_summary(row) for row in rows])
        return
    for row in rows:
        typer.echo(
            f"{row.id:>7}  {_time(row.received_at_ms)}  0x{row.node.hex()}  "
            f"{row.version:>5}/{row.unit_index:<4}  {row.state:<12} {row.training:<9} {row.code}"
        )


def print_submission(data_dir: Path | None, database: str | None, submission: int, *, as_json: bool) -> None:
    """Everything about one submission.

    Raises:
        UsageError: there is none with this id.
    """
    store = Store(database_url(data_dir, database))
    try:
        with store.snapshot() as connection:
            row = submissions.get(connection, submission)
            if row is None:
                raise UsageError(f"there is no submission {submission}")
            notes = submissions.findings_of(connection, [submission]).get(submission, [])
            verdicts = _verdicts(connection, submission)
    finally:
        store.close()
    status = submissions.status_of(row, notes)
    if as_json:
        _print_json(
            {
                **_summary(row),
                "times_ms": status.times_ms,
                "findings": [msgspec.to_builtins(note) for note in notes],
                "verdicts": verdicts,
            }
        )
        return
    typer.echo(f"unit {row.version}/{row.unit_index} of node 0x{row.node.hex()} (owner {row.owner})")
    typer.echo(f"file {row.file_hash.hex()}, {row.size_bytes} bytes, {row.rows} rows, {row.tokens} tokens")
    for state, at in sorted(status.times_ms.items(), key=lambda entry: entry[1]):
        typer.echo(f"  {_time(at)}  {state}")
    for verdict in verdicts:
        typer.echo(f"  {verdict['outcome']} by {verdict['validator']}, attempt {verdict['attempt']}")
    _print_findings(notes)
    if row.case_id is not None:
        typer.echo(f"slashing case {row.case_id}")


def print_audit(report: AuditReport, *, as_json: bool) -> None:
    """Both verdicts and whether they agree."""
    if as_json:
        _print_json({**msgspec.to_builtins(report), "same": report.same})
        return
    typer.echo(f"evidence {report.evidence_hash}")
    typer.echo(f"unit {report.version}/{report.index} of node {report.node}")
    typer.echo(f"judged again: {report.outcome}")
    _print_findings(report.findings)
    if report.same:
        typer.echo(f"same verdict: {report.said_outcome}")
    else:
        said = ", ".join(code for _, code in sorted(reasons(report.said_findings)))
        typer.echo(f"ANOTHER verdict: the validator said {report.said_outcome} ({said})")


def _print_findings(notes: list[FindingNote]) -> None:
    """One line per reason, with the finding that is farthest from its limit."""
    by_reason: dict[tuple[str, str, str], list[FindingNote]] = {}
    for note in notes:
        by_reason.setdefault((note.kind, note.check, note.code), []).append(note)
    for (kind, check, code), alike in by_reason.items():
        worst = max(alike, key=lambda note: -math.inf if note.measured is None else note.measured)
        more = f" (the worst of {len(alike)})" if len(alike) > 1 else ""
        typer.echo(f"  {kind}: {check}/{code}: {worst.text}{more}")


def _verdicts(connection: Connection, submission: int) -> list[dict[str, Any]]:
    table, jobs = schema.verdicts, schema.jobs
    rows = connection.execute(
        select(table.c.validator, table.c.outcome, table.c.at_ms, jobs.c.attempt)
        .join(jobs, jobs.c.id == table.c.job_id)
        .where(table.c.submission_id == submission)
        .order_by(jobs.c.attempt)
    )
    return [dict(row._mapping) for row in rows]


def _summary(row: Record) -> dict[str, Any]:
    return {**submissions.summary(row), "file_hash": row.file_hash.hex()}


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _print_json(value: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
