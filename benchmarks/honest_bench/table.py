"""Counts over units, the bounds they give, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from intellect_coordinator.calibration.bounds import CONFIDENCE, upper_bound
from intellect_protocol.validation.findings import Kind, Outcome

from .bench import UnitRecord


class Total(msgspec.Struct):
    """Counts over some units."""

    units: int = 0
    rows: int = 0
    tokens: int = 0
    chunks: int = 0
    fraud_units: int = 0
    fraud_rows: int = 0  # of which a finding says fraud
    suspect_units: int = 0
    suspect_rows: int = 0
    refused_units: int = 0  # for another reason
    made_s: float = 0.0
    judged_s: float = 0.0
    worst: dict[str, float] = msgspec.field(default_factory=dict)

    def add(self, record: UnitRecord) -> None:
        """Count one more unit."""
        kinds = {found.kind for found in record.findings}
        fraud, suspect = Kind.FRAUD in kinds, Kind.SUSPECT in kinds
        self.units += 1
        self.rows += record.rows
        self.tokens += record.tokens
        self.chunks += record.chunks
        self.fraud_units += fraud
        self.fraud_rows += rows_with(record, Kind.FRAUD)
        self.suspect_units += suspect and not fraud
        self.suspect_rows += rows_with(record, Kind.SUSPECT)
        self.refused_units += not fraud and record.outcome == Outcome.REJECTED
        self.made_s += record.made_s
        self.judged_s += record.judged_s
        for name, value in record.worst.items():
            self.worst[name] = max(value, self.worst.get(name, 0.0))

    def bounds(self) -> dict[str, float]:
        """Upper bounds of the rates of false accusation."""
        return {
            "fraud_per_row_upper": upper_bound(self.fraud_rows, self.rows),
            "fraud_per_unit_upper": upper_bound(self.fraud_units, self.units),
        }


def rows_with(record: UnitRecord, kind: Kind) -> int:
    """Rows about which a finding of this kind is; a finding about group or unit counts as one row."""
    rows = {found.row for found in record.findings if found.kind == kind}
    return len(rows)


def report(records: Sequence[UnitRecord]) -> dict[str, Any]:
    """Print the table; returns the summary."""
    by_workload: dict[str, Total] = {}
    by_pair: dict[tuple[str, str, str], Total] = {}
    total = Total()
    for record in records:
        sides = [("made by", record.generator), ("judged by", record.validator)]
        by_workload.setdefault(record.workload, Total()).add(record)
        total.add(record)
        for side, setting in sides:
            by_pair.setdefault((record.workload, side, setting), Total()).add(record)
    head = f"{'':<58} {'units':>5} {'rows':>6} {'chunks':>6} {'fraud':>5} {'suspect':>7}  worst"
    print(head)

    def line(name: str, counts: Total) -> None:
        worst = " ".join(f"{key} {value:.3g}" for key, value in counts.worst.items())
        print(
            f"{name:<58} {counts.units:>5} {counts.rows:>6} {counts.chunks:>6} {counts.fraud_rows:>5} "
            f"{counts.suspect_rows:>7}  {worst}"
        )

    for name, counts in by_workload.items():
        line(name, counts)
        for (workload, side, setting), own in sorted(by_pair.items()):
            if workload == name:
                line(f"  {side} {setting}", own)
    line("all", total)
    bounds = total.bounds()
    rate, unit_rate = bounds["fraud_per_row_upper"], bounds["fraud_per_unit_upper"]
    print(
        f"false fraud: {total.fraud_rows} of {total.rows} rows, at most {rate:.2e} per row; "
        f"{total.fraud_units} of {total.units} units, at most {unit_rate:.2e} per unit "
        f"({CONFIDENCE:.0%}, one-sided)"
    )
    for record in records:
        for found in record.findings:
            print(f"{found.kind}: {record.workload}/{record.index} {record.generator} -> {record.validator}:")
            print(
                f"  {found.check}/{found.code} row {found.row} measured {found.measured} limit {found.limit}"
            )
    return {
        "confidence": CONFIDENCE,
        "total": {**msgspec.to_builtins(total), **bounds},
        "workloads": {
            name: {**msgspec.to_builtins(counts), **counts.bounds()} for name, counts in by_workload.items()
        },
    }
