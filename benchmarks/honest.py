"""Are honest nodes ever accused? Rollouts of mixed engines through the validators' own pipeline.

    python benchmarks/honest.py --out honest.jsonl --smollm2 policy-zero --rows tiny=8192 --rows smollm2=2048

Every unit is made by the nodes' unit builder, signed, written as a rollout file, read back and judged by
`validate_unit` under the default thresholds of its dtype. Making and judging never agree by design: unit i
pairs generator i mod 6 with validator (i + i div 6) mod 6 of the lists below, which differ in decoder (ours,
transformers), attention kernel, batch shape, padding, threads and, for bfloat16, the validator's dtype.

Workloads: `tiny` (float32, sorting 4 to 8 digits), `tiny-long` (sorting up to 24, two chunks), `smollm2`
(bfloat16, sums in a chat, 12 tokens as in the devnet) and `smollm2-long` (64 tokens). Each unit is one line
of the output file as soon as it is judged; started again, the program goes on behind the last one. At the
end it prints a table and one JSON line, and its exit code is 1 if anybody was accused. The bound beside a
rate of false accusations is Clopper and Pearson's one-sided one (Biometrika 26, 1934) at 95 %: the highest
rate that would show so few in one of 20 trials.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads that spin while they wait would burn most of the time of the two-thread settings on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import msgspec
import trio
from honest_bench.bench import Bench, UnitRecord
from honest_bench.settings import WORKLOADS
from honest_bench.table import report


def read_records(path: Path) -> list[UnitRecord]:
    """Records of an earlier start; a last line that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [msgspec.json.decode(line, type=UnitRecord) for line in lines if line.endswith(b"\n")]


def model_folder(model: str, given: Path | None, work: Path) -> Path | None:
    """The checkpoint folder of a model; the tiny one is made where none is named."""
    if given is not None or model != "tiny":
        return given
    folder = work / "honest-tiny"
    if not folder.exists():
        command = ["init-model", "--model", "tiny", "--environment", "sort_digits", "--out", str(folder)]
        subprocess.run([sys.executable, "-m", "intellect_trainer", *command], check=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one per unit; continued")
    parser.add_argument("--tiny", type=Path, help="checkpoint folder; default: made beside --out")
    parser.add_argument(
        "--smollm2", type=Path, help="checkpoint folder; without it those workloads are left out"
    )
    parser.add_argument("--rows", action="append", help="WORKLOAD=N, at least N rows of it; repeatable")
    parser.add_argument("--report-only", action="store_true", help="only show what is in --out")
    args = parser.parse_args()
    records = read_records(args.out)
    if not args.report_only:
        wanted = dict(each.split("=") for each in args.rows or ["tiny=6144", "tiny-long=2048"])
        done = {(record.run_id, record.weights, record.index) for record in records}
        for name, rows in wanted.items():
            model = WORKLOADS[name].model
            folder = model_folder(model, args.tiny if model == "tiny" else args.smollm2, args.out.parent)
            if folder is None:
                print(f"{name}: left out, name its model with --{model}", file=sys.stderr)
                continue
            bench = Bench(name, folder)
            for index in range(-(-int(rows) // bench.rows_per_unit)):
                if bench.key(index) in done:
                    continue
                record = trio.run(bench.unit, index)
                records.append(record)
                with args.out.open("ab") as out:
                    out.write(msgspec.json.encode(record) + b"\n")
                print(f"{name}/{index}: {record.outcome}", file=sys.stderr)
    summary = report(records)
    print(json.dumps(summary))
    sys.exit(1 if summary["total"]["fraud_units"] or summary["total"]["refused_units"] else 0)


if __name__ == "__main__":
    main()
