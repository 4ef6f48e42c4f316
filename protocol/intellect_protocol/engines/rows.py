"""The rows of a running batch: what each has drawn so far, and the states behind it.

Rows in use come first; a row that has ended stays where it is, released, until a new one takes its
place or the batch closes up. The state that produced token t of a row is stored at place t of that
row the moment the token is drawn, so tokens, log-probs and states cannot come apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .. import sampling as seeded
from ..errors import NumericError
from .base import FinishReason, Sampling
from .decoder import Decoder

_UNIFORMS_AHEAD = 32
_FIRST_TOKENS = 64
_LOGITS_BUDGET_BYTES = 256 << 20


@dataclass(frozen=True)
class Sample:
    """Which completion a row is."""

    request: int
    number: int  # its place among the request's seeds
    seed: bytes
    max_tokens: int


@dataclass(frozen=True)
class Ended:
    """A row that is complete."""

    sample: Sample
    tokens: list[int]
    logprobs: list[float]
    reason: FinishReason
    states: torch.Tensor  # [n, hidden] bf16: state t produced token t


class Rows:
    """Bookkeeping of at most `capacity` rows."""

    def __init__(self, decoder: Decoder[Any], sampling: Sampling, capacity: int, longest: int) -> None:
        """Allocate.

        Args:
            longest: tokens of the longest completion that may come.
        """
        self.decoder, self.sampling, self.capacity, self.longest = decoder, sampling, capacity, longest
        self.width = 0
        self.samples: list[Sample | None] = [None] * capacity  # None: free or released
        self.live = np.zeros(capacity, dtype=np.bool_)
        self._counts = np.zeros(capacity, dtype=np.int64)
        self._uniforms = np.zeros((capacity, _UNIFORMS_AHEAD))
        room = min(_FIRST_TOKENS, longest)
        self._tokens = np.zeros((capacity, room), dtype=np.int64)
        self._logprobs = np.zeros((capacity, room), dtype=np.float32)
        self._history = torch.zeros(capacity, room, decoder.shape.hidden_size, dtype=torch.bfloat16)
        self._state: torch.Tensor | None = None  # [capacity, hidden], of the decoder's dtype
        self._stop = np.array(sorted(set(sampling.stop_ids)), dtype=np.int64)

    def free(self) -> npt.NDArray[np.int64]:
        """Rows that a new sample may take, ascending."""
        return np.flatnonzero(~self.live)

    def admit(self, rows: npt.NDArray[np.int64], samples: list[Sample], states: torch.Tensor) -> None:
        """Start `samples` in `rows` from their prompts' last states [n, hidden]."""
        if self._state is None:
            self._state = torch.zeros(
                self.capacity, states.shape[1], dtype=states.dtype, device=states.device
            )
        self._state[torch.from_numpy(rows)] = states
        for row, sample in zip(rows.tolist(), samples, strict=True):
            self.samples[row] = sample
        self.live[rows] = True
        self._counts[rows] = 0
        self.width = max(self.width, int(rows[-1]) + 1)

    def draw(self) -> list[tuple[int, FinishReason]]:
        """Draw one token for every live row.

        Returns:
            The rows that have ended with it, and why.

        Raises:
            NumericError: a logit is not finite.
        """
        width, live = self.width, np.flatnonzero(self.live[: self.width])
        uniforms = self._next_uniforms(live)
        tokens, logprobs = self._sample(uniforms)
        counts = self._counts[live]
        self._make_room(int(counts.max()) + 1)
        assert self._state is not None
        self._tokens[live, counts] = tokens[live]
        self._logprobs[live, counts] = logprobs[live]
        rows = torch.from_numpy(live)
        self._history[rows, torch.from_numpy(counts)] = self._state[:width].to("cpu", torch.bfloat16)[rows]
        self._counts[live] = counts + 1
        stopped = np.isin(tokens[live], self._stop)
        limits = np.array([sample.max_tokens for row in live if (sample := self.samples[row])])
        ended = np.flatnonzero(stopped | (counts + 1 >= limits))
        return [(int(live[place]), "stop" if stopped[place] else "length") for place in ended]

    def _next_uniforms(self, live: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        place = self._counts[live] % _UNIFORMS_AHEAD
        for row in live[place == 0].tolist():
            sample = self.samples[row]
            assert sample is not None
            count = min(_UNIFORMS_AHEAD, sample.max_tokens - int(self._counts[row]))
            self._uniforms[row, :count] = seeded.uniforms(sample.seed, int(self._counts[row]), count)
        result = np.zeros(self.width)
        result[live] = self._uniforms[live, place]
        return result

    def _sample(
        self, uniforms: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        assert self._state is not None
        step = max(1, _LOGITS_BUDGET_BYTES // (4 * self.decoder.shape.vocab_size))
        drawn = torch.from_numpy(uniforms).to(self._state.device)
        options = self.sampling
        tokens, logprobs = [], []
        for start in range(0, self.width, step):
            part = slice(start, min(start + step, self.width))
            logits = self.decoder.logits(self._state[part])
            try:
                samples = seeded.sample(
                    logits, drawn[part], options.temperature, options.top_k, options.top_p
                )
            except ValueError as error:
                raise NumericError(str(error)) from error
            tokens.append(samples.tokens.cpu().numpy())
            logprobs.append(samples.log_probs.cpu().numpy())
        return np.concatenate(tokens), np.concatenate(logprobs)

    def _make_room(self, needed: int) -> None:
        room = self._tokens.shape[1]
        if needed > room:
            more = min(2 * room, self.longest) - room
            self._tokens = np.pad(self._tokens, ((0, 0), (0, more)))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, more)))
            self._history = torch.nn.functional.pad(self._history, (0, 0, 0, more))

    def release(self, row: int, reason: FinishReason) -> Ended:
        """Take out a row that has ended."""
        sample, count = self.samples[row], int(self._counts[row])
        assert sample is not None
        self.samples[row] = None
        self.live[row] = False
        return Ended(
            sample,
            self._tokens[row, :count].tolist(),
            self._logprobs[row, :count].tolist(),
            reason,
            self._history[row, :count].clone(),
        )

    def close_up(self) -> npt.NDArray[np.int64]:
        """Move the live rows to the front; returns where they stood, ascending."""
        rows = np.flatnonzero(self.live)
        count = len(rows)
        for array in (self._counts, self._uniforms, self._tokens, self._logprobs):
            array[:count] = array[rows]
        index = torch.from_numpy(rows)
        self._history[:count] = self._history[index]
        assert self._state is not None
        self._state[:count] = self._state[index]
        self.samples = [self.samples[row] for row in rows.tolist()] + [None] * (self.capacity - count)
        self.live[:] = np.arange(self.capacity) < count
        self.width = count
        return rows

    def last_tokens(self) -> torch.Tensor:
        """int64 [width]: the newest token of each row; a released row repeats an old one."""
        assert self._state is not None
        newest = self._tokens[np.arange(self.width), np.maximum(self._counts[: self.width] - 1, 0)]
        return torch.from_numpy(newest).to(self._state.device)

    def set_states(self, states: torch.Tensor) -> None:
        """States [width, hidden] after `last_tokens`."""
        assert self._state is not None
        self._state[: self.width] = states
