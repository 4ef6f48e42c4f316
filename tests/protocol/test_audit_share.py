"""The audit share: the rule, the draw, the commitment, and the check of a published version."""

from __future__ import annotations

import math
from functools import cache

import msgspec
import numpy as np
import pytest
from example_run import COORDINATOR, PUBLISHER, example_run
from hypothesis import given, settings
from hypothesis import strategies as st

from intellect_protocol.errors import ConfigError, InvalidDataError
from intellect_protocol.keys import LocalSigner, verdict_digest
from intellect_protocol.ledger.merkle import WorkLeaf
from intellect_protocol.messages import JudgeJob, JudgeVerdict
from intellect_protocol.rollouts import BatchMeta
from intellect_protocol.run import AuditTerms, RunConfig, parse_run_config
from intellect_protocol.validation.audit_draws import DrawReport, OwnerFacts, check_draws
from intellect_protocol.validation.audit_share import (
    CHAIN_LENGTH,
    SeedChain,
    audit_share,
    draw,
    is_committed,
    previous_seed,
    unverified_gain,
)
from intellect_protocol.wire import encode, sha256
from intellect_protocol.work_file import (
    AuditReveal,
    JudgedLeaf,
    UnjudgedUnit,
    VersionWork,
    judge_job_id,
    read_work_file,
    write_work_file,
)

TOKEN = 10**18
TERMS = AuditTerms("00" * 32, unit_value=1.0, probation_units=4, min_share=0.05, safety=1.5)
VALIDATOR = LocalSigner(b"\x44" * 32)
OWNERS = ("one", "two")
NODES = [LocalSigner(bytes([number]) * 32).address for number in range(0x50, 0x58)]
VERSION = 7

untimed = settings(deadline=None)  # machines that test are busy
gains = st.floats(0, 1e9)
stakes = st.integers(0, 10**28)
shares = st.floats(0, 1)


def share(gain: float, slashable: int, accepted: int = 100, **changes: float) -> float:
    terms = msgspec.structs.replace(TERMS, **changes)
    return audit_share(terms, accepted=accepted, gain=gain, slashable=slashable)


# --- the rule --------------------------------------------------------------------------------------


@untimed
@given(gains, stakes, shares, st.integers(0, 10))
def test_a_share_lies_between_the_least_share_and_one(gain, slashable, least, accepted) -> None:
    assert least <= share(gain, slashable, accepted, min_share=least) <= 1


@untimed
@given(gains, gains, stakes)
def test_more_gain_is_never_audited_less(gain, more, slashable) -> None:
    low, high = sorted((gain, more))
    assert share(low, slashable) <= share(high, slashable)


@untimed
@given(gains, stakes, stakes)
def test_more_stake_is_never_audited_more(gain, slashable, more) -> None:
    low, high = sorted((slashable, more))
    assert share(gain, high) <= share(gain, low)


@untimed
@given(gains, st.integers(0, 3))
def test_newcomers_and_owners_without_stake_are_always_audited(gain, accepted) -> None:
    assert share(gain, 10**24, accepted, min_share=0.0) == 1
    assert share(gain, 0, min_share=0.0) == 1


@untimed
@given(st.floats(1e-9, 1e6), st.integers(1, 10**26), st.floats(1, 100))
def test_the_linear_form_is_never_below_the_share_at_which_cheating_breaks_even(gain, slashable, safety):
    stake = slashable / TOKEN
    assert share(gain, slashable, min_share=0.0, safety=safety) >= gain / (gain + stake) * (1 - 1e-12)


@untimed
@given(
    st.lists(st.sets(st.integers(1, 40), max_size=40), min_size=3, max_size=3),
    st.floats(0.001, 1.0),
    st.floats(1.0, 4.0),
    st.floats(0, 0.3),
)
def test_no_choice_of_units_to_cheat_at_pays_over_all_open_versions_together(
    cheated, unit_value, safety, least
) -> None:
    stake = 10.0
    terms = msgspec.structs.replace(TERMS, unit_value=unit_value, safety=safety, min_share=least)
    expected_gain, uncaught = 0.0, 1.0
    for positions in cheated:
        for position in positions:
            gain = unverified_gain(terms, position, len(cheated))
            p = audit_share(terms, accepted=100, gain=gain, slashable=int(stake * TOKEN))
            expected_gain += unit_value * (1 - p)
            uncaught *= 1 - p
    assert expected_gain <= stake * (1 - uncaught) + 1e-9


def test_positions_and_versions_are_counted_from_one() -> None:
    with pytest.raises(ValueError, match="from 1"):
        unverified_gain(TERMS, 0, 3)


# --- the draw --------------------------------------------------------------------------------------

RUN_ID = example_run().run_id


def drawn_values(seed: bytes, count: int) -> np.ndarray:
    return np.array(
        [draw(RUN_ID, seed, VERSION, b"n" * 20, i, sha256(bytes([i % 256]))) for i in range(count)]
    )


def test_draws_are_uniform_and_those_of_another_seed_tell_nothing_about_them() -> None:
    first, second = drawn_values(b"\1" * 32, 4000), drawn_values(b"\2" * 32, 4000)
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is passed by chance once in a thousand times.
    for values in (first, second):
        ranks = np.arange(1, len(values) + 1) / len(values)
        assert np.abs(np.sort(values) - ranks).max() < 1.95 / math.sqrt(len(values))
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / math.sqrt(len(first))


@untimed
@given(st.binary(min_size=32, max_size=32), st.integers(0, 2**40), st.integers(0, 2**32 - 1))
def test_a_draw_is_the_same_for_everybody_with_the_seed_and_never_reaches_one(seed, version, index) -> None:
    arguments = (RUN_ID, seed, version, b"n" * 20, index, b"h" * 32)
    assert draw(*arguments) == draw(*arguments)
    assert 0 <= draw(*arguments) < 1


def test_every_part_of_a_unit_changes_its_draw() -> None:
    base = (RUN_ID, b"s" * 32, 3, b"n" * 20, 5, b"h" * 32)
    others = (b"R" * 32, b"S" * 32, 4, b"N" * 20, 6, b"H" * 32)
    values = {draw(*base)} | {
        draw(*(*base[:place], other, *base[place + 1 :])) for place, other in enumerate(others)
    }
    assert len(values) == len(base) + 1


# --- the commitment --------------------------------------------------------------------------------


@cache
def chain(first_version: int = 0) -> SeedChain:
    return SeedChain(COORDINATOR, RUN_ID, first_version)


@untimed
@given(st.integers(0, 3000))
def test_the_anchor_commits_to_the_seed_of_every_version_and_to_no_other(version) -> None:
    terms = msgspec.structs.replace(TERMS, anchor=chain().anchor)
    seed = chain().seed(version)
    assert is_committed(terms, version, seed)
    assert not is_committed(terms, version + 1, seed)
    assert not is_committed(terms, version, chain().seed(version + 1))
    assert not is_committed(terms, version, seed[:-1] + bytes([seed[-1] ^ 1]))
    assert previous_seed(chain().seed(version + 1)) == seed


def test_a_chain_serves_the_versions_from_its_first_on_and_ends() -> None:
    terms = msgspec.structs.replace(TERMS, anchor=chain(500).anchor, first_version=500)
    assert is_committed(terms, 500, chain(500).seed(500))
    for version in (499, 500 + CHAIN_LENGTH):
        with pytest.raises(ValueError, match="no seed"):
            chain(500).seed(version)
        assert not is_committed(terms, version, b"s" * 32)
    assert is_committed(terms, 499 + CHAIN_LENGTH, chain(500).seed(499 + CHAIN_LENGTH))


def test_seeds_follow_from_the_key_so_that_a_restart_cannot_lose_them() -> None:
    again = SeedChain(LocalSigner(COORDINATOR.secret()), RUN_ID, 0)
    assert (again.anchor, again.seed(9)) == (chain().anchor, chain().seed(9))
    for other in (SeedChain(PUBLISHER, RUN_ID, 0), SeedChain(COORDINATOR, b"r" * 32, 0), chain(500)):
        assert other.anchor != again.anchor


# --- the configuration -----------------------------------------------------------------------------


def config_with(**changes: object) -> RunConfig:
    terms = msgspec.structs.replace(TERMS, anchor=chain().anchor, **changes)
    base = example_run()
    return RunConfig(base.terms, msgspec.structs.replace(base.revision, audit=terms)).signed(COORDINATOR)


def test_audit_terms_are_signed_and_survive_the_file_and_no_terms_leave_no_trace() -> None:
    config = config_with()
    assert parse_run_config(config.to_toml().encode()) == config
    assert config.run_id == example_run().run_id
    weaker = config_with(min_share=0.0).revision
    with pytest.raises(ConfigError, match="not signed"):
        parse_run_config(msgspec.structs.replace(config, revision=weaker).to_toml().encode())
    plain = example_run()
    assert "audit" not in plain.to_toml()
    assert b"audit" not in encode(plain.revision)
    assert plain.audit_of(VERSION) is None


def test_optional_fields_are_not_written_where_everything_is_audited() -> None:
    job = JudgeJob(1, b"c", b"b", b"n", 0, b"f", 1, b"w", 2, 0)
    meta = BatchMeta(1, b"r", 3, b"c", b"n", 0, b"f", "0xabc")
    verdict = JudgeVerdict("accepted", False, [], b"", 0, 0, 0.0)
    for value in (job, meta, verdict):
        assert b"audit" not in encode(value)
        assert b"audit" in encode(msgspec.structs.replace(value, **{field_of(value): False}))
    assert b"reveal" not in encode(VersionWork(1, 0, [], [], []))


def field_of(value: object) -> str:
    return "audit" if isinstance(value, JudgeJob) else "audited"


@pytest.mark.parametrize(
    "changes",
    [
        {"anchor": "zz"},
        {"unit_value": 0.0},
        {"unit_value": math.inf},
        {"min_share": 1.5},
        {"min_share": -0.1},
        {"safety": 0.9},
        {"probation_units": -1},
        {"first_version": -1},
    ],
)
def test_audit_terms_out_of_range_are_a_configuration_error(changes) -> None:
    anchor = {"anchor": chain().anchor, **changes}
    terms = msgspec.structs.replace(TERMS, **anchor)
    base = example_run()
    config = RunConfig(base.terms, msgspec.structs.replace(base.revision, audit=terms)).signed(COORDINATOR)
    with pytest.raises(ConfigError, match="audit"):
        config.check()


# --- the check of a published version --------------------------------------------------------------


def verdict_of(config: RunConfig, node: str, index: int, *, audited: bool, accepted: bool) -> JudgedLeaf:
    """A unit's leaf and a validator's verdict on it."""
    from intellect_protocol.keys import address_bytes

    file_hash = sha256(node.encode(), bytes([index]))
    verdict = JudgeVerdict(
        "accepted" if accepted else "rejected", False, [], b"", 2 if accepted else 0, 0, 0.1, b"s",
        audited=msgspec.UNSET if audited else False,
    )  # fmt: skip
    content = encode(verdict)
    job_id = judge_job_id(config.run_id, VERSION, address_bytes(node), index, file_hash, 0)
    signature = VALIDATOR.sign_digest(verdict_digest(config.run_id, job_id, content))
    leaf = WorkLeaf(
        version=VERSION, index=index, node=node, work_hash=file_hash, accepted=accepted,
        units=2 if accepted else 0,
    )  # fmt: skip
    return JudgedLeaf(leaf, 0, content, signature)


def published(
    config: RunConfig, units: list[tuple[str, int]], *, audited: object = lambda number: False
) -> VersionWork:
    """A version whose units were received in this order; `audited` says which, by place in it."""
    from intellect_protocol.keys import address_bytes

    leaves = [
        (1000 + number, verdict_of(config, node, index, audited=audited(number), accepted=True))  # type: ignore[operator]
        for number, (node, index) in enumerate(units)
    ]
    leaves.sort(key=lambda entry: (entry[1].leaf.index, address_bytes(entry[1].leaf.node)))
    reveal = AuditReveal(chain().seed(VERSION), [at for at, _ in leaves])
    return VersionWork(VERSION, 0, [leaf for _, leaf in leaves], [], [], reveal)


def facts_of(owner_of: dict[str, str], *, accepted: int = 100, stake: int = 1000) -> dict[str, OwnerFacts]:
    return {node: OwnerFacts(owner, accepted, stake * TOKEN) for node, owner in owner_of.items()}


def check(config: RunConfig, work: VersionWork, facts: dict[str, OwnerFacts]) -> DrawReport:
    """The check as everybody makes it: on the bytes of the file."""
    content = write_work_file(config.run_id, [work])
    (read,) = read_work_file(content, config.run_id, [VALIDATOR.address]).versions
    return check_draws(config, read, facts)


ALONE = [(NODES[0], index) for index in range(12)]


def test_a_version_audited_as_drawn_is_right_and_any_audit_skipped_shows() -> None:
    config = config_with(unit_value=40.0, min_share=0.0, safety=1.0)
    facts = facts_of({NODES[0]: "one"})
    everything = check(config, published(config, ALONE, audited=lambda number: True), facts)
    assert everything.problems == []
    assert 0 < everything.drawn < everything.units == everything.audited == 12
    nothing = check(config, published(config, ALONE), facts)
    assert len(nothing.problems) == nothing.drawn == everything.drawn
    needed = {int(text.split()[1]) for text in nothing.problems}
    exactly = published(config, ALONE, audited=needed.__contains__)
    assert check(config, exactly, facts).problems == []
    for skipped in needed:
        work = published(config, ALONE, audited=(needed - {skipped}).__contains__)
        assert check(config, work, facts).problems == [
            f"unit {skipped} of {NODES[0]}: drawn for an audit, and accepted without one"
        ]


def test_a_newcomers_units_must_all_be_audited() -> None:
    config = config_with(min_share=0.0, unit_value=1e-9)
    work = published(config, ALONE)
    assert check(config, work, facts_of({NODES[0]: "one"})).drawn == 0
    assert check(config, work, facts_of({NODES[0]: "one"}, accepted=3)).drawn == len(ALONE)
    assert check(config, work, facts_of({NODES[0]: "one"}, stake=0)).drawn == len(ALONE)


@settings(untimed, max_examples=40)
@given(st.lists(st.integers(0, len(NODES) - 1), min_size=1, max_size=30))
def test_splitting_work_over_nodes_of_one_owner_lowers_no_share(choice) -> None:
    """From some unit on the share is 1: it is the same unit, whichever nodes did the work."""
    config = config_with(unit_value=1.0, min_share=0.0, safety=1.0)
    counts = dict.fromkeys(NODES, 0)
    units = []
    for number in choice:
        units.append((NODES[number], counts[NODES[number]]))
        counts[NODES[number]] += 1
    # share = 3 k / 15: the owner's fifth unit and those after it are drawn for certain.
    facts = facts_of(dict.fromkeys(NODES, "one"), stake=15)
    report = check(config, published(config, units), facts)
    skipped = {text.split(":")[0] for text in report.problems}
    assert skipped >= {f"unit {index} of {node}" for node, index in units[4:]}
    apart = facts_of({node: node for node in NODES}, stake=15)
    assert check(config, published(config, units), apart).drawn <= report.drawn


@pytest.mark.parametrize(
    ("reveal", "text"),
    [
        (msgspec.UNSET, "not revealed"),
        (AuditReveal(b"\0" * 32, [1] * 12), "not the one"),
        (AuditReveal(b"", [1] * 12), "not the one"),
        (AuditReveal(b"next", [1] * 12), "not the one"),
    ],
)
def test_a_seed_that_is_hidden_or_exchanged_is_found(reveal, text) -> None:
    config = config_with()
    if reveal is not msgspec.UNSET and reveal.seed == b"next":
        reveal = AuditReveal(chain().seed(VERSION + 1), reveal.received_at_ms)
    work = msgspec.structs.replace(published(config, ALONE, audited=lambda number: True), reveal=reveal)
    (problem,) = check(config, work, facts_of({NODES[0]: "one"})).problems
    assert text in problem


def test_a_unit_moved_forward_in_the_order_of_receipts_is_found() -> None:
    config = config_with()
    work = published(config, ALONE, audited=lambda number: True)
    assert isinstance(work.reveal, AuditReveal)
    for times in ([*range(10), 11, 10], [5] * 12):
        moved = msgspec.structs.replace(work, reveal=AuditReveal(work.reveal.seed, times))
        problems = check(config, moved, facts_of({NODES[0]: "one"})).problems
        assert any("no later than" in problem for problem in problems)


def test_receipts_without_a_time_and_nodes_without_an_owner_are_found() -> None:
    config = config_with()
    work = published(config, ALONE, audited=lambda number: True)
    assert isinstance(work.reveal, AuditReveal)
    short = msgspec.structs.replace(work, reveal=AuditReveal(work.reveal.seed, [1, 2, 3]))
    with pytest.raises(InvalidDataError, match="time"):
        check(config, short, {})
    assert all("no owner" in problem for problem in check(config, work, {}).problems)


def test_unjudged_units_count_in_the_order_and_need_no_audit() -> None:
    config = config_with(unit_value=1.0, min_share=0.0, safety=1.0)
    base = published(config, ALONE[:4])
    facts = facts_of({NODES[0]: "one"}, stake=15)
    assert isinstance(base.reveal, AuditReveal)
    last = base.leaves[3].leaf
    unjudged = [UnjudgedUnit(last.node, last.index, last.work_hash)]
    work = msgspec.structs.replace(base, leaves=base.leaves[:3], unjudged=unjudged)
    assert check(config, work, facts).units == 4
    assert all("unit 3" not in problem for problem in check(config, work, facts).problems)
    late = published(config, ALONE[:5])
    assert any("unit 4" in problem for problem in check(config, late, facts).problems)


def test_where_no_seed_was_committed_to_every_unit_needs_its_audit() -> None:
    for config in (example_run(), config_with(first_version=VERSION + 1)):
        honest = published(config, ALONE, audited=lambda number: True)
        honest = msgspec.structs.replace(honest, reveal=msgspec.UNSET)
        assert check(config, honest, {}) == DrawReport(VERSION, 12, 12, 12, [])
        lazy = msgspec.structs.replace(published(config, ALONE), reveal=msgspec.UNSET)
        assert len(check(config, lazy, {}).problems) == 12
        assert check(config, lazy, {}).audited == 0
        invented = published(config, ALONE, audited=lambda number: True)
        assert check(config, invented, {}).problems == ["a seed is revealed that nobody committed to"]
