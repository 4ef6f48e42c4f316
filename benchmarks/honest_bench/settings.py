"""Who computes how: settings of the two sides, and the runs they work on."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from intellect_coordinator.new_run import model_terms
from intellect_protocol.keys import LocalSigner
from intellect_protocol.run import (
    EnvironmentTerms,
    KeyTerms,
    LedgerTerms,
    RevisionTerms,
    RunConfig,
    RunTerms,
    SamplingTerms,
)
from intellect_protocol.validation.limits import default_thresholds
from intellect_protocol.wire import sha256

NODE = LocalSigner(b"\x33" * 32)
KEY = LocalSigner(b"\x41" * 32)
BLOCK_HASH = sha256(b"benchmarks/honest.py")


class Setting(NamedTuple):
    """How one side computes."""

    decoder: str = "native"  # ours, or "transformers"
    attention: str = "sdpa"  # or "eager"
    rows: int = 64  # at once
    threads: int = 1
    dtype: str = ""  # "": the run's

    def __str__(self) -> str:
        dtype = f" {self.dtype}" if self.dtype else ""
        return f"{self.decoder} {self.attention} {self.rows} rows {self.threads} thr{dtype}"


GENERATORS = [
    Setting(),
    Setting(rows=4),
    Setting(attention="eager", rows=16),
    Setting("transformers", rows=32),
    Setting("transformers", "eager", rows=8),
    Setting(rows=8, threads=2),
]
VALIDATORS = [
    Setting(),
    Setting(attention="eager", rows=1),
    Setting("transformers", rows=16),
    Setting(rows=32, dtype="float32"),
    Setting(rows=4, threads=2),
    Setting("transformers", "eager", rows=8),
]


class Workload(NamedTuple):
    """A run whose units are made and judged."""

    model: str  # "tiny" or "smollm2"
    environment: EnvironmentTerms
    max_tokens: int
    prompts_per_unit: int


WORKLOADS = {
    "tiny": Workload("tiny", EnvironmentTerms("sort_digits"), 12, 16),
    "tiny-long": Workload(
        "tiny", EnvironmentTerms("sort_digits", params={"min_digits": 4, "max_digits": 24}), 40, 8
    ),
    "smollm2": Workload("smollm2", EnvironmentTerms("arithmetic"), 12, 4),
    "smollm2-long": Workload("smollm2", EnvironmentTerms("arithmetic"), 64, 4),
}
SAMPLES_PER_PROMPT = 8


def run_config(name: str, folder: Path) -> RunConfig:
    """A run of the workload over the model in `folder`, with default thresholds."""
    workload = WORKLOADS[name]
    model, stop_ids = model_terms(folder, None)
    terms = RunTerms(
        name=name,
        protocol=1,
        model=model,
        environments=[workload.environment],
        sampling=SamplingTerms(
            1.0, workload.max_tokens, stop_ids, workload.prompts_per_unit, SAMPLES_PER_PROMPT
        ),
        ledger=LedgerTerms(31337, {"NodeRegistry": KEY.address}),
        keys=KeyTerms(KEY.address, KEY.address),
    )
    revision = RevisionTerms(0, 0, [], ["http://127.0.0.1:1"], default_thresholds(model.dtype))
    return RunConfig(terms, revision).signed(KEY)


SAME_DTYPE = [setting for setting in VALIDATORS if not setting.dtype]
