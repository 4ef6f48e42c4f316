"""What follows from a unit's seed."""

from collections import Counter

import pytest
from example_run import example_run
from hypothesis import given
from hypothesis import strategies as st

from intellect_protocol import assignment

ARGUMENTS = (b"r" * 32, 3, b"c" * 32, b"b" * 32, b"n" * 20, 7)


def test_every_input_changes_the_seed() -> None:
    seeds = {assignment.unit_seed(*ARGUMENTS)}
    for position, other in enumerate((b"s" * 32, 4, b"d" * 32, b"e" * 32, b"m" * 20, 8)):
        changed = list(ARGUMENTS)
        changed[position] = other
        seeds.add(assignment.unit_seed(*changed))
    assert len(seeds) == 7


@pytest.mark.parametrize("position", [0, 2, 3, 4])
def test_fields_of_the_wrong_length_are_refused(position: int) -> None:
    changed = list(ARGUMENTS)
    changed[position] = b"short"
    with pytest.raises(ValueError, match="bytes"):
        assignment.unit_seed(*changed)


@given(st.binary(min_size=32, max_size=32))
def test_slots_stay_within_the_terms(seed: bytes) -> None:
    terms = example_run().terms
    slots = assignment.prompt_slots(seed, terms)
    assert len(slots) == terms.sampling.prompts_per_unit
    for slot in slots:
        assert slot.environment in {e.name for e in terms.environments}
        assert slot.target_length in terms.sampling.target_lengths
        assert 0 <= slot.task_index < 2**64


def test_environments_are_drawn_by_weight() -> None:
    terms = example_run().terms
    seed = assignment.unit_seed(*ARGUMENTS)
    drawn = Counter(assignment.prompt_slot(seed, p, terms).environment for p in range(3000))
    # 2 : 1; five standard deviations of a binomial with n = 3000 and p = 2/3 are 129.
    assert abs(drawn["sort_digits"] - 2000) < 129


def test_streams_differ_between_prompts_and_samples() -> None:
    seed = assignment.unit_seed(*ARGUMENTS)
    streams = {assignment.stream_seed(seed, p, s) for p in range(10) for s in range(10)}
    assert len(streams) == 100
