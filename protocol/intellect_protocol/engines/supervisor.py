"""An engine as the rest of the project sees it: an async client of a child that is allowed to die.

A policy in the daemon's own process would take the daemon along when the kernel runs out of memory
or a kernel of the math library hangs. So the engine is a child process; this module starts it,
speaks with it, watches that tokens keep coming, and when it dies or stalls, kills it, starts
another one with the last checkpoint (and a smaller batch, where memory was the likely cause) and
asks only for what is still missing. Completions that have arrived are kept: every one stands by
itself. After `max_failures` failures of one kind without anything new in between, the caller gets
an `EngineError` and can hand the unit back.

Not attempted: sharing a child between calls. One operation runs at a time, others wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import trio

from ..errors import ConfigError, DeadlineError, EngineError, UsageError, WireError
from . import pipe
from .base import Completion, EngineInfo, GenerateRequest, RowScore, Sampling, ScoreRow
from .process import ChildProcess

T = TypeVar("T")

_RETRIED = ("killed", "crashed", "stalled", "out-of-memory", "protocol")
_SHRINKS = ("killed", "out-of-memory")
_CANCEL_GRACE_S = 5.0


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to start and how patient to be."""

    engine: str = "torch"
    device: str = "auto"  # "cpu", "cuda", "cuda:<index>", "auto"
    dtype: str = "auto"  # "float32", "bfloat16", "auto"; the run configuration says which
    attention: str = "auto"  # one of `attention.KERNELS`
    threads: int = 1
    max_rows: int = 64  # sequences decoded or scored at once
    start_s: float = 180.0  # for the process to be up
    load_s: float = 600.0  # to load or swap a checkpoint
    stall_s: float = 120.0  # without a new token or result
    max_failures: int = 3  # of one kind in a row before the work is handed back


class EngineHealth(msgspec.Struct, frozen=True):
    """For status displays and logs."""

    state: str  # "starting", "ready", "busy", "down", "closed"
    pid: int | None
    restarts: int
    max_rows: int
    tokens: int  # computed since the client was opened, as reported by the child
    memory_bytes: int  # resident size when last looked at
    last_failure: str  # "" if there was none


class EngineClient:
    """Coroutine twin of `base.Engine`; made by `open_engine`."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._max_rows = options.max_rows
        self._lock = trio.Lock()
        self._child: ChildProcess | None = None
        self._checkpoint: Path | None = None
        self._loaded: Path | None = None  # what the living child holds
        self._info: EngineInfo | None = None
        self._state = "starting"
        self._restarts = -1
        self._tokens = 0
        self._last_failure = ""

    # --- what callers use ------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """What is loaded.

        Raises:
            UsageError: nothing is.
        """
        if self._info is None:
            raise UsageError("the engine has no policy loaded")
        return self._info

    def health(self) -> EngineHealth:
        """The state of the engine as this process knows it."""
        child = self._child
        return EngineHealth(
            state=self._state,
            pid=child.pid if child else None,
            restarts=max(0, self._restarts),
            max_rows=self._max_rows,
            tokens=self._tokens,
            memory_bytes=child.memory_bytes if child else 0,
            last_failure=self._last_failure,
        )

    async def load(self, checkpoint_dir: Path) -> EngineInfo:
        """Load a checkpoint folder; a restarted child loads it again.

        Raises:
            ConfigError, PreflightError: as `base.Engine.load`.
            EngineError: the child kept failing.
        """
        return await self._place(checkpoint_dir, pipe.Load(str(checkpoint_dir)))

    async def update(self, checkpoint_dir: Path) -> EngineInfo:
        """Swap in another version of the loaded model without a restart.

        Raises:
            ConfigError: it does not fit; the old policy stays.
            EngineError: the child kept failing.
        """
        return await self._place(checkpoint_dir, pipe.Update(str(checkpoint_dir)))

    async def probe(self, prompt: Sequence[int], *, deadline_s: float | None = None) -> list[float]:
        """Log-probs of `prompt`'s tokens after the first; see `base.Engine.probe`."""
        answers: list[list[float]] = []

        async def attempt() -> None:
            await self._ensure_loaded()

            def take(message: pipe.FromChild) -> None:
                if isinstance(message, pipe.Probed):
                    answers.append(message.logprobs)

            await self._exchange([pipe.Probe(list(prompt))], take, end=pipe.Probed)

        await self._supervise(attempt, lambda: len(answers), deadline_s)
        return answers[-1]

    async def generate(
        self,
        requests: Sequence[GenerateRequest],
        sampling: Sampling,
        *,
        progress: Callable[[int], None] | None = None,
        deadline_s: float | None = None,
    ) -> list[list[Completion]]:
        """One completion per seed, in the order of requests and seeds.

        Args:
            progress: receives the tokens computed so far by the running child, as they grow.
            deadline_s: seconds after which the work is given up.

        Raises:
            UsageError: a request out of its limits.
            NumericError: a logit is not finite.
            EngineError: the child kept failing.
            DeadlineError: not done within `deadline_s`.
        """
        done: list[dict[int, Completion]] = [{} for _ in requests]

        async def attempt() -> None:
            await self._ensure_loaded()
            missing = [
                (number, [s for s in range(len(request.seeds)) if s not in done[number]])
                for number, request in enumerate(requests)
            ]
            missing = [(number, samples) for number, samples in missing if samples]
            operation = [
                pipe.Request(
                    msgspec.structs.replace(
                        requests[number], seeds=[requests[number].seeds[s] for s in samples]
                    )
                )
                for number, samples in missing
            ]

            def take(message: pipe.FromChild) -> None:
                if isinstance(message, pipe.Sampled):
                    if not 0 <= message.request < len(missing):
                        raise WireError("a completion for no request")
                    number, samples = missing[message.request]
                    if not 0 <= message.sample < len(samples):
                        raise WireError("a completion for no seed")
                    done[number][samples[message.sample]] = message.completion

            await self._exchange(
                [pipe.Generate(sampling, len(operation)), *operation], take, progress=progress
            )
            if any(len(own) != len(request.seeds) for own, request in zip(done, requests, strict=True)):
                raise EngineError("protocol", "the engine ended without all completions")

        await self._supervise(attempt, lambda: sum(map(len, done)), deadline_s)
        return [[own[s] for s in range(len(own))] for own in done]

    async def score(
        self,
        rows: Sequence[ScoreRow],
        sampling: Sampling,
        *,
        secret: bytes = b"",
        progress: Callable[[int], None] | None = None,
        deadline_s: float | None = None,
    ) -> list[RowScore]:
        """Scores of rows, in their order; see `base.Engine.score`.

        Raises:
            As `generate`.
        """
        done: dict[int, RowScore] = {}

        async def attempt() -> None:
            await self._ensure_loaded()
            missing = [number for number in range(len(rows)) if number not in done]

            def take(message: pipe.FromChild) -> None:
                if isinstance(message, pipe.Scored):
                    if not 0 <= message.row < len(missing):
                        raise WireError("a score for no row")
                    done[missing[message.row]] = message.score

            await self._exchange(
                [
                    pipe.Score(sampling, secret, len(missing)),
                    *(pipe.Row(rows[number]) for number in missing),
                ],
                take,
                progress=progress,
            )
            if len(done) != len(rows):
                raise EngineError("protocol", "the engine ended without all scores")

        await self._supervise(attempt, lambda: len(done), deadline_s)
        return [done[number] for number in range(len(rows))]

    async def unload(self) -> None:
        """Free the policy; the child stays."""
        async with self._lock:
            self._checkpoint = self._loaded = self._info = None
            if self._child is not None:
                await self._exchange([pipe.Unload()], lambda _: None)

    # --- starting, loading, failing --------------------------------------------------------------

    async def start(self) -> None:
        """Start the child and have it check its device.

        Raises:
            PreflightError, ConfigError: this machine or these options cannot work.
            EngineError: the child did not come up.
        """

        async def attempt() -> None:
            await self._ensure_started()

        await self._supervise(attempt, lambda: 0, None)

    async def close(self) -> None:
        """End the child."""
        self._state = "closed"
        child, self._child = self._child, None
        if child is not None:
            await child.close()

    async def _place(self, checkpoint_dir: Path, message: pipe.Load | pipe.Update) -> EngineInfo:
        async def attempt() -> None:
            await self._ensure_started()
            # A child that has just been restarted has nothing to update.
            await self._load(message if self._loaded else pipe.Load(message.checkpoint_dir))

        await self._supervise(attempt, lambda: 0, None)
        self._checkpoint = checkpoint_dir
        return self.info

    async def _ensure_started(self) -> None:
        if self._child is not None:
            return
        options = self._options
        self._state = "starting"
        self._restarts += 1
        self._loaded = None
        self._child = ChildProcess.spawn(options.threads)
        start = pipe.Start(
            options.engine,
            options.device,
            options.dtype,
            self._max_rows,
            options.threads,
            options.attention,
        )
        await self._exchange([start], lambda _: None, patience_s=options.start_s)

    async def _ensure_loaded(self) -> None:
        if self._checkpoint is None:
            raise UsageError("the engine has no policy loaded")
        await self._ensure_started()
        if self._loaded is None:
            await self._load(pipe.Load(str(self._checkpoint)))

    async def _load(self, message: pipe.Load | pipe.Update) -> None:
        def take(answer: pipe.FromChild) -> None:
            if isinstance(answer, pipe.Loaded):
                self._info, self._loaded = answer.info, Path(message.checkpoint_dir)

        await self._exchange([message], take, end=pipe.Loaded, patience_s=self._options.load_s)

    async def _supervise(
        self, attempt: Callable[[], Awaitable[None]], gained: Callable[[], int], deadline_s: float | None
    ) -> None:
        """Repeat `attempt` over failures of the child; `gained` counts results that are kept."""
        if self._state == "closed":
            raise UsageError("the engine is closed")
        with trio.CancelScope() as scope:
            if deadline_s is not None:
                scope.deadline = trio.current_time() + deadline_s
            async with self._lock:
                await self._repeat(attempt, gained)
        if scope.cancelled_caught:
            raise DeadlineError(f"the engine was not done within {deadline_s:.0f} s")

    async def _repeat(self, attempt: Callable[[], Awaitable[None]], gained: Callable[[], int]) -> None:
        failures: Counter[str] = Counter()
        while True:
            before = gained()
            try:
                await attempt()
            except EngineError as error:
                if error.reason not in _RETRIED:
                    raise
                await self._discard(str(error))
                if gained() > before:
                    failures.clear()
                failures[error.reason] += 1
                limit = self._options.max_failures
                if failures[error.reason] >= limit or failures.total() >= 3 * limit:
                    raise EngineError(
                        error.reason, f"gave up after {failures.total()} failures; the last: {error}"
                    ) from error
                if error.reason in _SHRINKS:
                    self._max_rows = max(1, self._max_rows // 2)
            else:
                return

    async def _discard(self, why: str) -> None:
        """Kill the child; the next attempt starts another one."""
        self._last_failure = why
        self._state = "down"
        child, self._child, self._loaded = self._child, None, None
        if child is not None:
            await child.kill()

    # --- one operation ---------------------------------------------------------------------------

    async def _exchange(
        self,
        operation: Iterable[pipe.ToChild],
        take: Callable[[pipe.FromChild], None],
        *,
        end: type[pipe.FromChild] = pipe.Done,
        patience_s: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Send an operation and take its answers until it has ended.

        Raises:
            EngineError: the child died, stalled or spoke nonsense.
            IntellectError: what the child reported as its failure.
        """
        child = self._child
        assert child is not None
        patience_s = patience_s or self._options.stall_s
        self._state = "busy"
        sent = False
        try:
            for message in operation:
                await child.send(pipe.pack(message), patience_s)
            sent = True
            await self._answers(child, take, end, patience_s, progress)
            self._state = "ready"
        except WireError as error:
            raise EngineError("protocol", str(error)) from error
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                if not (sent and await self._cancel(child)):
                    await self._discard("interrupted")
            raise

    async def _answers(
        self,
        child: ChildProcess,
        take: Callable[[pipe.FromChild], None],
        end: type[pipe.FromChild],
        patience_s: float,
        progress: Callable[[int], None] | None,
    ) -> None:
        tokens = 0
        while True:
            message = pipe.unpack_from_child(await child.receive(patience_s))
            if isinstance(message, pipe.Failed):
                self._state = "ready"
                raise pipe.error_of(message)
            if isinstance(message, pipe.Progress):
                if message.tokens <= tokens:
                    raise WireError("progress without new tokens")
                self._tokens += message.tokens - tokens
                tokens = message.tokens
                if progress is not None:
                    progress(tokens)
            take(message)
            if isinstance(message, end):
                return

    async def _cancel(self, child: ChildProcess) -> bool:
        """End the running operation and keep the child, if it answers in time."""
        with trio.move_on_after(_CANCEL_GRACE_S):
            try:
                await child.send(pipe.pack(pipe.Cancel()), _CANCEL_GRACE_S)
                while True:
                    message = pipe.unpack_from_child(await child.receive(_CANCEL_GRACE_S))
                    if isinstance(message, pipe.Done | pipe.Failed | pipe.Loaded | pipe.Probed):
                        self._state = "ready"
                        return True
            except (EngineError, WireError):
                return False
        return False


@asynccontextmanager
async def open_engine(options: EngineOptions) -> AsyncIterator[EngineClient]:
    """Start an engine; its process is gone when the block is left.

    Raises:
        PreflightError: the device does not exist.
        ConfigError: an option has no meaning.
        EngineError: the child did not come up.
    """
    if options.threads < 1 or options.max_rows < 1 or options.max_failures < 1:
        raise ConfigError("engine: threads, max_rows and max_failures must be at least 1")
    client = EngineClient(options)
    try:
        await client.start()
        yield client
    finally:
        with trio.CancelScope(shield=True):
            await client.close()
