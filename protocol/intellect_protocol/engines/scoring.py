"""The validator's prefill: log-probs, sampling distances and commitment reports of given completions.

Rows are sorted by length and packed into batches under a budget of tokens; completions of one
prompt share its prefill. Logits are made for the generated positions only, a slice at a time, so
that memory does not grow with the vocabulary times the length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from .. import sampling as seeded
from .. import toploc
from ..errors import NumericError, ProofError
from .base import Progress, RowScore, Sampling, ScoreRow, ScoreSink
from .decoder import Decoder

_LOGITS_BUDGET_BYTES = 128 << 20
_MASK_BUDGET = 1 << 26  # entries of an attention mask; longer rows are prefilled whole, without one


class Scoring:
    """One call of `Engine.score`."""

    def __init__(
        self,
        decoder: Decoder[Any],
        rows: Sequence[ScoreRow],
        sampling: Sampling,
        secret: bytes,
        *,
        max_rows: int,
        batch_tokens: int,
        deliver: ScoreSink,
        progress: Progress,
    ) -> None:
        """Take the rows.

        Args:
            max_rows: rows that go through the model at once.
            batch_tokens: and their tokens, padding included (one row always does).
        """
        self._decoder, self._rows, self._sampling, self._secret = decoder, rows, sampling, secret
        self._max_rows, self._batch_tokens = max_rows, batch_tokens
        self._deliver, self._progress = deliver, progress

    def run(self) -> None:
        """Score and deliver every row.

        Raises:
            NumericError: a logit or a hidden state is not finite.
        """
        computed = 0
        for batch in self._batches():
            states = self._states([self._rows[number] for number in batch])
            for number, score in zip(batch, self._scores(batch, states), strict=True):
                self._deliver(number, score)
            computed += sum(len(self._rows[number].completion) for number in batch)
            self._progress(computed)

    def _batches(self) -> Iterator[list[int]]:
        """Rows of like lengths that fit the budgets; rows of one prompt stay together."""
        rows = self._rows
        order = sorted(
            range(len(rows)),
            key=lambda n: (len(rows[n].prompt), rows[n].prompt, len(rows[n].completion)),
        )
        batch: list[int] = []
        prompt = completion = 0
        for number in order:
            # The prompt counts for every row: its cache is repeated when the row attends to it.
            prompt = max(prompt, len(rows[number].prompt))
            completion = max(completion, len(rows[number].completion))
            padded = (len(batch) + 1) * (prompt + completion)
            if batch and (len(batch) == self._max_rows or padded > self._batch_tokens):
                yield batch
                batch = []
                prompt, completion = len(rows[number].prompt), len(rows[number].completion)
            batch.append(number)
        if batch:
            yield batch

    def _states(self, rows: list[ScoreRow]) -> list[torch.Tensor]:
        """The state that predicts each completion token: one [n, hidden] tensor per row."""
        prompts: list[list[int]] = []
        index = []
        for row in rows:
            if not prompts or row.prompt != prompts[-1]:
                prompts.append(row.prompt)
            index.append(len(prompts) - 1)
        completions = [row.completion for row in rows]
        longest = max(map(len, completions))
        mask = len(rows) * longest * (max(map(len, prompts)) + longest)
        if mask > _MASK_BUDGET:
            states = self._decoder.sequence_states([row.prompt + row.completion[:-1] for row in rows])
            return [own[len(row.prompt) - 1 :] for own, row in zip(states, rows, strict=True)]
        cache = self._decoder.prefill(prompts)
        return self._decoder.continuation_states(cache, torch.tensor(index), completions)

    def _scores(self, batch: list[int], states: list[torch.Tensor]) -> list[RowScore]:
        rows = [self._rows[number] for number in batch]
        measured = self._distances(rows, states)
        reports, errors = self._reports(rows, states)
        scores = []
        start = 0
        for row, report, error in zip(rows, reports, errors, strict=True):
            part = slice(start, start + len(row.completion))
            scores.append(
                RowScore(
                    logprobs=measured.log_probs[part].tolist(),
                    distances=measured.distances[part].tolist(),
                    exact=measured.exact[part].tolist(),
                    top_prob=measured.top_prob[part].tolist(),
                    chunk_reports=report,
                    proof_error=error,
                )
            )
            start = part.stop
        return scores

    def _distances(self, rows: list[ScoreRow], states: list[torch.Tensor]) -> seeded.Distances:
        packed = torch.cat(states)
        tokens = torch.tensor([token for row in rows for token in row.completion], device=packed.device)
        uniforms = torch.from_numpy(
            np.concatenate([seeded.uniforms(row.seed, 0, len(row.completion)) for row in rows])
        ).to(packed.device)
        step = max(1, _LOGITS_BUDGET_BYTES // (4 * self._decoder.shape.vocab_size))
        options, parts = self._sampling, []
        for start in range(0, len(packed), step):
            part = slice(start, start + step)
            logits = self._decoder.logits(packed[part])
            try:
                measured = seeded.distance(
                    logits, tokens[part], uniforms[part], options.temperature, options.top_k, options.top_p
                )
            except ValueError as error:
                raise NumericError(str(error)) from error
            parts.append(measured)
        return seeded.Distances(*(torch.cat(columns).cpu() for columns in zip(*parts, strict=True)))

    def _reports(
        self, rows: list[ScoreRow], states: list[torch.Tensor]
    ) -> tuple[list[list[toploc.ChunkReport]], list[str]]:
        """Commitment reports per row, and why a row has none."""
        errors = []
        for row in rows:
            try:
                toploc.check_form(len(row.completion), self._decoder.shape.hidden_size, row.proofs)
                errors.append("")
            except ProofError as error:
                errors.append(str(error))
        sound = [place for place, error in enumerate(errors) if not error]
        reports: list[list[toploc.ChunkReport]] = [[] for _ in rows]
        try:
            verified = toploc.verify_many(
                [states[place] for place in sound], [rows[place].proofs for place in sound], self._secret
            )
        except ValueError as error:
            raise NumericError(f"commitment: {error}") from error
        for place, report in zip(sound, verified, strict=True):
            reports[place] = report
        return reports, errors
