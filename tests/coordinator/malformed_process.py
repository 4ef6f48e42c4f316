"""A validator's judging side as a process of its own, fed one malformed file after the other.

    python malformed_process.py POLICY_FOLDER CORPUS_FOLDER DAMAGED SEED ROUNDS

The corpus folder is one that `malformed_corpus.write_corpus` made; DAMAGED more files are made from its good
one in every round. Real guard child, real engine child. Prints one JSON line per file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import trio
from audit_site import SECRET, AuditSite
from malformed_corpus import GOOD, Case, damaged, read_corpus

from intellect_coordinator.judging import Judge
from intellect_protocol.engines.supervisor import EngineOptions
from intellect_protocol.errors import UnreachableError
from intellect_protocol.rollouts import read_unit
from intellect_protocol.validation.findings import Outcome
from intellect_protocol.validation.pipeline import Judgement


class Folder:
    """Weights that are there, until they are taken away."""

    def __init__(self, folder: Path) -> None:
        self.folder: Path | None = folder

    async def obtain(self, version: int) -> Path:
        if self.folder is None:
            raise UnreachableError(f"nobody has version {version}")
        return self.folder


def same_work(one: bytes, two: bytes, site: AuditSite) -> bool:
    """Whether two files agree in all that is trained on; log-probs are the validator's own."""
    limits = site.context(one).file_limits
    mine, other = (
        [msgspec.structs.replace(row, logprobs=None) for row in read_unit(data, limits).rows]
        for data in (one, two)
    )
    return mine == other


def memory() -> tuple[int, int]:
    """Resident bytes of this process and of its largest child."""
    own = psutil.Process()
    children = [child.memory_info().rss for child in own.children() if child.is_running()]
    return own.memory_info().rss, max(children, default=0)


async def run(folder: Path, corpus_folder: Path, count: int, seed: int, rounds: int) -> None:
    site = AuditSite(folder)
    good = (corpus_folder / GOOD).read_bytes()
    policies = Folder(folder)
    async with Judge(site.config, policies, EngineOptions(device="cpu", dtype="float32")) as judge:

        async def judged(case: Case) -> Judgement:
            judgement = await judge.judge(case.data, site.claims(case.data), SECRET)
            own, child = memory()
            line = {
                "name": case.name,
                "expected_fraud": case.fraud,
                "outcome": judgement.outcome.value,
                "fraud": judgement.fraud,
                "codes": sorted({finding.code for finding in judgement.findings}),
                "fault": judgement.fault,
                "unchanged": judgement.outcome is Outcome.ACCEPTED and same_work(case.data, good, site),
                "pid": os.getpid(),
                "rss": own,
                "child_rss": child,
            }
            print(json.dumps(line), flush=True)
            return judgement

        def corpus(round_: int) -> Iterator[Case]:
            if round_ == 0:
                yield from read_corpus(corpus_folder)
            yield from damaged(good, count, seed + round_)

        await judged(Case("honest, first", good, None))
        for number in range(rounds):
            for case in corpus(number):
                await judged(case)
        for child in psutil.Process().children():
            child.send_signal(signal.SIGKILL)
        await judged(Case("honest, after the children were killed", good, None))
        policies.folder = None
        judge._tasks = None
        await judged(Case("honest, without weights", good, None))


if __name__ == "__main__":
    trio.run(run, Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:6]))
