"""What a calibration computes: who generates, who verifies, on which prompts.

A *source* generates units of work: an honest engine at one setting, or a cheat. A *pair* is a source and
the setting of a verifier that scores its units. Kernel, dtype, rows at once, threads and padding
(transformers pads prompts on the left, the native decoder on the right) each occur on both sides; every
source meets two or three verifiers, not all of them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from intellect_protocol.assignment import stream_seed
from intellect_protocol.engines.base import GenerateRequest, Sampling
from intellect_protocol.errors import ConfigError
from intellect_protocol.wire import sha256, u32

from .altered_weights import Alteration, Kind

PLAN_FILE = "plan.json"
TEMPERATURE = "temperature_0.9"
CHANGED_PROMPT = "prompt_token"
CONSTANT_POLYNOMIAL = "constant_polynomial"
WRONG_TEMPERATURE = 0.9

_SHORT = {"bfloat16": "bf16", "float32": "fp32"}


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an engine computes.

    Attributes:
        dtype: "float32" or "bfloat16".
        attention: see `engines.attention.KERNELS`.
        rows: sequences decoded, or scored, at once.
        threads: of one operation.
    """

    dtype: str
    attention: str = "sdpa"
    rows: int = 32
    threads: int = 1

    @property
    def name(self) -> str:
        """E.g. "bf16-eager-8-1"; names files, too."""
        return f"{_SHORT[self.dtype]}-{self.attention}-{self.rows}-{self.threads}"


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who generates.

    Attributes:
        cheat: "" for honest work, else what is done instead.
        alteration: of the weights; None for the policy itself.
        verifiers: who scores its units.
        units: how many it generates.
    """

    setting: Setting
    verifiers: list[Setting]
    units: int
    cheat: str = ""
    alteration: Alteration | None = None

    @property
    def name(self) -> str:
        """The cheat or the setting; names files, too."""
        return self.cheat or self.setting.name


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that decides the numbers; written beside them.

    Attributes:
        model: checkpoint folder, and the SHA-256 of its weight files in hex.
        prompts: [units][prompts per unit] token ids; every source answers the same ones.
        samples: completions of each prompt, which form a group.
        learning_rate: size of the steps of weights that lag behind.
    """

    model: str
    weights_hash: str
    dtype: str
    sampling: Sampling
    max_tokens: int
    samples: int
    prompts: list[list[list[int]]]
    seed: int
    learning_rate: float
    sources: list[Source]

    def extends(self, other: Plan) -> bool:
        """Whether all that was measured for `other` counts for this plan too: it differs in extent alone."""
        same = [msgspec.structs.replace(plan, prompts=[], sources=[]) for plan in (self, other)]
        return same[0] == same[1] and all(
            mine == theirs for mine, theirs in zip(self.prompts, other.prompts, strict=False)
        )

    def requests(self, unit: int) -> list[GenerateRequest]:
        """The groups of one unit, with the seeds of its samples."""
        seed = sha256(b"intellect/calibrate/1", u32(self.seed), u32(unit))
        return [
            GenerateRequest(prompt, [stream_seed(seed, p, s) for s in range(self.samples)], self.max_tokens)
            for p, prompt in enumerate(self.prompts[unit])
        ]

    @property
    def honest(self) -> list[Source]:
        """The sources that do not cheat."""
        return [source for source in self.sources if not source.cheat]

    def units_of(self, source: Source) -> range:
        """Units that the source generates."""
        return range(source.units)

    @property
    def steps(self) -> int:
        """Units to generate and to score in all, and the choices of one."""
        return 1 + sum(source.units * (1 + len(source.verifiers)) for source in self.sources)


def honest_pairs(dtype: str) -> list[tuple[Setting, list[Setting]]]:
    """Generator settings of a run in `dtype`, each with the verifiers of its units; the reference first.

    A run in bf16 has peers that compute in float32 (their processors multiply bf16 slowly); one in float32
    has none in bf16.
    """
    wide = "float32"
    usual = Setting(dtype)
    eager = Setting(dtype, "eager", 8)
    single = Setting(dtype, "eager", 1)
    finer = Setting(wide, "sdpa", 16)
    other = Setting(dtype, "transformers-sdpa", 4)
    threads = Setting(dtype, "transformers-eager", 16, 2)
    return [
        (usual, [usual, eager, finer]),
        (Setting(dtype, "eager", 8), [usual, other, finer]),
        (Setting(dtype, "transformers-eager", 16), [usual, eager, single]),
        (Setting(dtype, "sdpa", 4), [usual, eager, other]),
        (Setting(wide, "sdpa", 12), [usual, eager, finer]),
        (Setting(dtype, "sdpa", 16, 2), [usual, threads]),
        (Setting(dtype, "sdpa", 1), [usual, single, other]),
    ]


def alterations(learning_rate: float) -> list[Alteration]:
    """The altered weights whose detection is measured."""
    return [
        *(Alteration(kind) for kind in (Kind.INT8, Kind.FP8, Kind.INT4, Kind.DROPPED_LAYER)),
        *(Alteration(Kind.OLDER, steps=steps, learning_rate=learning_rate) for steps in (1, 2, 8)),
    ]


def make_sources(dtype: str, units: int, cheat_units: int, learning_rate: float) -> list[Source]:
    """All sources of a calibration.

    Args:
        units: of each honest setting; those that decode one row at a time or on two threads, which take many
            times as long, make a quarter of them.
        cheat_units: of each cheat; they run at the reference setting and are judged by two verifiers.
        learning_rate: size of the steps of weights that lag behind.
    """
    pairs = honest_pairs(dtype)
    few = max(1, units // 4)
    sources = [
        Source(setting, verifiers, few if setting.rows == 1 or setting.threads > 1 else units)
        for setting, verifiers in pairs
    ]
    reference, verifiers = pairs[0][0], pairs[0][1][:2]
    cheats: list[tuple[str, Alteration | None]] = [(each.name, each) for each in alterations(learning_rate)]
    cheats += [(TEMPERATURE, None), (CHANGED_PROMPT, None)]
    sources += [Source(reference, verifiers, cheat_units, *cheat) for cheat in cheats]
    # Costs no generation: the reference's units with other proofs.
    sources.append(Source(reference, verifiers, min(units, cheat_units), CONSTANT_POLYNOMIAL))
    return sources


def read_plan(work: Path) -> Plan:
    """
    Raises:
        ConfigError: the folder has no plan that can be read.
    """
    path = work / PLAN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Plan)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}") from error


def generated_file(work: Path, source: Source, unit: int) -> Path:
    """Completions of a unit: msgpack of [prompts][samples] `Completion`."""
    return work / "generated" / source.name / f"{unit:04d}.msgpack"


def choices_file(work: Path) -> Path:
    """What a cheat may choose in the reference's first unit: msgpack of [rows][tokens] `steering.Choices`."""
    return work / "choices.msgpack"


def scored_file(work: Path, source: Source, verifier: Setting, unit: int) -> Path:
    """Scores of a unit: msgpack of [rows] `RowScore`, rows in the order of the completions."""
    return work / "scored" / source.name / verifier.name / f"{unit:04d}.msgpack"
