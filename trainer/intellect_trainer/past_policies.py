"""Log-probs of units that nobody has audited, computed anew with the weights of their version.

The node's own numbers would be the denominator of the importance ratio: who may choose them steers the
gradient. A validator replaces them in every audited unit; in the others they are ignored, and the
published checkpoint of the unit's version says what they are. One model is kept for that, loaded when the
first such unit turns up; it takes the weights of one version after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from intellect_protocol.errors import ConfigError, RolloutFileError
from intellect_protocol.run import RunConfig

from .config import TrainerConfig
from .data import Group
from .layout import checkpoint_folder, is_kept
from .packing import TrainRow, pack
from .policy import load_policy, precision, token_logprobs


class PastPolicies:
    """The policies whose checkpoints are still in the trainer's folder.

    Args:
        checkpoints: `checkpoints` of the trainer's data directory.
    """

    def __init__(self, checkpoints: Path, run: RunConfig, config: TrainerConfig) -> None:
        self._checkpoints = checkpoints
        self._terms = run.terms
        self._config = config
        self._model: nn.Module | None = None
        self._version: int | None = None  # in the model

    def has_weights(self, version: int, head: int) -> bool:
        """Whether a version's checkpoint is here and stays while a step from version `head` runs."""
        kept = is_kept(version, head, self._config.keep_checkpoints)
        return kept and checkpoint_folder(self._checkpoints, version).is_dir()

    def checked_rows(
        self,
        groups: Sequence[Group],
        rows_of: Callable[[Group], list[TrainRow]],
        check: Callable[[], None] = lambda: None,
    ) -> list[list[TrainRow]]:
        """The rows of each group, with log-probs that no node chose; `check` may raise between micro-batches.

        Raises:
            RolloutFileError: the weights of an unaudited group have gone since the step was planned.
        """
        rows = [rows_of(group) for group in groups]
        for version in sorted({group.unit.version for group in groups if not group.audited}):
            mine = [
                number
                for number, group in enumerate(groups)
                if not group.audited and group.unit.version == version
            ]
            for number, computed in zip(
                mine, self._recomputed(version, [rows[number] for number in mine], check), strict=True
            ):
                rows[number] = computed
        return rows

    def _recomputed(
        self, version: int, groups: Sequence[Sequence[TrainRow]], check: Callable[[], None]
    ) -> Iterable[list[TrainRow]]:
        model = self._policy(version)
        found = {}
        for batch in pack(groups, max_tokens=self._config.micro_batch_tokens):
            check()
            with precision(self._config.dtype):
                logprobs = token_logprobs(model, batch, temperature=self._terms.sampling.temperature)
            of_rows = logprobs.float().numpy()
            start = 0
            for row in batch.rows:
                end = start + len(row.completion_tokens)
                found[id(row)] = of_rows[start:end].copy()
                start = end
        return [[replace(row, old_logprobs=found[id(row)]) for row in group] for group in groups]

    def _policy(self, version: int) -> nn.Module:
        if self._model is None or self._version != version:
            folder = checkpoint_folder(self._checkpoints, version)
            # The old one first: two would not fit where one just does.
            self._model = self._version = None
            try:
                self._model = load_policy(
                    folder, dtype=self._terms.model.dtype, attention=self._config.attention
                )
            except ConfigError as error:
                raise RolloutFileError(
                    f"the weights of version {version} are needed for units without an audit: {error}"
                ) from error
            self._model.requires_grad_(False)
            self._version = version
        return self._model
