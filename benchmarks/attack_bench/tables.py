"""Results as markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from .results import Result

FALSE_ALARM, POWER = 4.75, 2.33  # normal quantiles of 1e-6 and 0.99


def share(part: int, whole: int) -> str:
    """A count as a percentage."""
    return "-" if not whole else f"{100 * part / whole:.0f} %"


def units_needed(caught: int, units: int) -> str:
    """Units until a cheat is caught with 99 %, at the share of units caught here."""
    if caught == units:
        return "1"
    return str(math.ceil(math.log(0.01) / math.log1p(-caught / units))) if caught else "never"


def attack_table(results: Sequence[Result], order: Iterable[str]) -> list[str]:
    """Attack x check x rate."""
    lines = [
        "| attack | chunks over a commitment limit: fraud (suspect) | "
        "rows over a draw limit: fraud (suspect) | units: fraud / suspect / accepted | "
        "for 99 %: units | found by | INTELLECT-2: chunks / units / stop rule |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in order:
        own = [each for each in results if each.attack == name]
        if not own:
            continue
        chunks, rows = sum(r.chunks for r in own), sum(r.rows for r in own)
        scored = rows if chunks else 0
        fraud = sum(bool(r.fraud) for r in own)
        suspect = sum(not r.fraud and bool(r.suspect) for r in own)
        units = len(own)
        needed = "-" if name == "honest" else units_needed(fraud or suspect, units)
        codes = list(dict.fromkeys(code for r in own for code in r.codes[:3]))[:4]
        lines.append(
            f"| {name} | {share(sum(r.chunk_fraud for r in own), chunks)} "
            f"({share(sum(r.chunk_suspect for r in own), chunks)}) | "
            f"{share(sum(r.row_fraud for r in own), scored)} "
            f"({share(sum(r.row_suspect for r in own), scored)}) | "
            f"{fraud} / {suspect} / {units - fraud - suspect} | {needed} | "
            f"{', '.join(f'`{code}`' for code in codes) or '-'} | "
            f"{share(sum(r.paper_chunks for r in own), chunks)} / "
            f"{share(sum(bool(r.paper_chunks) for r in own), units if chunks else 0)} / "
            f"{share(sum(r.paper_stops for r in own), scored)} |"
        )
    return lines


def effect(honest: Sequence[float], attacked: Sequence[float]) -> float:
    """Difference of two means in standard deviations of the honest sample."""
    shift, spread = abs(float(np.mean(attacked)) - float(np.mean(honest))), float(np.std(honest))
    return 0.0 if shift < 1e-6 else shift / spread if spread else math.inf


def pooled_units(shift: float, per_unit: float) -> str:
    """Units whose mean over all samples tells a shift at one false alarm in a million and 99 % power."""
    if shift == 0:
        return "no end"
    return f"{max(1, math.ceil(((FALSE_ALARM + POWER) / shift) ** 2 / per_unit)):,}"


def pooled_table(results: Sequence[Result], order: Iterable[str]) -> list[str]:
    """For attacks that pass as single units: what the mean over many would tell."""
    honest = [each for each in results if each.attack == "honest"]
    mantissas = [value for r in honest for value in r.mantissas]
    drifts = [value for r in honest for value in r.drifts]
    lines = [
        "| attack | mean mantissa error, honest -> attack | units | "
        "mean log-prob drift, honest -> attack | units |",
        "|---|---|---|---|---|",
    ]
    for name in order:
        own = [each for each in results if each.attack == name]
        if name == "honest" or not own or any(r.fraud for r in own) or not mantissas:
            continue
        theirs = [value for r in own for value in r.mantissas]
        drift = [value for r in own for value in r.drifts]
        lines.append(
            f"| {name} | {np.mean(mantissas):.3f} -> {np.mean(theirs):.3f} | "
            f"{pooled_units(effect(mantissas, theirs), len(theirs) / len(own))} | "
            f"{np.mean(drifts):.4f} -> {np.mean(drift):.4f} | "
            f"{pooled_units(effect(drifts, drift), len(drift) / len(own))} |"
        )
    return lines if len(lines) > 2 else []


def slack_table(results: Sequence[Result]) -> list[str]:
    """What the limits on distances leave to a cheat."""
    honest = [each for each in results if each.attack == "honest" and each.reach]
    steered = [each for each in results if each.attack == "slack steering"]
    if not honest:
        return []
    mean = {key: float(np.mean([r.reach[key] for r in honest])) for key in honest[0].reach}
    rewards = {each.index: each.reward for each in results if each.attack == "honest"}
    before = [rewards[each.index] for each in steered if each.index in rewards]
    lines = [
        "| what a cheat could choose | value |",
        "|---|---|",
        f"| reach of a single token (distance) | {mean['reach']:g} |",
        f"| positions with another token of probability >= 0.01 within reach | {mean['probable']:.1%} |",
        f"| positions with any other token within reach | {mean['any']:.1%} |",
        f"| positions with the stop token within reach though its probability is below 1e-4 | "
        f"{mean['stop']:.1%} |",
        f"| of the probable ones, per row of {mean['tokens']:.0f} tokens, those the mean distance allows | "
        f"{mean['afforded']:.2f} (2^{mean['afforded']:.2f} = {2 ** mean['afforded']:.1f} completions) |",
    ]
    if steered and before:
        lines.append(
            f"| mean reward, honest -> steered within the limits | {np.mean(before):.3f} -> "
            f"{np.mean([each.reward for each in steered]):.3f} |"
        )
    return lines


def report(title: str, results: Sequence[Result], order: Sequence[str]) -> list[str]:
    """Markdown of one setting."""
    units = max((each.index for each in results), default=-1) + 1
    honest = [each for each in results if each.attack == "honest"]
    rows, tokens = sum(r.rows for r in honest), sum(r.tokens for r in honest)
    lines = [
        f"### {title}",
        "",
        f"Units per attack: up to {units}. The honest ones have {rows} rows with {tokens} tokens in "
        f"{sum(r.chunks for r in honest)} chunks.",
        "",
        *attack_table(results, order),
        "",
    ]
    for heading, table in (
        (
            "Not fraud as a single unit: what a mean over many units would tell (one false alarm in a "
            "million, 99 % found; no check does this, because the honest mean depends on the node's engine)",
            pooled_table(results, order),
        ),
        ("Slack", slack_table(results)),
    ):
        if table:
            lines += [f"{heading}:", "", *table, ""]
    return lines
