"""What cheating is worth in expectation, against audit share, stake and strategy.

    python benchmarks/audit_share.py [--owners 4000] [--plot audit_share.png]

Shares come from the rule that coordinator and validators use (`validation.audit_share`); owners and audits
are simulated. A cheated unit is worth `unit_value` if it gets through, nothing if it is caught. An owner that
is caught loses its slashable stake once, but not at once: whatever it hands in while the versions of the
window are open is still judged and paid. An audit catches a cheat with probability `detection`.

Beside the rule stand fixed shares, the same for every unit of every owner: what a coordinator would do that
draws one unit in ten, whoever owns it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from intellect_protocol.run import AuditTerms
from intellect_protocol.validation.audit_share import audit_share, unverified_gain

TOKEN = 10**18
OPEN_VERSIONS = 3  # async_level 2
PROBATION_UNITS = 16
STAKES = (3, 10, 30, 100, 300, 1000)  # in units of unit_value


@dataclass(frozen=True)
class Policy:
    """Which share is audited: shares(accepted, units, stake) -> [units] share by position."""

    name: str
    shares: Callable[[int, int, float], np.ndarray]


@dataclass(frozen=True)
class Strategy:
    """cheats(rng, owners, units, accepted) -> [owners, units] which units are cheated."""

    name: str
    cheats: Callable[[np.random.Generator, int, int, int], np.ndarray]


@dataclass(frozen=True)
class Result:
    """Means over owners: value of cheating in units of unit_value, and the share of units audited."""

    value: float
    audited: float


def rule(safety: float, min_share: float = 0.02) -> Policy:
    """The rule of the design with its real code."""
    terms = AuditTerms(
        "", unit_value=1.0, probation_units=PROBATION_UNITS, min_share=min_share, safety=safety
    )

    def shares(accepted: int, units: int, stake: float) -> np.ndarray:
        gains = [unverified_gain(terms, position, OPEN_VERSIONS) for position in range(1, units + 1)]
        slashable = int(stake * TOKEN)
        return np.array([audit_share(terms, accepted=accepted, gain=g, slashable=slashable) for g in gains])

    return Policy(f"rule, safety {safety:g}", shares)


def fixed(share: float) -> Policy:
    """The same share for everybody."""
    return Policy(f"fixed share {share:g}", lambda accepted, units, stake: np.full(units, share))


def _always(rng: np.random.Generator, owners: int, units: int, accepted: int) -> np.ndarray:
    return np.ones((owners, units), bool)


def _sometimes(q: float) -> Strategy:
    return Strategy(
        f"each unit with {q:g}", lambda rng, owners, units, accepted: rng.random((owners, units)) < q
    )


def _patient(rng: np.random.Generator, owners: int, units: int, accepted: int) -> np.ndarray:
    return np.full((owners, units), accepted >= PROBATION_UNITS)


def _first(rng: np.random.Generator, owners: int, units: int, accepted: int) -> np.ndarray:
    """Where the rule audits least: the first unit of each version, after probation."""
    cheated = np.zeros((owners, units), bool)
    cheated[:, 0] = accepted >= PROBATION_UNITS
    return cheated


HONEST = Strategy("never", lambda rng, owners, units, accepted: np.zeros((owners, units), bool))
STRATEGIES = (
    Strategy("every unit", _always),
    _sometimes(0.5),
    _sometimes(0.05),
    Strategy("all, after probation", _patient),
    Strategy("first units, after probation", _first),
)


def simulate(
    policy: Policy,
    strategy: Strategy,
    stake: float,
    *,
    owners: int,
    units: int,
    versions: int,
    detection: float,
    seed: int = 0,
) -> Result:
    """Owners that hand in `units` units per version until they are stopped."""
    rng = np.random.default_rng([seed, int(stake)])
    gain = np.zeros(owners)
    stops_at = np.full(owners, versions)  # first version without work of the owner
    caught = np.zeros(owners, bool)
    audits = handed_in = 0
    for version in range(versions):
        active = version < stops_at
        # Whoever has not been caught has had everything accepted.
        accepted = units * max(0, version - OPEN_VERSIONS + 1)
        share = policy.shares(accepted, units, stake)
        cheated = strategy.cheats(rng, owners, units, accepted) & active[:, None]
        audited = (rng.random((owners, units)) < share) & active[:, None]
        found = cheated & audited & (rng.random((owners, units)) < detection)
        gain += (cheated & ~found).sum(axis=1)
        newly = found.any(axis=1) & ~caught
        caught |= newly
        stops_at[newly] = np.minimum(stops_at[newly], version + OPEN_VERSIONS)
        audits += int(audited.sum())
        handed_in += int(active.sum()) * units
    net = gain - stake * caught
    return Result(float(net.mean()), audits / handed_in)


def table(
    policies: list[Policy], options: argparse.Namespace, detection: float
) -> dict[str, list[list[float]]]:
    """Print a block per policy; returns the values by policy, [stake][strategy]."""
    print(
        f"\nAn audit catches a cheat with probability {detection:g}; {options.units} units per version, "
        f"{OPEN_VERSIONS} open versions, {options.versions} versions, {options.owners} owners per cell."
    )
    header = ["stake"] + [strategy.name for strategy in STRATEGIES] + ["audited (honest)"]
    values: dict[str, list[list[float]]] = {}
    shape = {"owners": options.owners, "units": options.units, "versions": options.versions}
    for policy in policies:
        print(f"\n### {policy.name}\n\n| {' | '.join(header)} |\n|{'---:|' * len(header)}")
        values[policy.name] = []
        for stake in STAKES:
            results = [
                simulate(policy, strategy, stake, detection=detection, **shape) for strategy in STRATEGIES
            ]
            honest = simulate(policy, HONEST, stake, detection=detection, **shape)
            cells = [f"{stake}", *(f"{result.value:+.1f}" for result in results), f"{honest.audited:.1%}"]
            print(f"| {' | '.join(cells)} |")
            values[policy.name].append([result.value for result in results])
    return values


def plot(values: dict[str, list[list[float]]], path: Path) -> None:
    """Value of the best strategy against stake, one line per policy; needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("\nmatplotlib is not installed: no plot")
        return
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, rows in values.items():
        axes.plot(STAKES, [max(row) for row in rows], marker="o", label=name)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_xlabel("slashable stake / value of a unit")
    axes.set_ylabel("value of the best cheat / value of a unit")
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"\n{path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--owners", type=int, default=4000)
    parser.add_argument("--units", type=int, default=8, help="per owner and version")
    parser.add_argument("--versions", type=int, default=60)
    parser.add_argument("--plot", type=Path, help="PNG to write")
    options = parser.parse_args()
    started = time.monotonic()
    policies = [fixed(0.02), fixed(0.1), rule(1.0), rule(2.0)]
    values = table(policies, options, 1.0)
    table([rule(1.0), rule(2.0)], options, 0.5)
    if options.plot is not None:
        plot(values, options.plot)
    print(f"\n{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
