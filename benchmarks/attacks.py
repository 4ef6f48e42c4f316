"""Mounts every generation-side attack and writes which check catches it, and how often.

    python benchmarks/attacks.py                                tiny policy in float32 (made on the spot)
    python benchmarks/attacks.py --model FOLDER                 and this checkpoint, in bfloat16
    python benchmarks/attacks.py --model FOLDER --write docs/verification.md

Each attack is a unit builder of `tests/attacks` or an altered checkpoint, run by the nodes' own code; each
unit is judged by the validators' own checks with the default limits, and by INTELLECT-2's limits on the same
scores. Results are appended to --results as they come, and what is there already is not computed again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from attack_bench.bench import Bench, Mount
from attack_bench.policies import model_bench, sums_bench, tiny_bench
from attack_bench.results import Result
from attack_bench.tables import report

BEGIN, END = "<!-- attacks:begin -->", "<!-- attacks:end -->"


def measured(
    bench: Bench, attacks: dict[str, Mount], units: int, results: Path, only: Sequence[str]
) -> list[Result]:
    """All units of all attacks; unit 0 of every attack comes first, so that a run may be stopped."""
    lines = results.read_text().splitlines() if results.exists() else []
    done = [msgspec.json.decode(line, type=Result) for line in lines]
    found = {(each.attack, each.index): each for each in done if each.setting == bench.name}
    with results.open("a") as file:
        for index in range(units):
            for attack, mount in attacks.items():
                if (attack, index) in found or (only and not any(part in attack for part in only)):
                    continue
                result = bench.measure(attack, index, mount)
                found[attack, index] = result
                file.write(msgspec.json.encode(result).decode() + "\n")
                file.flush()
                verdict = result.fraud or result.suspect or ["accepted"]
                print(f"{bench.name}: {attack}, unit {index}: {', '.join(verdict)}", file=sys.stderr)
    return [each for each in found.values() if each.attack in attacks]


def write_between_markers(path: Path, lines: Sequence[str]) -> None:
    """Replace what stands between the markers of a document."""
    text = path.read_text()
    head, _, rest = text.partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        raise SystemExit(f"{path}: no {BEGIN} ... {END}")
    path.write_text("\n".join([head + BEGIN, *lines, END + tail]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, help="checkpoint folder of a chat model, run in bfloat16")
    parser.add_argument("--name", default="SmolLM2-135M-Instruct", help="what to call the model")
    parser.add_argument("--units", type=int, default=2, help="units per attack")
    parser.add_argument("--only", nargs="*", default=[], help="attacks whose name contains one of these")
    parser.add_argument("--work", type=Path, default=Path("build/attacks"), help="altered checkpoints")
    parser.add_argument("--write", type=Path, help="document with markers to write the tables into")
    parser.add_argument("--skip-tiny", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    results = options.work / "results.jsonl"
    lines: list[str] = []
    if not options.skip_tiny:
        bench, attacks = tiny_bench(options.work)
        found = measured(bench, attacks, options.units, results, options.only)
        lines += report("Tiny policy (138k parameters), float32", found, list(attacks))
    if options.model:
        for title, make in (("{} in bfloat16", model_bench), ("{} in bfloat16, one-digit sums", sums_bench)):
            bench, attacks = make(options.model, options.work)
            found = measured(bench, attacks, options.units, results, options.only)
            if found:
                lines += report(title.format(options.name), found, list(attacks))
    print("\n".join(lines))
    if options.write:
        write_between_markers(options.write, lines)


if __name__ == "__main__":
    main()
