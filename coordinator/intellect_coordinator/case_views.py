"""Slashing cases as views show them."""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, select

from . import schema
from .slashing import CaseState

_CASES = schema.cases
_TOKEN_UNIT = 10**18


class CaseView(msgspec.Struct, frozen=True):
    """A case as views show it."""

    node: str
    owner: str
    version: int
    index: int
    code: str
    status: str
    case_id: int | None
    seized: float
    evidence: str


def case_views(connection: Connection, limit: int = 100) -> list[CaseView]:
    """The newest cases, oldest first; frauds that added nothing to a case are left out."""
    table = schema.submissions
    rows = connection.execute(
        select(_CASES, table.c.version, table.c.unit_index)
        .join(table, table.c.id == _CASES.c.submission_id)
        .where(_CASES.c.state != CaseState.RECORDED)
        .order_by(_CASES.c.id.desc())
        .limit(limit)
    ).all()
    return [
        CaseView(
            node=f"0x{row.node.hex()}",
            owner=row.owner,
            version=row.version,
            index=row.unit_index,
            code=row.code,
            status=row.state,
            case_id=row.case_id,
            seized=int(row.seized) / _TOKEN_UNIT,
            evidence=row.evidence_hash.hex() if row.evidence_hash else "",
        )
        for row in reversed(rows)
    ]
