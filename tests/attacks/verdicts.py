"""What every attack must show: it succeeds with its checks off, and each of them alone catches it."""

from __future__ import annotations

from collections.abc import Mapping

from arena import Arena, codes

from intellect_protocol.rollouts import RolloutUnit
from intellect_protocol.validation.findings import Check, Outcome
from intellect_protocol.validation.pipeline import Judgement


def assert_only_caught_by(
    arena: Arena, unit: RolloutUnit, catching: Mapping[Check, str], *, index: int = 0
) -> Judgement:
    """Accepted with the checks in `catching` off; fraud, with its reason code, with any one of them on.

    Log-prob drift is off throughout: it is never fraud, and would hold a unit up that is otherwise accepted.

    Returns:
        The judgement without the checks: what the cheat would have got.
    """
    off = {*catching, Check.DRIFT}
    unchecked = arena.judge(unit, *off, index=index)
    assert unchecked.outcome is Outcome.ACCEPTED, unchecked.findings[:3]
    for check, code in catching.items():
        checked = arena.judge(unit, *(off - {check}), index=index)
        assert checked.fraud
        assert checked.outcome is Outcome.REJECTED
        assert {finding.check for finding in checked.findings} == {check}
        assert code in codes(checked)
    assert arena.judge(unit, index=index).fraud
    return unchecked
