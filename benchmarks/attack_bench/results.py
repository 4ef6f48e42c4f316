"""What one unit of one attack measured."""

from __future__ import annotations

import msgspec


class Result(msgspec.Struct):
    """What one unit of one attack measured.

    Attributes:
        fraud, suspect: findings by check, at least one of that kind in the unit.
        chunk_fraud, chunk_suspect: chunks over a limit of the commitments, of `chunks`.
        row_fraud, row_suspect: rows over a limit of the draws, of `rows`.
        paper_chunks: chunks that INTELLECT-2's limits refuse; paper_stops: rows its stop rule refuses.
        mantissas, drifts: mean mantissa error of each chunk, mean log-prob difference of each row.
    """

    setting: str
    attack: str
    index: int
    seconds: float
    tokens: int
    reward: float
    rows: int
    chunks: int
    fraud: list[str]
    suspect: list[str]
    codes: list[str]
    chunk_fraud: int
    chunk_suspect: int
    row_fraud: int
    row_suspect: int
    paper_chunks: int
    paper_stops: int
    mantissas: list[float]
    drifts: list[float]
    reach: dict[str, float] = {}
