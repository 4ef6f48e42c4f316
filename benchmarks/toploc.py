"""TOPLOC commitments: time to build and to verify, ours and the reference package in one run.

    python benchmarks/toploc.py [--hidden 576 ...] [--chunks 64] [--repeats 9] [--reference FOLDER]

The reference (PyPI `toploc` 0.1.6) is compiled from its source distribution against the torch of this
environment, since its wheels load on an older one only. It goes into a folder of its own and is measured in
a child process; nothing else here imports it. Where it cannot be compiled or loaded its columns stay empty
and the reason is printed.

Both are measured in child processes tied to one core, with one torch thread, on the same bf16 states:
microseconds of CPU time per chunk of 32 tokens, the least of some repeats. Our verifier also draws and
evaluates its negative check, which the reference does not have.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REFERENCE = "toploc==0.1.6"
TOP_K = 128
CHUNK_TOKENS = 32
BUILD_TIMEOUT_S = 3600.0
MEASURE_TIMEOUT_S = 900.0


def install_reference(folder: Path) -> str:
    """Compile the reference into `folder`, unless it is there; returns why that failed, or ""."""
    if (folder / "toploc" / "poly.py").exists():
        return ""
    print(f"compiling {REFERENCE} into {folder} (some minutes)", file=sys.stderr)
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-build-isolation", "--no-binary", "toploc"),
        *("--target", str(folder), REFERENCE),
    ]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"not compiled within {BUILD_TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        return ""
    errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    return (errors or ["pip failed without a word"])[-1].strip()[:300]


def measure(side: str, hidden: list[int], chunks: int, repeats: int, reference: Path) -> dict[int, Any]:
    """Run this script as the child that measures one side.

    Raises:
        RuntimeError: the child failed; in its last words.
    """
    # -P keeps this script's folder off the path, where the script itself would pass for the package.
    child = [sys.executable, "-P", __file__, "--child", side, "--hidden", *map(str, hidden)]
    child += ["--chunks", str(chunks), "--repeats", str(repeats)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if side == "reference":
        environment["PYTHONPATH"] = str(reference)
    done = subprocess.run(
        child, check=False, capture_output=True, text=True, timeout=MEASURE_TIMEOUT_S, env=environment
    )
    if done.returncode != 0:
        raise RuntimeError((done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1][:300])
    return {int(size): values for size, values in json.loads(done.stdout.splitlines()[-1]).items()}


def cpu_microseconds(work: Callable[[], object], repeats: int) -> float:
    work()
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return 1e6 * best


def child(side: str, hidden: list[int], chunks: int, repeats: int) -> None:
    """Measure one side in this process and print its numbers as JSON."""
    import torch

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    results = {}
    for size in hidden:
        generator = torch.Generator().manual_seed(size)
        states = torch.randn(chunks * CHUNK_TOKENS, size, generator=generator).bfloat16()
        build, verify = SIDES[side](states)
        results[size] = {
            "build_us": cpu_microseconds(build, repeats) / chunks,
            "verify_us": cpu_microseconds(verify, repeats) / chunks,
        }
    print(json.dumps(results))


def our_work(states: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    from intellect_protocol import toploc

    proofs = toploc.build(states)
    if any(report.exponent_mismatches for report in toploc.verify(states, proofs)):
        raise RuntimeError("own proofs do not verify")
    return lambda: toploc.build(states), lambda: toploc.verify(states, proofs)


def reference_work(states: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    from toploc import poly

    rows = list(states)  # the package builds from a list of one state per token, and verifies a tensor

    def build() -> list[bytes]:
        proofs: list[bytes] = poly.build_proofs_bytes(rows, CHUNK_TOKENS, TOP_K, True)
        return proofs

    proofs = build()
    results = poly.verify_proofs_bytes(states, proofs, CHUNK_TOKENS, TOP_K, True)
    if any(result.exp_mismatches for result in results):
        raise RuntimeError("the reference's own proofs do not verify")
    return build, lambda: poly.verify_proofs_bytes(states, proofs, CHUNK_TOKENS, TOP_K, True)


SIDES = {"ours": our_work, "reference": reference_work}


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        f"{'':>8}  {'build, us per chunk':^28}  {'verify, us per chunk':^28}",
        f"{'hidden':>8}" + 2 * f"  {'ours':>8} {'reference':>10} {'ratio':>8}",
    ]
    for row in results:
        cells = [f"{row['hidden']:>8}"]
        for what in ("build", "verify"):
            theirs, ratio = row[f"reference_{what}_us"], row[f"{what}_ratio"]
            other = f"{theirs:>10.0f} {ratio:>7.1f}x" if theirs is not None else f"{'-':>10} {'-':>8}"
            cells.append(f"{row[f'{what}_us']:>8.0f} {other}")
        lines.append("  ".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hidden", type=int, nargs="+", default=[576, 2048, 4096, 8192])
    parser.add_argument("--chunks", type=int, default=64, help="chunks of 32 tokens per call")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--reference", type=Path, help="where the reference is, or is to be put")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--child", choices=sorted(SIDES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = (options.hidden, options.chunks, options.repeats)
    if options.child:
        child(options.child, *sizes)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.reference or Path(scratch) / "reference"
        reference: dict[int, Any] = {}
        skipped = install_reference(folder)
        if not skipped:
            try:
                reference = measure("reference", *sizes, folder)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                skipped = f"{REFERENCE} does not run here: {error}"
        ours = measure("ours", *sizes, folder)
    results = []
    for size in options.hidden:
        row = {"hidden": size, **ours[size]}
        for what in ("build", "verify"):
            theirs = reference[size][f"{what}_us"] if reference else None
            row[f"reference_{what}_us"] = theirs
            row[f"{what}_ratio"] = theirs / row[f"{what}_us"] if theirs is not None else None
        results.append(row)
    print(table(results))
    if skipped:
        print(f"reference skipped: {skipped}")
    summary = json.dumps({"reference": REFERENCE, "skipped": skipped, "results": results})
    if options.json:
        options.json.write_text(summary)
    print(summary)


if __name__ == "__main__":
    main()
