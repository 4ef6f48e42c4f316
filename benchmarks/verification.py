"""What verifying costs against what generating cost, on the same rollouts, in CPU seconds of one thread.

    python benchmarks/verification.py --model FOLDER [--lengths 64 256 1024] [--batches 1 8 32]

Generation is the engine's continuous batching with seeded sampling and commitments; verification is the
validator's prefill with sampling distances, log-probs and commitments of every token, and the grading of the
scores. Rows run to full length; up to 8 samples share a prompt. Printed for each length and batch: seconds of
both, their ratio, and the shares of proof building in generation and of commitments in verification.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

GROUP = 8


class Stopwatch:
    """CPU seconds spent inside functions that are replaced by timed ones."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def on(self, module: Any, name: str) -> Iterator[None]:
        """Time every call of `module.name`."""
        original = getattr(module, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        setattr(module, name, timed)
        try:
            yield
        finally:
            setattr(module, name, original)


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def seed(*parts: int) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def measure(engine: Any, length: int, batch: int, prompt_tokens: int) -> dict[str, Any]:
    """One setting: generate `batch` rows of `length` tokens, then verify them."""
    from intellect_protocol import toploc
    from intellect_protocol.engines.base import Completion, GenerateRequest, RowScore, Sampling, ScoreRow
    from intellect_protocol.validation.commitment import check_commitments
    from intellect_protocol.validation.limits import default_thresholds
    from intellect_protocol.validation.sampling import check_sampling

    sampling, info = Sampling(), engine.info()
    requests = [
        GenerateRequest(
            prompt=[(17 * group + 31 * place) % (info.vocab_size - 10) + 5 for place in range(prompt_tokens)],
            seeds=[seed(length, group, sample) for sample in range(min(GROUP, batch - group))],
            max_tokens=length,
        )
        for group in range(0, batch, GROUP)
    ]
    made: dict[tuple[int, int], Completion] = {}

    def keep(request: int, sample: int, completion: Completion) -> None:
        made[request, sample] = completion

    building = Stopwatch()
    with building.on(toploc, "build_many"):
        generating = cpu_seconds(lambda: engine.generate(requests, sampling, keep, lambda tokens: None))

    rows = [
        ScoreRow(request.prompt, made[number, sample].tokens, sigma, made[number, sample].proofs)
        for number, request in enumerate(requests)
        for sample, sigma in enumerate(request.seeds)
    ]
    scores: dict[int, RowScore] = {}
    findings: list[Any] = []
    limits = default_thresholds(info.dtype)

    def verify() -> None:
        engine.score(rows, sampling, b"secret", scores.__setitem__, lambda tokens: None)
        ordered = [scores[number] for number in range(len(rows))]
        findings.extend(check_commitments(ordered, limits))
        findings.extend(check_sampling(ordered, min(GROUP, batch), limits))

    comparing = Stopwatch()
    with comparing.on(toploc, "verify_many"):
        verifying = cpu_seconds(verify)
    tokens = sum(len(row.completion) for row in rows)
    return {
        "length": length,
        "batch": batch,
        "tokens": tokens,
        "generate_s": generating,
        "verify_s": verifying,
        "ratio": verifying / generating,
        "generate_tokens_per_s": tokens / generating,
        "verify_tokens_per_s": tokens / verifying,
        "build_share": building.seconds / generating,
        "compare_share": comparing.seconds / verifying,
        "findings": sorted({finding.code for finding in findings}),
    }


def table(results: list[dict[str, Any]]) -> str:
    columns = [("generate", "CPU s"), ("verify", "CPU s"), ("verify /", "generate")]
    columns += [("proofs in", "generating"), ("proofs in", "verifying")]
    lines = [
        f"{first:>6} {second:>5} " + " ".join(f"{column[line]:>10}" for column in columns)
        for line, (first, second) in enumerate([("length", "batch"), ("", "")])
    ]
    lines += [
        f"{row['length']:>6} {row['batch']:>5} {row['generate_s']:>10.2f} {row['verify_s']:>10.2f} "
        f"{row['ratio']:>10.1%} {row['build_share']:>10.2%} {row['compare_share']:>10.2%}"
        for row in results
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="checkpoint folder; without one nothing is measured")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument(
        "--max-tokens", type=int, default=8192, help="leave out settings that would generate more"
    )
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    if options.model is None:
        print("skipped: give --model FOLDER")
        return

    import torch

    from intellect_protocol.engines.torch_engine import TorchEngine

    torch.set_num_threads(1)
    engine = TorchEngine(device="cpu", dtype=options.dtype, max_rows=max(options.batches))
    info = engine.load(options.model)
    measure(engine, 8, 1, options.prompt_tokens)  # kernels and tables are made on first use
    results = []
    for length in options.lengths:
        for batch in options.batches:
            if length * batch > options.max_tokens:
                print(f"left out: {batch} rows of {length} tokens (--max-tokens)", file=sys.stderr)
                continue
            results.append(measure(engine, length, batch, options.prompt_tokens))
            print(table(results[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(results))
    summary = json.dumps({"model": str(options.model), "dtype": info.dtype, "results": results})
    if options.json:
        options.json.write_text(summary)
    print(summary)


if __name__ == "__main__":
    main()
