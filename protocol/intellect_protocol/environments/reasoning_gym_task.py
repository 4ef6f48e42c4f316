"""Any task of reasoning-gym, scored by the exact answer only.

Three things of the library are not taken over. Its partial scores can be farmed (a right answer
with a long tail gives `spell_backward` 0.99999, any number gives `chain_sum` points), so only a
score of exactly 1 counts. Its item numbers are seeds that overlap between data sets, so items are
drawn by hash and split by question, as everywhere here. And some of its scorers run the answer as
code (`eval`, sympy's parser): the answer comes from a stranger, so those tasks are refused. So are
tasks whose questions depend on the interpreter's hash seed, or take seconds to make.

The items depend on the library's version; the run configuration can pin it (`version`).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from functools import lru_cache
from typing import Any

from ..errors import ConfigError
from .base import Candidate, Draw, Params, Problem, SplitEnvironment, refuse_unknown

PREFIX = "reasoning_gym:"
MAX_ANSWER_CHARACTERS = 4096
_EXECUTES = re.compile(r"\b(eval|exec|compile|parse_expr|sympify|literal_eval|__import__)\(")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ITEMS = 1 << 31  # some tasks seed numpy, which takes 32 bits
# Found by making items of every task in two processes (reasoning-gym 0.1.25).
_HASH_DEPENDENT = ("isomorphic_strings", "polynomial_multiplication", "ransom_note")
_SLOW = (
    "acre", "futoshiki", "gsm_symbolic", "intermediate_integration", "knight_swap", "list_functions",
    "puzzle24", "word_ladder", "zebra_puzzles",
)  # fmt: skip
_REFUSED = dict.fromkeys(_HASH_DEPENDENT, "its questions differ from process to process") | dict.fromkeys(
    _SLOW, "its items take seconds each or exist only as part of a whole data set"
)


class ReasoningGymTask(SplitEnvironment):
    """Parameters: version (of reasoning-gym), and those of the task's configuration class."""

    def __init__(self, name: str, params: Params) -> None:
        super().__init__(name)
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        task = name.removeprefix(PREFIX)
        if task not in DATASETS:
            raise ConfigError(f"reasoning-gym has no task {task!r}")
        if task in _REFUSED:
            raise ConfigError(f"environment {name}: {_REFUSED[task]}")
        dataset_class, config_class = DATASETS[task]
        version = params.get("version", reasoning_gym.__version__)
        if version != reasoning_gym.__version__:
            raise ConfigError(
                f"environment {name} needs reasoning-gym {version}, here is {reasoning_gym.__version__}"
            )
        options = {key: value for key, value in params.items() if key != "version"}
        fields = {field.name for field in dataclasses.fields(config_class)} - {"seed", "size"}
        refuse_unknown(name, options, fields)
        self._compares_text = "score_answer" not in vars(dataset_class)
        if not self._compares_text and _EXECUTES.search(
            inspect.getsource(sys.modules[dataset_class.__module__])
        ):
            raise ConfigError(f"environment {name}: its scorer runs answers as code")
        try:
            self._dataset: Any = reasoning_gym.create_dataset(task, seed=0, size=_ITEMS, **options)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"environment {name}: {error}") from error
        self._entry = lru_cache(maxsize=4096)(self._dataset.__getitem__)

    def candidate(self, draw: Draw) -> Candidate:
        item = draw.below(_ITEMS)
        entry = self._entry(item)
        return Candidate(str(entry["question"]), str(entry["answer"]), {"item": item})

    def reward(self, problem: Problem, completion: str, finished: bool) -> float:
        """1 if the answer scores exactly 1 and the completion was ended, else 0.

        The answer is the text of the last <answer> element, or all of it where there is none.
        """
        tagged = _ANSWER.findall(completion)
        answer = (tagged[-1] if tagged else completion).strip()
        if not finished or not answer or len(answer) > MAX_ANSWER_CHARACTERS:
            return 0.0
        if self._compares_text:
            return float(answer == problem.answer)
        try:
            score = self._dataset.score_answer(answer, self._entry(int(problem.metadata["item"])))
        except Exception:  # scorers fail in any way they like on text they did not expect
            return 0.0
        return float(score == 1.0)
