"""Accepted batches: tailing the batch store and choosing the groups of a step.

    <batches>/v{version:08d}/{node}-{index:06d}.parquet     one accepted unit (`rollouts.Batch`)
    <batches>/outcomes/{version:08d}.json                   written here: what became of units

Files may arrive in any order and at any time. Each is read strictly once; one that does not have the
agreed form is set aside with the reason. A step takes whole groups: those older than head - async_level
expire, those whose task rewards are all equal are filtered out, and of the rest the freshest are trained
on. What is left waits for the next step.
"""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict
from pathlib import Path

import msgspec

from intellect_protocol.errors import RolloutFileError
from intellect_protocol.messages import TrainingState
from intellect_protocol.rollouts import Batch, BatchRow, FileLimits, read_batch
from intellect_protocol.run import RunConfig
from intellect_protocol.wire import sha256

from .advantage import has_signal
from .journal import Journal, Settled, UnitKey

logger = logging.getLogger(__name__)

_FOLDER = re.compile(r"v(\d{8,})")
_FILE = re.compile(r"([0-9a-f]{40})-(\d{6,})\.parquet")
# A folder whose time stamp is younger than this may get another file within the same clock tick.
_TIME_STAMP_SETTLES_S = 2.0
_LOGPROB_ROUNDING = 1e-3


class Group(msgspec.Struct, frozen=True):
    """The samples of one prompt of one unit."""

    unit: UnitKey
    prompt: int
    file_hash: bytes
    unit_groups: int
    rows: list[BatchRow]  # ascending by sample

    @property
    def task_rewards(self) -> list[float]:
        """[samples] rewards without any length term."""
        return [row.reward for row in self.rows]

    def settled(self, outcome: TrainingState) -> Settled:
        """The journal's entry for this group."""
        return Settled(
            unit=self.unit,
            prompt=self.prompt,
            file_hash=self.file_hash,
            unit_groups=self.unit_groups,
            outcome=outcome,
            environment=self.rows[0].environment,
            rows=len(self.rows),
            reward_sum=sum(self.task_rewards),
        )


class StepData(msgspec.Struct, frozen=True):
    """A step's plan and the groups it trains on, in the plan's order."""

    plan: list[Settled]
    groups: list[Group]


class BatchSource:
    """The batch store as seen by one trainer.

    Args:
        folder: the batch store; need not exist yet.
        run: what the batches must belong to, and the limits on their size.
    """

    def __init__(self, folder: Path, journal: Journal, run: RunConfig) -> None:
        self._folder = folder
        self._journal = journal
        self._run_id = run.run_id
        self._terms = run.terms
        self._async_level = run.revision.window.async_level
        self._pool: dict[tuple[UnitKey, int], Group] = {}
        self._fresh_units: set[UnitKey] = set()
        self._unchanged_since: dict[Path, int] = {}
        self._units_read = 0
        self.files_set_aside = 0

    def poll(self) -> int:
        """Read the files that appeared since the last call into the pool; returns how many units came."""
        before = self._units_read
        for folder in sorted(self._folder.iterdir(), reverse=True) if self._folder.is_dir() else ():
            if _FOLDER.fullmatch(folder.name) and self._has_changed(folder):
                for path in sorted(folder.iterdir()):
                    if path.name.endswith(".parquet") and not path.name.startswith("."):
                        self._take(path)
        return self._units_read - before

    def trainable(self, head: int) -> list[Group]:
        """Groups of the pool that a step from version `head` could train on, freshest first."""
        usable = [
            group
            for group in self._pool.values()
            if group.unit.version >= head - self._async_level and has_signal(group.task_rewards)
        ]
        # Sorting is stable: within a version, first come first served.
        return sorted(usable, key=lambda group: -group.unit.version)

    def choose(self, head: int, count: int) -> StepData:
        """Settle the pool for the step that produces version head + 1, and journal it.

        At most `count` groups are trained on; groups left over stay in the pool.
        """
        groups = self.trainable(head)[:count]
        plan = [group.settled(TrainingState.TRAINED) for group in groups]
        for group in self._pool.values():
            if group.unit.version < head - self._async_level:
                plan.append(group.settled(TrainingState.EXPIRED))
            elif not has_signal(group.task_rewards):
                plan.append(group.settled(TrainingState.FILTERED))
        self._journal.record_plan(head + 1, plan)
        self._forget(plan)
        return StepData(plan, groups)

    def repeat(self, head: int) -> StepData | None:
        """The journaled step that produces version head + 1, or None.

        Raises:
            RolloutFileError: a batch file of the plan is gone or has changed.
        """
        plan = self._journal.plan(head + 1)
        if plan is None:
            return None
        self._forget(plan)
        files: dict[UnitKey, dict[int, Group]] = {}
        groups = []
        for entry in plan:
            if entry.outcome is TrainingState.TRAINED:
                if entry.unit not in files:
                    files[entry.unit] = self._reread(entry)
                groups.append(files[entry.unit][entry.prompt])
        return StepData(plan, groups)

    def _reread(self, entry: Settled) -> dict[int, Group]:
        path = self._path(entry.unit)
        try:
            groups = self._read(path, entry.unit)
        except (OSError, RolloutFileError) as error:
            raise RolloutFileError(f"{path} is needed to repeat a step: {error}") from error
        if any(group.file_hash != entry.file_hash for group in groups):
            raise RolloutFileError(f"{path} is needed to repeat a step, but it has changed")
        return {group.prompt: group for group in groups}

    def _path(self, unit: UnitKey) -> Path:
        return self._folder / f"v{unit.version:08d}" / f"{unit.node.hex()}-{unit.unit_index:06d}.parquet"

    def _forget(self, plan: list[Settled]) -> None:
        for entry in plan:
            self._pool.pop((entry.unit, entry.prompt), None)
        self._fresh_units = {unit for unit, _ in self._pool}

    def _has_changed(self, folder: Path) -> bool:
        stamp = folder.stat().st_mtime_ns
        if self._unchanged_since.get(folder) == stamp:
            return False
        if time.time_ns() - stamp > _TIME_STAMP_SETTLES_S * 1e9:
            self._unchanged_since[folder] = stamp
        return True

    def _take(self, path: Path) -> None:
        name = f"{path.parent.name}/{path.name}"
        match = _FILE.fullmatch(path.name)
        if match is None:
            self._set_aside(name, "not named {node}-{index}.parquet")
            return
        version = int(path.parent.name[1:])
        unit = UnitKey(version, bytes.fromhex(match[1]), int(match[2]))
        if unit in self._fresh_units or self._journal.is_settled(unit):
            return
        if self._journal.set_aside_reason(name) is not None:
            return
        try:
            groups = self._read(path, unit)
        except FileNotFoundError:
            return
        except RolloutFileError as error:
            self._set_aside(name, str(error))
            return
        if self._journal.file_hash(unit) not in (None, groups[0].file_hash):
            self._set_aside(name, "the unit was already used from another file")
            return
        done = self._journal.settled_prompts(unit)
        self._pool.update({(unit, group.prompt): group for group in groups if group.prompt not in done})
        self._fresh_units.add(unit)
        self._units_read += 1

    def _set_aside(self, name: str, reason: str) -> None:
        if self._journal.set_aside_reason(name) is None:
            self._journal.set_aside(name, reason)
            self.files_set_aside += 1
            logger.warning("batch %s is set aside: %s", name, reason)

    def _read(self, path: Path, unit: UnitKey) -> list[Group]:
        sampling = self._terms.sampling
        limits = FileLimits(
            max_rows=sampling.prompts_per_unit * sampling.samples_per_prompt,
            max_prompt_tokens=self._terms.model.max_positions,
            max_completion_tokens=sampling.max_tokens,
        )
        with path.open("rb") as file:
            data = file.read(limits.max_file_bytes + 1)
        batch = read_batch(data, limits)
        self._check_meta(batch, unit)
        by_prompt: dict[int, list[BatchRow]] = defaultdict(list)
        for row in batch.rows:
            self._check_row(row)
            by_prompt[row.prompt].append(row)
        if sorted(by_prompt) != list(range(sampling.prompts_per_unit)):
            raise RolloutFileError(f"the prompts are not 0 to {sampling.prompts_per_unit - 1}")
        file_hash = sha256(data)
        groups = []
        for prompt, rows in sorted(by_prompt.items()):
            rows.sort(key=lambda row: row.sample)
            self._check_group(rows)
            groups.append(Group(unit, prompt, file_hash, len(by_prompt), rows))
        return groups

    def _check_meta(self, batch: Batch, unit: UnitKey) -> None:
        meta = batch.meta
        if meta.format != 1:
            raise RolloutFileError(f"format {meta.format} is not supported")
        if meta.run_id != self._run_id:
            raise RolloutFileError("the batch belongs to another run")
        if (meta.version, meta.node, meta.index) != unit:
            raise RolloutFileError("the batch is of another unit than its name says")
        published = self._journal.checkpoint(meta.version)
        if published is None:
            raise RolloutFileError(f"version {meta.version} was never published")
        if meta.checkpoint_hash != published:
            raise RolloutFileError(f"generated with another checkpoint than version {meta.version}")

    def _check_row(self, row: BatchRow) -> None:
        model = self._terms.model
        if not row.prompt_tokens or not row.completion_tokens:
            raise RolloutFileError("a row has no prompt or no completion")
        if len(row.prompt_tokens) + len(row.completion_tokens) > model.max_positions:
            raise RolloutFileError(f"a row is longer than {model.max_positions} tokens")
        if max(max(row.prompt_tokens), max(row.completion_tokens)) >= model.vocab_size:
            raise RolloutFileError("a token id is outside the vocabulary")
        if (row.logprobs > _LOGPROB_ROUNDING).any():
            raise RolloutFileError("a log-prob is above 0")

    def _check_group(self, rows: list[BatchRow]) -> None:
        if [row.sample for row in rows] != list(range(self._terms.sampling.samples_per_prompt)):
            raise RolloutFileError(f"prompt {rows[0].prompt} does not have every sample exactly once")
        first = rows[0]
        if any(
            row.prompt_tokens != first.prompt_tokens or row.environment != first.environment for row in rows
        ):
            raise RolloutFileError(f"the samples of prompt {first.prompt} have different prompts")
