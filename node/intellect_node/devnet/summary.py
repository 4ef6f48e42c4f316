"""The end of a devnet run in numbers: a table, and JSON with fixed keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from .snapshot import Snapshot

_EDGE_STEPS = 5  # rewards are means over this many steps at either end


def summarize(
    snapshot: Snapshot,
    honest: frozenset[str],
    cheats: frozenset[str],
    stake_before: Mapping[str, float],
    stake_after: Mapping[str, float],
) -> dict[str, Any]:
    """The summary of a run.

    Args:
        honest, cheats: node addresses in lower case.
        stake_before, stake_after: tokens staked, by node name.
    """
    history = list(snapshot.reward_history)
    return {
        "steps": snapshot.step,
        "seconds": round(snapshot.seconds, 1),
        "reward_first": _mean(history[:_EDGE_STEPS]),
        "reward_last": _mean(history[-_EDGE_STEPS:]),
        "heldout_before": snapshot.heldout[0][1] if snapshot.heldout else None,
        "heldout_after": snapshot.heldout[-1][1] if snapshot.heldout else None,
        "submissions_accepted": snapshot.accepted,
        "submissions_rejected": snapshot.rejected,
        "reasons": dict(snapshot.reasons),
        "honest_fraud_verdicts": sum(node in honest for node in snapshot.fraud_nodes),
        "cheats_slashed": len(cheats & snapshot.slashed_nodes),
        "stake_before": dict(stake_before),
        "stake_after": dict(stake_after),
        "bytes_from_origin": snapshot.bytes_from_origin,
        "bytes_from_peers": snapshot.bytes_from_peers,
        "trainer_idle_share": round(snapshot.idle_share, 4),
        "versions_published": snapshot.versions_published,
    }


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The summary for a terminal."""
    table = Table(title="devnet summary", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for key, value in summary.items():
        table.add_row(key.replace("_", " "), _words(value))
    return table


def _words(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number:g}" for name, number in value.items()) or "none"
    if value is None:
        return "not measured"
    return str(value)
