"""Sampling and window of runs whose model was seen to learn with them; trainer recipes have the same names.

A unit should take an engine a few seconds: shorter ones drown in signatures and look-ups, longer ones are
stale when they arrive.
"""

from __future__ import annotations

import msgspec

from intellect_protocol.errors import UsageError


class Preset(msgspec.Struct, frozen=True):
    """What `init` puts into the run, unless a flag says otherwise."""

    temperature: float
    max_tokens: int
    prompts_per_unit: int
    samples_per_prompt: int
    units_per_version: int  # per owner
    async_level: int = 2
    min_publish_interval_s: float = 2.0
    head_poll_s: float = 2.0


PRESETS = {
    # INTELLECT-2 (arXiv 2505.07291, section 3.5): 256 prompts x 16 per step, here in units of 16 prompts.
    "intellect-2": Preset(1.0, 32_768, 16, 16, 64, head_poll_s=5.0),
    # The 138k-parameter decoder on sorting or spelling: at most 8 characters and the stop token.
    "tiny": Preset(1.0, 12, 16, 8, 8),
    # SmolLM2-135M-Instruct on one-digit sums.
    "smollm2": Preset(1.0, 12, 4, 8, 8),
}


def preset(name: str) -> Preset:
    """
    Raises:
        UsageError: there is no such preset.
    """
    if name not in PRESETS:
        raise UsageError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
