"""Reputation is a pure function of what everybody can read."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from intellect_protocol.keys import checksum_address
from intellect_protocol.ledger.events import (
    CaseUpheld,
    LedgerEvent,
    NodeBound,
    NodeUnbound,
    OwnerBarred,
    Staked,
    StakeSeized,
    Withdrawn,
)
from intellect_protocol.ledger.merkle import WorkLeaf
from intellect_protocol.reputation import HALF_LIFE_VERSIONS, Reputation, compute_reputation
from intellect_protocol.work_file import AbandonedUnit, JudgedLeaf, VersionWork, WorkFile

OWNER, OTHER = checksum_address(b"\x01" * 20), checksum_address(b"\x02" * 20)
NODE, OTHER_NODE = checksum_address(b"\x0a" * 20), checksum_address(b"\x0b" * 20)
RUN = b"r" * 32


def event(kind: type[LedgerEvent], block: int, **fields: object) -> LedgerEvent:
    return kind(block_number=block, log_index=0, transaction_hash=b"\0" * 32, **fields)


BOUND: list[LedgerEvent] = [
    event(NodeBound, 5, owner=OWNER, node=NODE, peer_id=b"p"),
    event(NodeBound, 6, owner=OTHER, node=OTHER_NODE, peer_id=b"q"),
]


def work(version: int, accepted: int, rejected: int, *, node: str = NODE, revision: int = 0) -> VersionWork:
    verdicts = [True] * accepted + [False] * rejected
    leaves = [
        JudgedLeaf(WorkLeaf(version, index, node, b"h" * 32, ok, 8 if ok else 0), 0, b"", b"")
        for index, ok in enumerate(verdicts)
    ]
    return VersionWork(version, revision, leaves, [AbandonedUnit(node, 99)], [])


def record(*works: VersionWork, events: list[LedgerEvent] = BOUND, owner: str = OWNER) -> Reputation:
    return compute_reputation(owner, events, [WorkFile(1, RUN, [each]) for each in works])


counts = st.integers(0, 40)


@given(counts, counts)
def test_more_accepted_work_never_lowers_and_more_refused_never_raises_the_score(a: int, r: int) -> None:
    score = record(work(0, a, r)).score
    assert 0 <= score <= 100
    assert record(work(0, a + 1, r)).score >= score
    assert record(work(0, a, r + 1)).score <= score


@given(counts, counts, st.integers(1, 500))
def test_old_work_fades(a: int, r: int, age: int) -> None:
    fresh = record(work(age, a, r)).score
    old = record(work(0, a, r), work(age, 0, 0, node=OTHER_NODE)).score
    if a >= r:
        assert old <= fresh
    assert record(work(0, a, r), work(age, 0, 0, node=OTHER_NODE)).accepted == a


def test_a_half_life_halves_the_weight_of_work() -> None:
    faded = record(work(0, 2, 0), work(HALF_LIFE_VERSIONS, 0, 0, node=OTHER_NODE))
    assert faded.score == record(work(0, 1, 0)).score


def test_an_upheld_fraud_ends_all_reputation() -> None:
    events = [
        *BOUND,
        event(CaseUpheld, 9, case_id=1, accused=OWNER, seized=3),
        event(OwnerBarred, 9, owner=OWNER, case_id=1),
    ]
    assert record(work(0, 40, 0)).score > 50
    barred = record(work(0, 40, 0), events=events)
    assert (barred.score, barred.barred, barred.cases_upheld) == (0.0, True, 1)
    assert record(work(0, 4, 0, node=OTHER_NODE), events=events, owner=OTHER).score > 0


def test_others_events_and_work_do_not_count() -> None:
    mine = record(work(0, 3, 1), work(1, 5, 5, node=OTHER_NODE))
    assert (mine.accepted, mine.rejected, mine.abandoned) == (3, 1, 1)
    assert [credit.version for credit in mine.versions] == [0]
    assert mine.nodes == [NODE]
    assert all(OTHER_NODE not in told.text for told in mine.events)


def test_a_node_that_was_unbound_keeps_its_past() -> None:
    events = [*BOUND, event(NodeUnbound, 8, owner=OWNER, node=NODE)]
    assert record(work(0, 3, 0), events=events).accepted == 3


def test_a_corrected_commitment_replaces_the_voided_one() -> None:
    assert record(work(0, 3, 0), work(0, 1, 2, revision=1)).accepted == 1
    assert record(work(0, 1, 2, revision=1), work(0, 3, 0)).accepted == 1


def test_stake_is_what_went_in_less_what_came_out() -> None:
    tokens = 10**18
    events = [
        *BOUND,
        event(Staked, 7, owner=OWNER, amount=10 * tokens),
        event(Staked, 7, owner=OTHER, amount=99 * tokens),
        event(Withdrawn, 8, owner=OWNER, amount=2 * tokens),
        event(StakeSeized, 9, owner=OWNER, amount=3 * tokens, reporter=OTHER, cut=0),
    ]
    found = record(events=events)
    assert found.stake == 5 * tokens
    assert {"staked 10", "took out 2"} <= {told.text for told in found.events}
    assert "staked 99" not in {told.text for told in found.events}
    assert found.first_block == 5


def test_somebody_unknown_has_no_reputation() -> None:
    nobody = compute_reputation(checksum_address(b"\x07" * 20), BOUND, [])
    assert msgspec.structs.asdict(nobody) | {"owner": ""} == {
        "owner": "",
        "score": 0.0,
        "accepted": 0,
        "rejected": 0,
        "abandoned": 0,
        "barred": False,
        "cases_upheld": 0,
        "stake": 0,
        "first_block": None,
        "nodes": [],
        "versions": [],
        "events": [],
    }
