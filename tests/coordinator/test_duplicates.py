"""Check 8: completions that several nodes have are remarked upon, and decide nothing."""

from __future__ import annotations

import json

import msgspec
import pytest
from coordinator_site import FRAUD, Site, accept, acceptance, batch_of, plain_file, plain_unit, said
from example_unit import NODE as OTHER
from hypothesis import given, settings
from hypothesis import strategies as st
from world import OWNER, VALIDATORS

from intellect_coordinator.duplicates import DuplicateIndex
from intellect_coordinator.explain import print_submission
from intellect_coordinator.status import snapshot
from intellect_coordinator.submissions import Unit, findings_of, get
from intellect_protocol.messages import SubmissionState, ValidatorJobResult

MINE, THEIRS = b"\x01" * 20, b"\x02" * 20
tokens = st.lists(st.integers(0, 3), min_size=1, max_size=3)
rows = st.lists(st.builds(lambda prompt, completion: Row(prompt, completion), tokens, tokens), max_size=6)


class Row(msgspec.Struct, frozen=True):
    prompt_tokens: list[int]
    completion_tokens: list[int]


@settings(deadline=None)
@given(rows, rows)
def test_exactly_the_rows_that_another_node_has_as_well_are_counted(
    mine: list[Row], theirs: list[Row]
) -> None:
    index = DuplicateIndex()
    index.add(Unit(THEIRS, 3, 0), theirs)
    note = index.remark(Unit(MINE, 3, 1), mine)
    alike = [number for number, row in enumerate(mine) if row in theirs]
    if not alike:
        assert note is None
        return
    assert note is not None
    assert (note.kind, note.row, note.measured) == ("note", alike[0], len(alike) / len(mine))
    assert f"row {theirs.index(mine[alike[0]])} of unit 3/0 of 0x{THEIRS.hex()}" in note.text


@settings(deadline=None)
@given(rows)
def test_a_nodes_own_repetitions_and_other_versions_are_no_matter(work: list[Row]) -> None:
    index = DuplicateIndex()
    index.add(Unit(MINE, 3, 0), work)
    assert index.remark(Unit(MINE, 3, 1), work) is None
    assert index.remark(Unit(THEIRS, 4, 0), work) is None


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=30),
    st.integers(1, 4),
    st.integers(1, 60),
)
def test_the_index_stays_within_its_bounds(units: list[tuple[int, int]], versions: int, entries: int) -> None:
    index = DuplicateIndex(versions=versions, entries=entries)
    for number, (version, count) in enumerate(units):
        index.add(Unit(MINE, version, number), [Row([number], [place]) for place in range(count)])
        assert len(index) <= entries
        assert len(index._places) <= versions


def test_the_newest_version_has_the_room() -> None:
    index = DuplicateIndex(entries=4)
    for version in (1, 2):
        index.add(Unit(THEIRS, version, 0), [Row([version], [place]) for place in range(4)])
    assert index.remark(Unit(MINE, 2, 0), [Row([2], [3])]) is not None
    assert index.remark(Unit(MINE, 1, 0), [Row([1], [3])]) is None


async def submit_copy(site: Site) -> ValidatorJobResult:
    """Another node hands in the first node's file as its own; returns the job to judge it."""

    async def entitled(node: str, recorded: object) -> str:
        return OWNER.address

    site.standing.check = entitled  # type: ignore[method-assign]
    body = plain_file(site, 0)
    await site.intake.submit(OTHER.address, site.submission(body, 0, node=OTHER), body)
    return await site.claim(VALIDATORS[0])


async def test_a_copy_is_remarked_upon_in_its_findings_and_on_the_dashboard_and_judged_as_before(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both units hold the same two completions; the second is a copy, or an honest coincidence."""
    await site.submit(plain_file(site, 0), 0)
    await accept(site)
    job = await submit_copy(site)
    assert job.judge is not None
    file = plain_file(site, 0)
    meta = msgspec.structs.replace(plain_unit(site, 0).meta, node=OTHER.address_bytes)
    batch = batch_of(site, msgspec.structs.replace(plain_unit(site, 0), meta=meta), file, VALIDATORS[0])
    await site.answer(VALIDATORS[0], job.job_id, *acceptance(batch))

    with site.store.snapshot() as connection:
        assert get(connection, 2).state == SubmissionState.ACCEPTED
        notes = findings_of(connection, [1, 2])
        shown = snapshot(connection)["duplicates"]
    assert 1 not in notes
    assert [(note.check, note.kind, note.measured) for note in notes[2]] == [("duplicate", "note", 1.0)]
    assert [(each["node"], each["share"]) for each in shown] == [(f"0x{OTHER.address_bytes.hex()}", 1.0)]
    print_submission(site.folder, None, 2, as_json=False)
    assert "note: duplicate/duplicate_completion" in capsys.readouterr().out
    print_submission(site.folder, None, 2, as_json=True)
    assert json.loads(capsys.readouterr().out)["state"] == "accepted"


async def test_where_a_fraud_was_copied_from_is_remarked_upon_too(site: Site) -> None:
    await site.submit(plain_file(site, 0), 0)
    await accept(site)
    job = await submit_copy(site)
    await site.answer(VALIDATORS[0], job.job_id, said("rejected", FRAUD))
    with site.store.snapshot() as connection:
        assert get(connection, 2).code == FRAUD.code
        assert [note.kind for note in findings_of(connection, [2])[2]] == ["fraud", "note"]
