"""Dishonest unit builders: each is the node's own builder with one part replaced.

The devnet has six of them as whole nodes (`intellect_node.devnet.cheats`); these are the others. What they
have in common is that everything which is not the attack is done well: after a change of tokens the states
are recomputed by the right policy and committed to, log-probs are those of the tokens shipped, and rewards
are true. A cheat that is caught by its own sloppiness says nothing about the check that was meant to catch
it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from arena import InProcess, KnownAnswers

from intellect_node.rollout import Group, UnitBuilder
from intellect_protocol import sampling as seeded
from intellect_protocol import toploc
from intellect_protocol.engines.base import Completion
from intellect_protocol.engines.decoder import Decoder
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.run import SamplingTerms
from intellect_protocol.top_entries import TOP_K, top_entries


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
def hidden_states(
    decoder: Decoder[Any], prompt: Sequence[int], completions: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """The states that predict each token of some completions of a prompt: one [tokens, hidden] per row."""
    cache = decoder.prefill([prompt])
    return decoder.continuation_states(cache, torch.zeros(len(completions), dtype=torch.long), completions)


@torch.inference_mode()
def recommitted(
    decoder: Decoder[Any], group: Group, completions: Sequence[Sequence[int]], terms: SamplingTerms
) -> list[Completion]:
    """Completions of a prompt as the policy would have committed to them, had it drawn these tokens."""
    states = hidden_states(decoder, group.prompt, completions)
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


class CopiedTokens(Insider):
    """Generates one sample of each prompt and ships its tokens for all, each with proofs of its own."""

    async def complete(self, groups: Sequence[Group]) -> list[list[Completion]]:
        drawn = await super().complete(groups)
        return [
            [
                msgspec.structs.replace(
                    sample,
                    tokens=samples[0].tokens,
                    logprobs=samples[0].logprobs,
                    finish_reason=samples[0].finish_reason,
                    proofs=[sample.proofs[i % len(sample.proofs)] for i in range(len(samples[0].proofs))],
                )
                for sample in samples
            ]
            for samples in drawn
        ]


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


# --- commitments -------------------------------------------------------------------------------------


class FlippedSigns(Insider):
    """Commits to the states with all signs turned: exponents and mantissas are right."""

    async def complete(self, groups: Sequence[Group]) -> list[list[Completion]]:
        drawn = await super().complete(groups)
        flipped = []
        for group, samples in zip(groups, drawn, strict=True):
            states = hidden_states(self.decoder, group.prompt, [sample.tokens for sample in samples])
            proofs = toploc.build_many([-own for own in states])
            flipped.append(
                [msgspec.structs.replace(s, proofs=p) for s, p in zip(samples, proofs, strict=True)]
            )
        return flipped


class TypicalConstant(Insider):
    """Commits to one value, the most usual one: most top entries have its exponent."""

    bits: int  # bf16

    def proofs(self, completion: Completion) -> list[bytes]:
        proof = toploc.MAX_MODULUS.to_bytes(2, "big") + self.bits.to_bytes(2, "big")
        return [proof + bytes(2 * (TOP_K - 1)) for _ in completion.proofs]


class TypicalStates(Insider):
    """Commits to the mean hidden state of completions seen before: right channels, plausible values.

    What any participant knows after one honest unit. Top entries of real states sit in a few channels whose
    values hardly change, so index and exponent of many are guessed right.
    """

    typical: torch.Tensor  # float32 [hidden]

    def proofs(self, completion: Completion) -> list[bytes]:
        return toploc.build(self.typical.expand(len(completion.tokens), -1).contiguous())


def typical_value(states: Sequence[torch.Tensor]) -> int:
    """bf16 bits of the commonest sign and exponent among the top entries, with their mean mantissa."""
    top = top_entries(list(states))
    bits = np.concatenate([own[:count] for own, count in zip(top.bits, top.count, strict=True)])
    head = np.bincount(bits >> 7).argmax()
    return int(head << 7 | round(float((bits[bits >> 7 == head] & 0x7F).mean())))


@torch.inference_mode()
def typical_state(decoder: Decoder[Any], prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> Any:
    """float32 [hidden]: the mean state of some completions of a prompt."""
    return torch.cat(hidden_states(decoder, prompt, completions)).float().mean(0)
