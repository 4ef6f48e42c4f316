"""Default thresholds of checks 10 to 12, and how a measured value is graded against a pair of limits.

A run may put limits of its own into its revision. These defaults stand between what honest runs and what
cheats measured:

- bf16, SmolLM2-135M, bf16 and fp32 validators: honest chunks had at most 12 exponent mismatches and a
  mantissa mean of at most 3.1 with a median near 1.5; int8 weights had 3.2 at the median, int4 weights 32
  to 51 mismatches and 18 to 23, a dropped layer 100 and 42. One honest token in 2,000 was farther than 0.05
  from its draw, none farther than 0.12; at temperature 0.9 four in a hundred were. Honest groups had mean
  distances up to 0.004.
- fp32 on both sides, the tiny decoder, 2,240 chunks over 20 pairs of settings (two attention kernels, two
  implementations, 1 to 32 rows at once, 1 and 2 threads): honest states agreed to the bit, no distance was
  above 0, and log-probs differed by at most 4e-7 on average. A unit's median mantissa mean was 0.008 with
  weights one Adam step of 1e-5 old, 0.055 with eight, 0.20 with int8, 0.80 with fp8 and 2.5 with int4;
  log-probs moved by 1.2e-4, 9e-4, 1.2e-3, 7e-3 and 0.06. At temperature 0.9 a group's mean distance was
  3e-4. The limits leave room for other machines, which were not measured.

A value near the honest range is suspect and is judged again by somebody else; fraud begins where no honest
run has come near.
"""

from __future__ import annotations

import math

from ..run import Limit, Thresholds
from .findings import Kind

LIMITS_BF16 = Thresholds(
    exponent_mismatches=Limit(suspect=16, fraud=28),
    mantissa_mean=Limit(suspect=4.0, fraud=10.0),
    mantissa_median=Limit(suspect=4.0, fraud=8.0),
    sign_mismatches=Limit(suspect=2, fraud=6),
    negative_share=Limit(suspect=0.25, fraud=0.5),
    far_share_row=Limit(suspect=0.03, fraud=0.1),
    far_share_group=Limit(suspect=0.01, fraud=0.03),
    mean_distance_row=Limit(suspect=0.01, fraud=0.025),
    mean_distance_group=Limit(suspect=0.006, fraud=0.015),
    max_distance=Limit(suspect=0.15, fraud=0.35),
    inexact_share_group=Limit(suspect=0.4, fraud=0.6),
    logprob_drift_row=Limit(suspect=0.15, fraud=0.15),
    mantissa_mean_unit=Limit(suspect=2.1, fraud=2.8),
)

LIMITS_FP32 = Thresholds(
    exponent_mismatches=Limit(suspect=4, fraud=10),
    mantissa_mean=Limit(suspect=0.1, fraud=1.0),
    mantissa_median=Limit(suspect=0.5, fraud=1.0),
    sign_mismatches=Limit(suspect=1, fraud=4),
    negative_share=Limit(suspect=0.25, fraud=0.5),
    far_share_row=Limit(suspect=0.0, fraud=0.02),
    far_share_group=Limit(suspect=0.0, fraud=0.01),
    mean_distance_row=Limit(suspect=1e-5, fraud=2e-4),
    mean_distance_group=Limit(suspect=5e-6, fraud=1e-4),
    max_distance=Limit(suspect=2e-4, fraud=5e-3),
    inexact_share_group=Limit(suspect=0.02, fraud=0.2),
    logprob_drift_row=Limit(suspect=1e-3, fraud=1e-3),
    mantissa_mean_unit=Limit(suspect=0.02, fraud=0.15),
)


def default_thresholds(dtype: str) -> Thresholds:
    """Defaults for a run whose policy is generated and scored in `dtype` ("float32" or "bfloat16").

    Raises:
        ValueError: another dtype.
    """
    try:
        return {"float32": LIMITS_FP32, "bfloat16": LIMITS_BF16}[dtype]
    except KeyError:
        raise ValueError(f"no default thresholds for dtype {dtype}") from None


def grade(measured: float, limit: Limit) -> tuple[Kind, float] | None:
    """FRAUD or SUSPECT with the limit that was exceeded, or None within limits.

    Raises:
        ValueError: NaN. A measurement of ours that failed is no fault of the node.
    """
    if math.isnan(measured):
        raise ValueError("a measured value is NaN")
    if measured > limit.fraud:
        return Kind.FRAUD, limit.fraud
    if measured > limit.suspect:
        return Kind.SUSPECT, limit.suspect
    return None
