"""Dishonest unit builders: each is the node's own builder with one part replaced.

The devnet has six of them as whole nodes (`intellect_node.devnet.cheats`); these are the others. What they
have in common is that everything which is not the attack is done well: after a change of tokens the states
are recomputed by the right policy and committed to, log-probs are those of the tokens shipped, and rewards
are true. A cheat that is caught by its own sloppiness says nothing about the check that was meant to catch
it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from arena import InProcess, KnownAnswers

from intellect_node.rollout import Group, UnitBuilder
from intellect_protocol import sampling as seeded
from intellect_protocol import toploc
from intellect_protocol.assignment import stream_seed
from intellect_protocol.engines.base import Completion
from intellect_protocol.engines.decoder import Decoder
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.rollouts import RolloutUnit
from intellect_protocol.run import RunConfig, SamplingTerms


class Insider(UnitBuilder):
    """Looks into the engine: states, logits, uniforms."""

    @property
    def own_engine(self) -> TorchEngine:
        assert isinstance(self.engine, InProcess)
        return self.engine.engine

    @property
    def decoder(self) -> Decoder[Any]:
        return self.own_engine._loaded()

    @property
    def terms(self) -> SamplingTerms:
        return self.run.terms.sampling

    @property
    def answers(self) -> KnownAnswers:
        return self.tasks  # type: ignore[return-value]

    async def drawn_freely(self, groups: Sequence[Group], count: int) -> list[list[Completion]]:
        """`count` completions of every prompt from streams of one's own choice."""
        free = [
            msgspec.structs.replace(group, seeds=[secrets.token_bytes(32) for _ in range(count)])
            for group in groups
        ]
        return await super().complete(free)


# --- honest commitments to any tokens ----------------------------------------------------------------


@torch.inference_mode()
def recommitted(
    decoder: Decoder[Any], group: Group, completions: Sequence[Sequence[int]], terms: SamplingTerms
) -> list[Completion]:
    """Completions of a prompt as the policy would have committed to them, had it drawn these tokens."""
    cache = decoder.prefill([group.prompt])
    states = decoder.continuation_states(cache, torch.zeros(len(completions), dtype=torch.long), completions)
    proofs = toploc.build_many(states)
    done = []
    for tokens, own, proof in zip(completions, states, proofs, strict=True):
        logprobs = seeded.log_probs(decoder.logits(own), torch.tensor(list(tokens)), terms.temperature)
        stopped = tokens[-1] in terms.stop_ids
        done.append(Completion(list(tokens), logprobs.tolist(), "stop" if stopped else "length", proof))
    return done


class Rewriter(Insider):
    """Generates honestly, rewrites the tokens, and recomputes all that follows from them."""

    def rewritten(self, group: Group, sample: Completion) -> list[int]:
        """The tokens to ship in place of `sample`'s."""
        raise NotImplementedError

    async def complete(self, groups: Sequence[Group]) -> list[list[Completion]]:
        drawn = await super().complete(groups)
        return [
            recommitted(
                self.decoder, group, [self.rewritten(group, sample) for sample in samples], self.terms
            )
            for group, samples in zip(groups, drawn, strict=True)
        ]

    def ordinary(self, tokens: Sequence[int]) -> list[int]:
        """Tokens without a stop token at the end."""
        return list(tokens[:-1] if tokens[-1] in self.terms.stop_ids else tokens)


class OneTokenEdited(Rewriter):
    """Replaces the middle token of every completion."""

    def rewritten(self, group: Group, sample: Completion) -> list[int]:
        tokens = list(sample.tokens)
        place = (len(tokens) - 1) // 2
        other = (tokens[place] + 37) % self.run.terms.model.vocab_size
        while other in self.terms.stop_ids or other == tokens[place]:
            other = (other + 1) % self.run.terms.model.vocab_size
        if tokens[place] not in self.terms.stop_ids:
            tokens[place] = other
        return tokens


class EarlyStop(Rewriter):
    """Stops every completion after half of its tokens: less to compute, and short answers look decided."""

    def rewritten(self, group: Group, sample: Completion) -> list[int]:
        half = self.ordinary(sample.tokens)[: max(1, len(sample.tokens) // 2)]
        return [*half, self.terms.stop_ids[0]]


class CutShort(Rewriter):
    """Ends every completion after half of its tokens and says that the length was up."""

    def rewritten(self, group: Group, sample: Completion) -> list[int]:
        return self.ordinary(sample.tokens)[: max(1, len(sample.tokens) // 2)] or sample.tokens


class StopPadding(Rewriter):
    """Fills completions up with stop tokens, to be credited for more tokens."""

    def rewritten(self, group: Group, sample: Completion) -> list[int]:
        missing = self.terms.max_tokens - len(sample.tokens)
        return [*sample.tokens, *[self.terms.stop_ids[0]] * missing]


class PastedAnswer(Rewriter):
    """Thinks for as long as it likes and puts the right answer after it."""

    def rewritten(self, group: Group, sample: Completion) -> list[int]:
        end = [*self.answers.answer(group.slot), self.terms.stop_ids[0]]
        thought = self.ordinary(sample.tokens)[: max(0, self.terms.max_tokens - len(end)) // 2]
        whole = [*thought, *end]
        pays = self.tasks.reward(group.slot, whole) >= self.tasks.reward(group.slot, end)
        return whole if pays else end


class DraftTokens(Insider):
    """Lets a cheaper model draw the tokens and has the policy only read them: one prefill, no decoding."""

    draft: TorchEngine

    async def complete(self, groups: Sequence[Group]) -> list[list[Completion]]:
        cheap = InProcess(self.draft)
        builder = UnitBuilder(self.run, self.node, cheap, self.tasks)
        drawn = await builder.complete(groups)
        return [
            recommitted(self.decoder, group, [sample.tokens for sample in samples], self.terms)
            for group, samples in zip(groups, drawn, strict=True)
        ]


class OtherTemperature(Insider):
    """Samples at a temperature of its own."""

    temperature = 0.9

    async def complete(self, groups: Sequence[Group]) -> list[list[Completion]]:
        terms = msgspec.structs.replace(self.terms, temperature=self.temperature)
        cold = msgspec.structs.replace(
            self.run, terms=msgspec.structs.replace(self.run.terms, sampling=terms)
        )
        drawn = await UnitBuilder(cold, self.node, self.engine, self.tasks).complete(groups)
        return [
            recommitted(self.decoder, group, [sample.tokens for sample in samples], self.terms)
            for group, samples in zip(groups, drawn, strict=True)
        ]


class PartlyOther(Insider):
    """Runs other weights for a share of every group only, so that the unit's median stays honest."""

    cheap: TorchEngine
    share = 0.375

    async def complete(self, groups: Sequence[Group]) -> list[list[Completion]]:
        count = round(self.share * self.terms.samples_per_prompt)
        head = [msgspec.structs.replace(group, seeds=group.seeds[:count]) for group in groups]
        tail = [msgspec.structs.replace(group, seeds=group.seeds[count:]) for group in groups]
        cheap = await UnitBuilder(self.run, self.node, InProcess(self.cheap), self.tasks).complete(head)
        dear = await super().complete(tail)
        return [[*one, *two] for one, two in zip(cheap, dear, strict=True)]


# --- token by token ----------------------------------------------------------------------------------


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


# --- commitments -------------------------------------------------------------------------------------


class FlippedSigns(Insider):
    """Commits to the states with all signs turned: exponents and mantissas are right."""

    async def complete(self, groups: Sequence[Group]) -> list[list[Completion]]:
        drawn = await super().complete(groups)
        flipped = []
        for group, samples in zip(groups, drawn, strict=True):
            states = _states(self.decoder, group, [sample.tokens for sample in samples])
            proofs = toploc.build_many([-own for own in states])
            flipped.append(
                [msgspec.structs.replace(s, proofs=p) for s, p in zip(samples, proofs, strict=True)]
            )
        return flipped


class TypicalStates(Insider):
    """Commits to the mean hidden state of completions seen before: right channels, plausible values.

    What any participant knows after one honest unit. Top entries of real states sit in a few channels whose
    values hardly change, so index and exponent of many are guessed right.
    """

    typical: torch.Tensor  # float32 [hidden]

    def proofs(self, completion: Completion) -> list[bytes]:
        return toploc.build(self.typical.expand(len(completion.tokens), -1).contiguous())


@torch.inference_mode()
def _states(decoder: Decoder[Any], group: Group, completions: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    cache = decoder.prefill([group.prompt])
    return decoder.continuation_states(cache, torch.zeros(len(completions), dtype=torch.long), completions)


@torch.inference_mode()
def typical_state(decoder: Decoder[Any], prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> Any:
    """float32 [hidden]: the mean state of some completions of a prompt."""
    cache = decoder.prefill([prompt])
    states = decoder.continuation_states(cache, torch.zeros(len(completions), dtype=torch.long), completions)
    return torch.cat(states).float().mean(0)


# --- what the limits leave ---------------------------------------------------------------------------


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
        group = Group(None, row.prompt_tokens, [])  # type: ignore[arg-type]
        states = _states(decoder, group, [row.completion_tokens])[0]
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
