"""The run: wait for accepted groups, train, hand the new version over to publication, repeat.

Training never waits for a round trip through the swarm: while nodes still generate with older versions,
the next step trains on what has arrived (at most `async_level` versions old), and the publication of one
version overlaps with the training of the next. At most one publication is under way; its order is

    resume checkpoint -> outcomes of units -> checkpoint folder -> manifest -> evaluation

so that whatever others have seen can always be continued from. kill -9 between any two of these loses at
most the step in memory, which the journal repeats exactly.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, ParamSpec, TypeVar

import msgspec
import trio

from intellect_protocol.messages import TrainingState

from . import resume
from .advantage import group_advantages
from .data import Group, StepData
from .files import write_json_atomically
from .journal import Settled
from .learner import StepMetrics
from .packing import TrainRow
from .resume import ResumePoint, TrainerState
from .session import RunOptions, Session, open_session

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_STATUS_INTERVAL_S = 0.5


class Stopped(Exception):
    """Raised inside worker threads once the program was told to stop."""


async def train(options: RunOptions) -> TrainerState:
    """Train until the stop rule holds; when cancelled, end within a micro-batch or so, ready to go on.

    Raises:
        ConfigError, WalletError, PreflightError: see `open_session`.
        RolloutFileError: a batch file that is needed to repeat a step has vanished.
    """
    session = await trio.to_thread.run_sync(open_session, options)
    with closing(session):
        loop = TrainingLoop(session)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(loop.watch_cancellation)
                nursery.start_soon(loop.keep_status)
                await loop.run()
                nursery.cancel_scope.cancel()
        finally:
            loop.write_status("finished" if loop.finished else "stopped")
        return loop.state()


class TrainingLoop:
    """State of a run between its steps."""

    def __init__(self, session: Session) -> None:
        self.finished = False
        self._session = session
        self._config = session.options.config
        self._prior = session.state
        self._version = session.state.version
        self._waiting_s = session.state.waiting_s
        self._publish_wait_s = session.state.publish_wait_s
        # Times add up over restarts, so the first step "was" that long ago.
        before_s = self._prior.seconds_since_first_step
        self._first_step_at = trio.current_time() - before_s if before_s else None
        self._activity = "starting"
        self._told_to_stop = threading.Event()
        self._published = trio.Event()

    # --- the loop ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Steps until the stop rule holds, then one last evaluation; returns early when told to stop."""
        try:
            async with trio.open_nursery() as nursery:
                # A crash may have come between a resume checkpoint and the publication of its version.
                nursery.start_soon(self._publish, None, not self._is_due(self._version))
                while not self._is_over():
                    data = await self._next_step()
                    if data is None:
                        break
                    await self._step(data, nursery)
                self._activity = "publishing"
                await self._published.wait()
                await self._evaluate()
                self.finished = True
        except* Stopped:
            logger.info("stopped; version %d goes on from its resume checkpoint", self._version)

    async def _next_step(self) -> StepData | None:
        """The data of the next step, or None if the time is up before there is enough.

        When no unit has come for `republish_after_s`, it is no data at all: the same weights become a new
        version. Only nodes that were bound before a version was recorded may work on it, so once the last of
        them has left, those who joined since wait for a version that nobody else would make.
        """
        source, want = self._session.source, self._config.groups_per_step
        repeated = await self._in_thread(source.repeat, self._version)
        if repeated is not None:
            return repeated
        started = last_arrival = trio.current_time()
        self._activity = f"waiting for {want} groups"
        try:
            while not self._is_over():
                now = trio.current_time()
                if await self._in_thread(source.poll):
                    last_arrival = now
                if 0 < self._config.republish_after_s <= now - last_arrival:
                    return await self._in_thread(source.choose, self._version, 0)
                found = len(source.trainable(self._version))
                waited_s = now - started
                if found >= want or self._is_enough(found, waited_s):
                    return await self._in_thread(source.choose, self._version, want)
                self._activity = f"waiting for {want} groups, {found} are here"
                await trio.sleep(self._config.poll_interval_s)
            return None
        finally:
            if self._first_step_at is not None:
                self._waiting_s += trio.current_time() - started

    def _is_enough(self, found: int, waited_s: float) -> bool:
        timeout_s = self._config.fill_timeout_s
        return 0 < timeout_s <= waited_s and found >= self._config.min_groups

    async def _step(self, data: StepData, nursery: trio.Nursery) -> None:
        version = self._version + 1
        started = trio.current_time()
        if self._first_step_at is None and data.groups:
            self._first_step_at = started
        self._activity = f"training version {version}"
        groups = [self._rows(group) for group in data.groups]
        metrics = await self._in_thread(
            self._session.learner.step, groups, version=version, check=self._check
        )
        trained_s = trio.current_time() - started
        self._activity = f"waiting for the publication of version {version - 1}"
        await self._published.wait()
        self._publish_wait_s += trio.current_time() - started - trained_s
        self._version = version
        values = _figures(data, metrics, version, trained_s) | {
            "idle_share": self._idle_share(),
            "seconds_since_first_step": self._seconds(),
        }
        kind = "step" if data.groups else "republished"
        await self._in_thread(self._session.metrics.add, kind, version, values)
        point = await self._in_thread(self._hand_over, self.state())
        self._published = trio.Event()
        nursery.start_soon(self._publish, point, not self._is_due(version))

    def _rows(self, group: Group) -> list[TrainRow]:
        advantages = group_advantages(group.task_rewards, eps=self._config.advantage_epsilon)
        return [
            TrainRow(row.prompt_tokens, row.completion_tokens, row.logprobs, float(advantage))
            for row, advantage in zip(group.rows, advantages, strict=True)
        ]

    def _hand_over(self, state: TrainerState) -> ResumePoint:
        """Copy everything that the next step changes and publication needs."""
        self._session.copy_weights()
        return resume.capture(self._session.learner, state)

    # --- publication ------------------------------------------------------------------------------

    async def _publish(self, point: ResumePoint | None, skip_evaluation: bool) -> None:
        """Publish the version that `_hand_over` copied, and evaluate it if it is due."""
        session, version = self._session, self._version
        if point is not None:
            await self._in_thread(resume.save, session.resume_folder, point)
        plan = await self._in_thread(session.journal.plan, version) or []
        await self._in_thread(self._write_outcomes, version)
        if not session.publisher.is_published(version):
            await trio.sleep_until(session.last_published_at + session.min_publish_interval_s)
            await self._in_thread(session.publisher.publish, version, _trained_files(plan))
            session.last_published_at = trio.current_time()
        if not skip_evaluation:
            await self._evaluate()
        self._published.set()

    def _write_outcomes(self, version: int) -> None:
        path = self._session.options.batches / "outcomes" / f"{version:08d}.json"
        if version and not path.exists():
            outcomes = self._session.journal.outcomes(version)
            write_json_atomically(path, {key.hex(): str(value) for key, value in outcomes.items()})

    async def _evaluate(self) -> None:
        """Held-out score of the version that was copied last, unless it is known."""
        version = self._version
        evaluator = self._session.evaluator
        if evaluator is None or self._is_evaluated(version):
            return
        score = await self._in_thread(evaluator.score, self._session.copy, self._check)
        await self._in_thread(
            self._session.metrics.add, "heldout", version, {"score": score, "tasks": evaluator.tasks}
        )

    def _is_due(self, version: int) -> bool:
        return version == 0 or (self._config.eval_every > 0 and version % self._config.eval_every == 0)

    def _is_evaluated(self, version: int) -> bool:
        return any(row["version"] == version for row in self._session.metrics.of_kind("heldout"))

    # --- time and state ---------------------------------------------------------------------------

    def _is_over(self) -> bool:
        options = self._session.options
        return (options.steps is not None and self._version >= options.steps) or (
            options.minutes is not None and self._seconds() >= options.minutes * 60
        )

    def _seconds(self) -> float:
        return 0.0 if self._first_step_at is None else trio.current_time() - self._first_step_at

    def _idle_share(self) -> float:
        seconds = self._seconds()
        return self._waiting_s / seconds if seconds else 0.0

    def state(self) -> TrainerState:
        """The counters that a resume checkpoint keeps."""
        return msgspec.structs.replace(
            self._prior,
            version=self._version,
            updates=self._session.learner.updates,
            seconds_since_first_step=self._seconds(),
            waiting_s=self._waiting_s,
            publish_wait_s=self._publish_wait_s,
        )

    async def _in_thread(self, function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Run in a worker thread; a program that was told to stop starts nothing more."""
        self._check()
        return await trio.to_thread.run_sync(partial(function, *arguments, **named))

    def _check(self) -> None:
        if self._told_to_stop.is_set():
            raise Stopped

    # --- beside the loop ----------------------------------------------------------------------------

    async def watch_cancellation(self) -> None:
        """Tell worker threads when the program is to stop: trio cannot cancel them."""
        try:
            await trio.sleep_forever()
        finally:
            self._told_to_stop.set()

    async def keep_status(self) -> None:
        """Write `status.json` until cancelled."""
        while True:
            self.write_status(self._activity)
            await trio.sleep(_STATUS_INTERVAL_S)

    def write_status(self, activity: str) -> None:
        """Write `status.json` once."""
        steps = self._session.metrics.of_kind("step")
        heldout = self._session.metrics.of_kind("heldout")
        status = {
            "role": "trainer",
            "state": activity,
            "finished": self.finished,
            "step": self._version,
            "version": self._version,
            "versions_published": len(self._session.publisher.versions()),
            "reward": steps[-1]["reward"] if steps else None,
            "reward_history": [row["reward"] for row in steps],
            "heldout": [{"step": row["version"], "score": row["score"]} for row in heldout],
            "idle_share": self._idle_share(),
            "publish_wait_s": self._publish_wait_s,
            "seconds_since_first_step": self._seconds(),
            "files_set_aside": self._session.source.files_set_aside,
        }
        write_json_atomically(self._session.options.data_dir / "status.json", status, durable=False)


def _trained_files(plan: Sequence[Settled]) -> list[bytes]:
    return [entry.file_hash for entry in plan if entry.outcome is TrainingState.TRAINED]


def _figures(data: StepData, metrics: StepMetrics, version: int, seconds: float) -> dict[str, Any]:
    """One step's line in `metrics.jsonl`; rewards before the online filter, so that it does not bias them."""
    outcomes = Counter(entry.outcome for entry in data.plan)
    judged = [entry for entry in data.plan if entry.outcome is not TrainingState.EXPIRED]
    trained = [entry for entry in data.plan if entry.outcome is TrainingState.TRAINED]
    lags = Counter(version - 1 - entry.unit.version for entry in trained)
    rows = sum(len(group.rows) for group in data.groups)
    by_environment = {
        f"reward/{name}": _reward([entry for entry in judged if entry.environment == name])
        for name in sorted({entry.environment for entry in judged})
    }
    return {
        "reward": _reward(judged),
        "reward_trained": _reward(trained),
        **by_environment,
        **{f"groups_{outcome}": count for outcome, count in sorted(outcomes.items())},
        **{f"groups_lag_{lag}": count for lag, count in sorted(lags.items())},
        "rows": rows,
        "completion_length": metrics.tokens / rows if rows else 0.0,
        "tokens_per_s": metrics.tokens / seconds if seconds else 0.0,
        "step_s": seconds,
        **{key: value for key, value in vars(metrics).items() if _is_finite(value)},
    }


def _reward(entries: Sequence[Settled]) -> float:
    return sum(entry.reward_sum for entry in entries) / max(1, sum(entry.rows for entry in entries))


def _is_finite(value: float) -> bool:
    return math.isfinite(value)
