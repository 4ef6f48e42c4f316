"""What goes wrong on the validator's side is inconclusive, never a verdict, and the next unit is judged."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from audit_site import VERSION, AuditSite, write_policy
from example_unit import load

from intellect_coordinator import judging
from intellect_coordinator.judging import Judge
from intellect_protocol.engines.supervisor import EngineOptions
from intellect_protocol.errors import UnreachableError
from intellect_protocol.validation.findings import Outcome

ENGINE = EngineOptions(device="cpu", dtype="float32", max_failures=1)


class Weights:
    """One folder; `missing` while no peer has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.missing = False

    async def obtain(self, version: int) -> Path:
        if self.missing:
            raise UnreachableError("no peer has it")
        return self.folder


@pytest.fixture(scope="module")
def site_of_judging(tmp_path_factory: pytest.TempPathFactory) -> AuditSite:
    return AuditSite(write_policy(tmp_path_factory.mktemp("judging") / "policy", seed=0))


@asynccontextmanager
async def judge_of(site: AuditSite, **options: object) -> AsyncIterator[tuple[Judge, Weights]]:
    weights = Weights(site.policy)
    async with Judge(site.config, weights, msgspec.structs.replace(ENGINE, **options)) as judge:
        yield judge, weights


def child_of(judge: Judge) -> int:
    assert judge._client is not None
    pid = judge._client.health().pid
    assert pid is not None
    return pid


async def test_a_dead_child_late_scores_and_missing_weights_are_inconclusive_and_pass(
    site_of_judging: AuditSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = site_of_judging
    file = site.unit(load(site.policy))
    claims = site.claims(file)
    async with judge_of(site) as (judge, weights):
        weights.missing = True
        verdict, batch = await judge.verdict(file, claims, "validator")
        assert (verdict.outcome, verdict.fraud, verdict.findings, batch) == ("inconclusive", False, [], b"")
        weights.missing = False
        await judge.prepare(VERSION)

        # As by the kernel when memory runs out. One failure is the limit here, so the unit is handed back.
        os.kill(child_of(judge), signal.SIGKILL)
        verdict, batch = await judge.verdict(file, claims, "validator")
        assert (verdict.outcome, verdict.findings, batch) == ("inconclusive", [], b"")
        judgement = await judge.judge(file, claims, b"")
        assert (judgement.outcome, judgement.fault) == (Outcome.ACCEPTED, "")

        with monkeypatch.context() as patch:
            patch.setattr(judging, "_SCORE_DEADLINE_S", 0.0)
            judgement = await judge.judge(file, claims, b"")
            assert judgement.outcome is Outcome.INCONCLUSIVE
            assert "DeadlineError" in judgement.fault

        # A cheat is not excused by any of this: the same judge still knows one.
        assert (await judge.judge(file, claims, b"")).outcome is Outcome.ACCEPTED
        forged = site.unit(load(site.policy), temperature=0.5)
        assert (await judge.judge(forged, site.claims(forged), b"")).fraud
