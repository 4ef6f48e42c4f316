"""What the coordinator shows: `status.json` each second, the web page and `submissions list`.

Views read; nothing here decides anything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, func, select

from intellect_protocol.messages import Announcement, SubmissionState

from . import jobs, schema
from .case_views import case_views
from .duplicates import CODE

_EVENTS_SHOWN = 50
_FRAUDS_SHOWN = 500
_DUPLICATES_SHOWN = 50
_FINDINGS_SEARCHED = 10_000
_SUBMISSIONS = schema.submissions


def counts_by_state(connection: Connection) -> dict[str, int]:
    """Submissions per state."""
    rows = connection.execute(select(_SUBMISSIONS.c.state, func.count()).group_by(_SUBMISSIONS.c.state))
    return {str(state): int(count) for state, count in rows}


def reasons(connection: Connection) -> dict[str, int]:
    """Refused submissions per code of the finding that decided."""
    rows = connection.execute(
        select(_SUBMISSIONS.c.code, func.count())
        .where(_SUBMISSIONS.c.state == SubmissionState.REJECTED)
        .group_by(_SUBMISSIONS.c.code)
    )
    return {str(code): int(count) for code, count in rows}


def fraud_verdicts(connection: Connection) -> list[dict[str, Any]]:
    """The newest verdicts of fraud, oldest first."""
    rows = connection.execute(
        select(_SUBMISSIONS)
        .where(_SUBMISSIONS.c.fraud)
        .order_by(_SUBMISSIONS.c.judged_at_ms.desc())
        .limit(_FRAUDS_SHOWN)
    ).all()
    return [
        {
            "node": f"0x{row.node.hex()}",
            "version": row.version,
            "index": row.unit_index,
            "code": row.code,
        }
        for row in reversed(rows)
    ]


def duplicates(connection: Connection) -> list[dict[str, Any]]:
    """The newest remarks on completions that several nodes have, oldest first; see `duplicates`."""
    table = schema.findings
    # The table is long and has no index by code: only its end is looked at.
    end = int(connection.scalar(select(func.max(table.c.id))) or 0)
    rows = connection.execute(
        select(table.c.text, table.c.measured, _SUBMISSIONS)
        .join(_SUBMISSIONS, _SUBMISSIONS.c.id == table.c.submission_id)
        .where(table.c.id > end - _FINDINGS_SEARCHED, table.c.code == CODE)
        .order_by(table.c.id.desc())
        .limit(_DUPLICATES_SHOWN)
    ).all()
    return [
        {
            "node": f"0x{row.node.hex()}",
            "version": row.version,
            "index": row.unit_index,
            "share": row.measured,
            "text": row.text,
        }
        for row in reversed(rows)
    ]


def last_events(connection: Connection) -> list[dict[str, Any]]:
    """The last events in plain words, oldest first."""
    table = schema.events
    rows = connection.execute(select(table).order_by(table.c.id.desc()).limit(_EVENTS_SHOWN)).all()
    return [{"time_ms": row.at_ms, "text": row.text} for row in reversed(rows)]


def node_counts(connection: Connection) -> list[dict[str, Any]]:
    """Per node key: owner, submissions by state, last version worked on."""
    rows = connection.execute(
        select(
            _SUBMISSIONS.c.node,
            _SUBMISSIONS.c.owner,
            _SUBMISSIONS.c.state,
            func.count().label("count"),
            func.max(_SUBMISSIONS.c.version).label("version"),
        ).group_by(_SUBMISSIONS.c.node, _SUBMISSIONS.c.owner, _SUBMISSIONS.c.state)
    )
    found: dict[bytes, dict[str, Any]] = {}
    for row in rows:
        entry = found.setdefault(
            row.node, {"node": f"0x{row.node.hex()}", "owner": row.owner, "version": -1, "units": {}}
        )
        entry["units"][row.state] = row.count
        entry["version"] = max(entry["version"], row.version)
    return sorted(found.values(), key=lambda entry: str(entry["node"]))


def committed_versions(connection: Connection) -> int:
    """Versions whose work root is on the ledger."""
    table = schema.roots
    query = select(func.count()).where(table.c.state == "committed")
    return int(connection.scalar(query) or 0)


def snapshot(connection: Connection) -> dict[str, Any]:
    """Everything that views show, from the database."""
    states = counts_by_state(connection)
    return {
        "role": "coordinator",
        "accepted": states.get(SubmissionState.ACCEPTED, 0),
        "rejected": states.get(SubmissionState.REJECTED, 0),
        "inconclusive": states.get(SubmissionState.INCONCLUSIVE, 0),
        "pending": states.get(SubmissionState.QUEUED, 0) + states.get(SubmissionState.RECEIVED, 0),
        "reasons": reasons(connection),
        "fraud_verdicts": fraud_verdicts(connection),
        "duplicates": duplicates(connection),
        "cases": [msgspec.to_builtins(view) for view in case_views(connection)],
        "committed_versions": committed_versions(connection),
        "jobs": jobs.open_counts(connection),
        "nodes": node_counts(connection),
        "events": last_events(connection),
    }


def head_of(announcement: Announcement | None) -> int | None:
    """The version of an announcement, for display."""
    return None if announcement is None else announcement.version


def write_status(data_dir: Path, content: Mapping[str, Any]) -> None:
    """Replace `status.json` in a role's data directory, whole or not at all."""
    path = data_dir / "status.json"
    part = path.with_name("status.json.part")
    part.write_bytes(msgspec.json.encode({"pid": os.getpid(), **content}))
    part.replace(path)
