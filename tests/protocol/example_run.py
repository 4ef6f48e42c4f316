"""A run configuration for tests."""

from intellect_protocol.keys import LocalSigner
from intellect_protocol.run import (
    EnvironmentTerms,
    KeyTerms,
    LedgerTerms,
    Limit,
    ModelTerms,
    RevisionTerms,
    RunConfig,
    RunTerms,
    SamplingTerms,
    Thresholds,
)

COORDINATOR = LocalSigner(b"\x11" * 32)
PUBLISHER = LocalSigner(b"\x22" * 32)


def example_run() -> RunConfig:
    """A signed configuration with fixed keys."""
    limit = Limit(suspect=1.0, fraud=2.0)
    names = [f for f in Thresholds.__struct_fields__ if f not in Thresholds.__struct_defaults__]
    thresholds = Thresholds(
        **{
            name: limit
            for name in names
            if name not in ("far_distance", "informative_top_probability", "min_informative")
        }
    )
    return RunConfig(
        terms=RunTerms(
            name="example",
            protocol=1,
            model=ModelTerms("Qwen2ForCausalLM", 100, 64, 256, "float32", "00" * 32),
            environments=[EnvironmentTerms("sort_digits", 2), EnvironmentTerms("arithmetic", 1)],
            sampling=SamplingTerms(1.0, 20, [1], 4, 8, target_lengths=[10, 20]),
            ledger=LedgerTerms(31337, {"StakeLedger": COORDINATOR.address}),
            keys=KeyTerms(COORDINATOR.address, PUBLISHER.address),
        ),
        revision=RevisionTerms(0, 0, ["/ip4/127.0.0.1/tcp/4001"], ["http://127.0.0.1:8545"], thresholds),
    ).signed(COORDINATOR)
