"""Splits that do not overlap, problems that are the same everywhere, rewards that cannot be farmed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from intellect_protocol.environments.base import Problem
from intellect_protocol.environments.registry import make, names
from intellect_protocol.errors import ConfigError

OWN = ("arithmetic", "sort_digits", "spell_backward")
GYM = ("reasoning_gym:chain_sum", "reasoning_gym:spell_backward", "reasoning_gym:word_sorting")
INDEX = st.integers(0, 2**64 - 1)


def test_every_own_environment_is_tested_here() -> None:
    assert tuple(names()) == OWN


@pytest.mark.parametrize("name", [*OWN, *GYM])
def test_training_never_meets_a_heldout_question(name: str) -> None:
    environment = make(name)
    heldout = environment.heldout(100)
    questions = {problem.question for problem in heldout}
    assert len(questions) == len(heldout) >= 30

    @settings(max_examples=100, deadline=None)
    @given(INDEX)
    def check(index: int) -> None:
        problem = environment.problem(index)
        assert problem.question not in questions
        assert problem == environment.problem(index)
        assert problem.index == index
        assert problem.environment == name

    check()
    assert environment.heldout(10) == heldout[:10]


def test_a_small_task_is_split_into_two_disjoint_parts_that_make_the_whole() -> None:
    environment = make("arithmetic")
    train = {environment.problem(index).question for index in range(4000)}
    heldout = {problem.question for problem in environment.heldout(1000)}
    assert not train & heldout
    assert len(train | heldout) == 200


@pytest.mark.parametrize("name", ["arithmetic", "sort_digits", "spell_backward"])
def test_right_answers_of_own_tasks_are_right(name: str) -> None:
    environment = make(name)
    for index in range(200):
        problem = environment.problem(index)
        if name == "arithmetic":
            left, operator, right = problem.question.removeprefix("What is ").removesuffix("?").split()
            expected = str(int(left) + int(right) if operator == "+" else int(left) - int(right))
        elif name == "sort_digits":
            digits = problem.question.removeprefix("sort:").removesuffix("=")
            assert 4 <= len(digits) <= 8
            expected = "".join(sorted(digits))
        else:
            word = problem.question.removeprefix("reverse:").removesuffix("=")
            assert 3 <= len(word) <= 7
            expected = "".join(reversed(word))
        assert problem.answer == expected
        assert environment.reward(problem, problem.answer, True) == 1


@pytest.mark.parametrize("name", ["sort_digits", "spell_backward", *GYM])
def test_only_the_exact_and_finished_answer_is_rewarded(name: str) -> None:
    environment = make(name)

    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 50), st.text(max_size=12))
    def check(index: int, tail: str) -> None:
        problem = environment.problem(index)
        assert environment.reward(problem, problem.answer, True) == 1
        assert environment.reward(problem, problem.answer, False) == 0
        assume(tail.strip() and "<answer>" not in tail)
        # A scorer may forgive the case of letters or white space; a tail of its own it may not.
        farmed = environment.reward(problem, problem.answer + "x" + tail, True)
        assert farmed == environment.reward(problem, problem.answer[:-1], True) == 0

    check()


def test_the_library_s_own_partial_score_is_farmable_and_ours_is_not() -> None:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("spell_backward", seed=3, size=10)
    environment = make("reasoning_gym:spell_backward")
    item = dataset[0]
    farmed = item["answer"] + "etaoin" * 50
    problem = Problem(
        "reasoning_gym:spell_backward", 0, item["question"], item["answer"], metadata={"item": 3}
    )
    assert dataset.score_answer(farmed, item) > 0.7
    assert environment.reward(problem, farmed, True) == 0
    assert environment.reward(problem, item["answer"], True) == 1


@pytest.mark.parametrize(
    ("completion", "finished", "reward"),
    [
        ("4 + 3 = 7", True, 1.0),
        ("The answer is 7.", True, 1.0),
        ("7", False, 0.5),
        ("7 or 8", True, 0.0),
        ("-7", True, 0.0),
        ("17", True, 0.0),
        ("7.5", True, 0.0),
        ("\u0667", True, 0.0),
        ("seven", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_arithmetic_reads_the_last_number(completion: str, finished: bool, reward: float) -> None:
    problem = Problem("arithmetic", 0, "What is 4 + 3?", "7")
    assert make("arithmetic").reward(problem, completion, finished) == reward


def test_arithmetic_tells_a_difference_from_a_negative_number() -> None:
    environment = make("arithmetic")
    negative, positive = (Problem("arithmetic", 0, "", answer) for answer in ("-2", "3"))
    assert environment.reward(negative, "3 - 5 = -2", True) == 1
    assert environment.reward(positive, "it was 7-3", True) == 1


@pytest.mark.parametrize("name", [*OWN, *GYM])
@given(text=st.text(max_size=200), finished=st.booleans())
@settings(max_examples=30, deadline=None)
def test_rewards_of_any_text_are_numbers_from_zero_to_one(name: str, text: str, finished: bool) -> None:
    environment = make(name)
    for candidate in (text, f"<answer>{text}</answer>"):
        assert 0 <= environment.reward(environment.problem(1), candidate, finished) <= 1


_PRINT_PROBLEMS = """
import sys
from intellect_protocol.environments.registry import make
for name in sys.argv[1:]:
    environment = make(name)
    problems = [environment.problem(index) for index in (0, 1, 2**63, 2**64 - 1)] + environment.heldout(3)
    print([(p.question, p.answer, p.metadata) for p in problems])
"""


def test_problems_do_not_depend_on_the_process() -> None:
    printed = {
        subprocess.run(
            [sys.executable, "-c", _PRINT_PROBLEMS, *OWN, *GYM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


def test_problems_of_version_one_of_the_derivation_stay_what_they_are() -> None:
    assert make("sort_digits").problem(0).question == "sort:72211801="
    assert make("spell_backward").problem(0).question == "reverse:flummer="
    assert make("arithmetic").problem(2**64 - 1).question == "What is 4 - 4?"


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("nothing", {}),
        ("reasoning_gym:nothing", {}),
        ("sort_digits", {"min_digits": 0}),
        ("sort_digits", {"min_digits": 9}),
        ("sort_digits", {"min_digits": True}),
        ("sort_digits", {"digits": 3}),
        ("spell_backward", {"min_letters": "3"}),
        ("spell_backward", {"min_letters": 8}),
        ("arithmetic", {"operators": "/"}),
        ("arithmetic", {"operators": ""}),
        ("reasoning_gym:chain_sum", {"colour": "red"}),
        ("reasoning_gym:chain_sum", {"min_terms": 0}),
        ("reasoning_gym:chain_sum", {"version": "0.0.1"}),
        ("reasoning_gym:chain_sum", {"seed": 1}),
    ],
)
def test_names_and_parameters_without_a_meaning_are_refused(
    name: str, params: dict[str, int | float | str | bool]
) -> None:
    with pytest.raises(ConfigError):
        make(name, params)


@pytest.mark.parametrize(
    "task", ["spiral_matrix", "countdown", "codeio", "number_sorting", "simple_integration"]
)
def test_tasks_whose_scorer_runs_the_answer_as_code_are_refused(task: str) -> None:
    with pytest.raises(ConfigError, match="as code"):
        make(f"reasoning_gym:{task}")


def test_tasks_that_differ_between_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match="differ from process to process"):
        make("reasoning_gym:ransom_note")


def test_an_index_is_a_u64() -> None:
    for index in (-1, 2**64):
        with pytest.raises(ValueError, match="u64"):
            make("arithmetic").problem(index)
