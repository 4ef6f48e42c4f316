"""Every kind of cheat that the devnet runs as a whole node: it pays unchecked and is caught when checked.

On a policy that sorts digits right now and then, so that there is something to gain.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from arena import Arena, InProcess, load_engine, mean_reward
from example_unit import NODE
from verdicts import assert_only_caught_by

from intellect_node.devnet.cheats import CHEATS
from intellect_node.devnet.kinds import CHEAT_KINDS
from intellect_protocol.rollouts import RolloutUnit
from intellect_protocol.validation.findings import Check, Outcome
from intellect_protocol.validation.pipeline import Judgement

# Fraud checks that catch the cheat, each of them alone.
CAUGHT_BY = {
    "wrong-model": {Check.COMMITMENT: "commitment_exponents", Check.SAMPLING: "sampling_distance"},
    "edited-tokens": {Check.COMMITMENT: "commitment_exponents", Check.SAMPLING: "sampling_distance"},
    "forged-reward": {Check.REWARD: "reward"},
    "best-of-n": {Check.SAMPLING: "sampling_distance"},
    "constant-proof": {Check.COMMITMENT: "commitment_negative"},
    "replayed-proof": {Check.COMMITMENT: "commitment_exponents"},
}
PAYS = {"edited-tokens", "best-of-n"}  # cheats that raise the reward validators themselves compute


def unit_of(kind: str, arena: Arena) -> RolloutUnit:
    """What a node of this kind submits: it adopts the policy as its daemon does, then builds."""
    engine = load_engine(arena.folder, "float32")
    builder = CHEATS[kind](arena.run, NODE.address_bytes, InProcess(engine), arena.tasks)

    async def build() -> RolloutUnit:
        await builder.adopt(arena.policy)
        if hasattr(builder, "_kept"):  # a replayed proof comes from an earlier unit
            await builder.build(arena.policy, 1)
        return await builder.build(arena.policy, 0)

    return trio.run(build)


@pytest.fixture(scope="module")
def honest(sorting: Arena) -> Judgement:
    return sorting.judge(sorting.build())


def test_an_honest_unit_passes_every_check(honest: Judgement) -> None:
    assert honest.outcome is Outcome.ACCEPTED
    assert not honest.findings
    assert 0 < mean_reward(honest) < 1


@pytest.mark.parametrize("kind", CHEAT_KINDS)
def test_a_cheat_pays_unchecked_and_is_fraud_when_checked(
    kind: str, sorting: Arena, honest: Judgement
) -> None:
    unchecked = assert_only_caught_by(sorting, unit_of(kind, sorting), CAUGHT_BY[kind])
    if kind in PAYS:
        assert mean_reward(unchecked) > mean_reward(honest) + 0.1


def test_no_command_line_leads_to_a_cheat() -> None:
    """Only the devnet's own program imports the cheats; `join` and its modules do not."""
    node = Path(__file__).parents[2] / "node" / "intellect_node"
    for path in node.rglob("*.py"):
        if path.parent.name != "devnet":
            assert "cheat" not in path.read_text(), path
