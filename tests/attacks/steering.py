"""Adversaries that decode with a sampler of their own, and what the limits on distances leave to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from adversaries import Insider, hidden_states

from intellect_node.rollout import Group
from intellect_protocol import sampling as seeded
from intellect_protocol import toploc
from intellect_protocol.assignment import stream_seed
from intellect_protocol.engines.base import Completion
from intellect_protocol.engines.decoder import Decoder
from intellect_protocol.rollouts import RolloutUnit
from intellect_protocol.run import RunConfig, SamplingTerms


class Step(NamedTuple):
    """One position of a group that is being generated."""

    logits: torch.Tensor  # float32 [rows, vocab]
    uniforms: torch.Tensor  # float64 [rows]
    rows: list[list[int]]  # tokens so far
    live: list[bool]


Choose = Callable[[Step], torch.Tensor]


@torch.inference_mode()
def decoded(decoder: Decoder[Any], group: Group, terms: SamplingTerms, choose: Choose) -> list[Completion]:
    """Generate a group with `choose` in the sampler's place; proofs and log-probs are honest."""
    count = len(group.seeds)
    cache = decoder.prefill([group.prompt])
    index = torch.zeros(count, dtype=torch.long)
    batch = decoder.new_batch(count)
    batch.admit(torch.arange(count), cache, index)
    states = cache.states[index]
    rows: list[list[int]] = [[] for _ in range(count)]
    logprobs: list[list[float]] = [[] for _ in range(count)]
    history: list[list[torch.Tensor]] = [[] for _ in range(count)]
    live = [True] * count
    for place in range(terms.max_tokens):
        logits = decoder.logits(states)
        uniforms = torch.tensor([seeded.uniform(seed, place) for seed in group.seeds], dtype=torch.float64)
        chosen = choose(Step(logits, uniforms, rows, live))
        values = seeded.log_probs(logits, chosen, terms.temperature)
        for number in range(count):
            if live[number]:
                token = int(chosen[number])
                rows[number].append(token)
                logprobs[number].append(float(values[number]))
                history[number].append(states[number].to(torch.bfloat16).clone())
                live[number] = token not in terms.stop_ids
        if not any(live):
            break
        states = batch.decode(chosen)
    proofs = toploc.build_many([torch.stack(own) for own in history])
    return [
        Completion(row, values, "stop" if row[-1] in terms.stop_ids else "length", proof)
        for row, values, proof in zip(rows, logprobs, proofs, strict=True)
    ]


class TokenByToken(Insider):
    """Generates with a sampler of its own."""

    def choose(self, step: Step) -> torch.Tensor:
        """int64 [rows]: the next token of every row."""
        return self.honest_draw(step)

    def begin(self, group: Group) -> None:
        """Called before each group."""

    def honest_draw(self, step: Step) -> torch.Tensor:
        drawn: torch.Tensor = seeded.sample(step.logits, step.uniforms, self.terms.temperature).tokens
        return drawn

    def distances(self, step: Step, row: int, tokens: Sequence[int]) -> list[float]:
        """How far each of some tokens lies from what the seed draws for a row."""
        measured = seeded.distance(
            step.logits[row].expand(len(tokens), -1),
            torch.tensor(list(tokens)),
            step.uniforms[row].expand(len(tokens)),
            self.terms.temperature,
        )
        return [float(value) for value in measured.distances]

    async def complete(self, groups: Sequence[Group]) -> list[list[Completion]]:
        done = []
        for group in groups:
            self.begin(group)
            done.append(decoded(self.decoder, group, self.terms, self.choose))
        return done


class NeverStops(TokenByToken):
    """Forbids the stop token, so that every completion has the full length."""

    def choose(self, step: Step) -> torch.Tensor:
        logits = step.logits.clone()
        logits[:, self.terms.stop_ids] = -torch.inf
        return self.honest_draw(step._replace(logits=logits))


class StopsWithinReach(TokenByToken):
    """Stops a completion where the stop token, however unlikely, lies close to what the seed draws.

    Token ids of stop tokens are small, so their interval lies at the lower end of the unit interval: a
    uniform below the limit on single distances is enough.
    """

    reach = 0.05
    shortest = 2

    def choose(self, step: Step) -> torch.Tensor:
        chosen = self.honest_draw(step)
        stop = self.terms.stop_ids[0]
        for number, tokens in enumerate(step.rows):
            near = self.distances(step, number, [stop])[0] <= self.reach
            if near and len(tokens) >= self.shortest:
                chosen[number] = stop
        return chosen


class TakesAlternatives(TokenByToken):
    """Takes another token of probability 0.01 or more wherever one lies within `reach` of the uniform."""

    reach = 0.05
    probable = 0.01

    def choose(self, step: Step) -> torch.Tensor:
        chosen = self.honest_draw(step)
        probabilities = torch.softmax(step.logits / self.terms.temperature, -1)
        for number in range(len(step.rows)):
            others = [
                token
                for token in (probabilities[number] >= self.probable).nonzero().flatten().tolist()
                if token != int(chosen[number])
            ]
            costs = self.distances(step, number, others) if others else []
            if costs and min(costs) <= self.reach:
                chosen[number] = others[int(np.argmin(costs))]
        return chosen


class SlackSteering(TokenByToken):
    """Steers completions towards rewarded ones, one token near the uniform at a time, within the limits.

    It knows rewarded completions of the prompt from drawing freely beforehand. Where such a completion
    continues what was drawn so far and its next token lies within `reach` of the uniform, that token is
    taken. What this may cost in mean distance is the group's budget: just under the limit of suspicion.
    """

    tries = 32
    reach: float | None = None  # None: the run's far_distance or max_distance, whichever is smaller
    budgeted = True

    async def complete(self, groups: Sequence[Group]) -> list[list[Completion]]:
        limits = self.run.revision.thresholds
        reach = (
            self.reach if self.reach is not None else min(limits.far_distance, limits.max_distance.suspect)
        )
        self._reach = 0.98 * reach
        self._targets = {
            tuple(group.prompt): self._rewarded(group, samples)
            for group, samples in zip(groups, await self.drawn_freely(groups, self.tries), strict=True)
        }
        self.steered = 0
        return await super().complete(groups)

    def _rewarded(self, group: Group, samples: Sequence[Completion]) -> list[list[int]]:
        rewards = [self.tasks.reward(group.slot, sample.tokens) for sample in samples]
        best = max(rewards)
        return [
            sample.tokens
            for sample, reward in zip(samples, rewards, strict=True)
            if reward == best and best > min(rewards)
        ]

    def begin(self, group: Group) -> None:
        self._aims = self._targets[tuple(group.prompt)]
        self._spent = np.zeros(len(group.seeds))
        self._informative = np.zeros(len(group.seeds))

    def choose(self, step: Step) -> torch.Tensor:
        chosen = self.honest_draw(step)
        top = torch.softmax(step.logits / self.terms.temperature, -1).amax(-1)
        for number, tokens in enumerate(step.rows):
            if not step.live[number]:
                continue
            counts = bool(top[number] <= self.run.revision.thresholds.informative_top_probability)
            self._informative[number] += counts
            wanted = sorted({aim[len(tokens)] for aim in self._aims if self._continues(aim, tokens)})
            if not wanted or int(chosen[number]) in wanted:
                continue
            costs = self.distances(step, number, wanted)
            best = int(np.argmin(costs))
            if costs[best] <= self._reach and self._affordable(number, costs[best] * counts):
                chosen[number] = wanted[best]
                self._spent[number] += costs[best] * counts
                self.steered += 1
        return chosen

    def _continues(self, aim: Sequence[int], tokens: list[int]) -> bool:
        return len(aim) > len(tokens) and list(aim[: len(tokens)]) == tokens

    def _affordable(self, row: int, cost: float) -> bool:
        """Whether the mean distances, as they stand now, stay below suspicion (rows and group)."""
        if not self.budgeted:
            return True
        limits = self.run.revision.thresholds
        least = limits.min_informative
        spent, seen = self._spent[row] + cost, max(self._informative[row], 1.0)
        row_mean = spent / seen if seen >= least else spent / least
        group_mean = (self._spent.sum() + cost) / max(self._informative.sum(), least)
        return bool(
            row_mean <= 0.9 * limits.mean_distance_row.suspect
            and group_mean <= 0.9 * limits.mean_distance_group.suspect
        )


@torch.inference_mode()
def reachable(
    decoder: Decoder[Any], unit: RolloutUnit, unit_seed: bytes, run: RunConfig, reach: float
) -> dict[str, float]:
    """How much choice the limits on distances leave in an honest unit.

    Returns:
        Shares of positions at which the distance of some other token is at most `reach`: of `any` token, of
        one that is `probable` (p >= 0.01), of the `stop` token though its p is below 1e-4. And `afforded`:
        how many of the probable alternatives of a row, cheapest first, the limit of suspicion on the mean
        distance of a group pays for at once. With `tokens`, the mean length of a row.
    """
    terms, limits = run.terms.sampling, run.revision.thresholds
    costs: list[list[float]] = []
    counts = np.zeros(3)
    positions = informative = 0
    for row in unit.rows:
        states = hidden_states(decoder, row.prompt_tokens, [row.completion_tokens])[0]
        weights = torch.softmax(decoder.logits(states).double() / terms.temperature, -1)
        upper = weights.cumsum(-1)
        sigma = stream_seed(unit_seed, row.prompt, row.sample)
        uniforms = torch.from_numpy(seeded.uniforms(sigma, 0, len(row.completion_tokens)))[:, None]
        distance = torch.maximum(upper - weights - uniforms, uniforms - upper).clamp(min=0)
        places = torch.arange(len(row.completion_tokens))
        distance[places, torch.tensor(row.completion_tokens)] = torch.inf
        probable = torch.where(weights >= 0.01, distance, torch.inf).amin(-1)
        stop = torch.where(weights < 1e-4, distance, torch.inf)[:, terms.stop_ids].amin(-1)
        for place, nearest in enumerate((distance.amin(-1), probable, stop)):
            counts[place] += int((nearest <= reach).sum())
        positions += len(places)
        informative += int((weights.amax(-1) <= limits.informative_top_probability).sum())
        costs.append([float(cost) for cost in probable if cost <= reach])
    budget = limits.mean_distance_group.suspect * informative / len(unit.rows)
    afforded = [int((np.cumsum(sorted(own)) <= budget).sum()) for own in costs]
    shares = counts / positions
    return {
        "reach": reach,
        "any": float(shares[0]),
        "probable": float(shares[1]),
        "stop": float(shares[2]),
        "afforded": float(np.mean(afforded)),
        "tokens": positions / len(unit.rows),
    }
