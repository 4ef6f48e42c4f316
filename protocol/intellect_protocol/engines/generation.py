"""Continuous batching: many samples of many prompts through one decoder, each drawn from its own seed.

A step is: logits of all rows, one uniform per row, one draw per row; then the drawn tokens go
through the decoder. Rows that end make room for waiting ones; when none wait, the batch closes up
so that no work is spent on rows that have ended. The samples of a group share one prefill, and
commitments are built for many ended rows in one pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import toploc
from ..errors import NumericError
from .base import Completion, CompletionSink, FinishReason, GenerateRequest, Progress, Sampling
from .decoder import DecodeBatch, Decoder, PromptCache
from .rows import Ended, Rows, Sample

_CHUNKS_PER_PASS = 64
_REFILL_SHARE = 8  # a prefill is worth its cost once an eighth of the batch is free
_CLOSE_UP_SHARE = 4  # and closing up, once a quarter is


@dataclass
class _Group:
    """The samples of one request that wait, and their prompt once it has been prefilled."""

    prompt: list[int]
    waiting: deque[Sample]
    cache: PromptCache | None = None
    place: int = 0  # of the prompt in `cache`


class Generation:
    """One call of `Engine.generate`."""

    def __init__(
        self,
        decoder: Decoder[Any],
        requests: Sequence[GenerateRequest],
        sampling: Sampling,
        *,
        max_rows: int,
        prefill_tokens: int,
        deliver: CompletionSink,
        progress: Progress,
    ) -> None:
        """Queue all samples.

        Args:
            max_rows: rows decoded at once.
            prefill_tokens: prompt tokens, padding included, that go through the model at once
                (one prompt always does).
        """
        self._decoder, self._prefill_tokens = decoder, prefill_tokens
        self._deliver, self._progress = deliver, progress
        groups = [
            _Group(
                request.prompt,
                deque(Sample(number, s, seed, request.max_tokens) for s, seed in enumerate(request.seeds)),
            )
            for number, request in enumerate(requests)
            if request.seeds
        ]
        # Prompts of like length are prefilled together without much padding.
        self._groups = deque(sorted(groups, key=lambda group: -len(group.prompt)))
        total = sum(len(group.waiting) for group in groups)
        longest = max((request.max_tokens for request in requests), default=1)
        self._rows = Rows(decoder, sampling, max(1, min(max_rows, total)), longest)
        self._ended: list[Ended] = []

    def run(self) -> None:
        """Generate and deliver every completion.

        Raises:
            NumericError: a logit or a hidden state is not finite.
        """
        rows, computed = self._rows, 0
        batch = self._decoder.new_batch(rows.capacity)
        while self._groups or rows.live.any():
            self._refill(batch)
            computed += int(rows.live.sum())
            ended = rows.draw()
            self._progress(computed)
            self._release(batch, ended)
            if not rows.live.any():
                rows.width = 0
                continue
            if not self._groups and _CLOSE_UP_SHARE * int((~rows.live[: rows.width]).sum()) >= rows.width:
                batch.keep(torch.from_numpy(rows.close_up()))
            rows.set_states(batch.decode(rows.last_tokens()))
        self._commit(0)

    def _refill(self, batch: DecodeBatch[Any]) -> None:
        """Let waiting samples into free rows, a prefill at a time."""
        rows = self._rows
        while self._groups:
            free = rows.free()
            busy = bool(rows.live.any())
            if len(free) == 0 or (busy and not batch.can_refill):
                return
            if busy and len(free) * _REFILL_SHARE < rows.capacity:
                return
            self._admit(batch, self._prefilled(len(free)))

    def _prefilled(self, room: int) -> list[_Group]:
        """The next groups that share a prompt cache, with samples for up to `room` rows."""
        first = self._groups[0]
        if first.cache is not None:
            return [group for group in self._groups if group.cache is first.cache]
        chosen: list[_Group] = []
        for group in self._groups:
            padded = (len(chosen) + 1) * len(first.prompt)
            if chosen and (padded > self._prefill_tokens or room <= 0):
                break
            chosen.append(group)
            room -= len(group.waiting)
        cache = self._decoder.prefill([group.prompt for group in chosen])
        for place, group in enumerate(chosen):
            group.cache, group.place = cache, place
        return chosen

    def _admit(self, batch: DecodeBatch[Any], groups: list[_Group]) -> None:
        free = self._rows.free()
        samples: list[Sample] = []
        places: list[int] = []
        for group in groups:
            while group.waiting and len(samples) < len(free):
                samples.append(group.waiting.popleft())
                places.append(group.place)
        while self._groups and not self._groups[0].waiting:
            self._groups.popleft()
        cache = groups[0].cache
        assert cache is not None
        rows, index = free[: len(samples)], torch.tensor(places)
        batch.admit(torch.from_numpy(rows), cache, index)
        self._rows.admit(rows, samples, cache.states[index])

    def _release(self, batch: DecodeBatch[Any], ended: Sequence[tuple[int, FinishReason]]) -> None:
        if not ended:
            return
        for row, reason in ended:
            self._ended.append(self._rows.release(row, reason))
        batch.release(torch.tensor([row for row, _ in ended]))
        self._commit(_CHUNKS_PER_PASS)

    def _commit(self, at_least: int) -> None:
        """Build the commitments of ended rows and deliver them, once they have this many chunks."""
        chunks = sum(toploc.chunk_count(len(row.tokens)) for row in self._ended)
        if not self._ended or chunks < at_least:
            return
        try:
            proofs = toploc.build_many([row.states for row in self._ended])
        except ValueError as error:
            raise NumericError(f"commitment: {error}") from error
        for row, own in zip(self._ended, proofs, strict=True):
            completion = Completion(row.tokens, row.logprobs, row.reason, own)
            self._deliver(row.sample.request, row.sample.number, completion)
        self._ended.clear()
