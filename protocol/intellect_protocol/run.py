"""The run configuration: everything two peers of a run must share, and the run's id.

A `RunConfig` has two parts that are never mixed. The **terms** cannot change: model, tokenizer,
environments, sampling, ledger and keys. Their canonical bytes are hashed into the run id, so a
peer with other terms is in another run. The **revision** can: addresses, thresholds of the checks,
window and batch sizes. It is signed by the coordinator key and names the policy version from which
it holds; a later revision has a higher number.

The file is TOML (`run.toml`). Unknown keys are errors.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from .errors import ConfigError
from .keys import Signer, recover_address, revision_digest
from .wire import encode, sha256

PROTOCOL_VERSION = 1
MAX_RUN_CONFIG_BYTES = 256 * 1024


class ModelTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every checkpoint of the run has in common."""

    architecture: str  # as in config.json, e.g. "Qwen2ForCausalLM"
    vocab_size: int
    hidden_size: int
    max_positions: int
    dtype: str  # of generation and scoring: "float32" or "bfloat16"
    tokenizer_hash: str  # hex SHA-256 of tokenizer.json
    chat: bool = False  # whether prompts go through the tokenizer's chat template


class EnvironmentTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One environment of the run and its share of the prompts."""

    name: str
    weight: int = 1
    params: dict[str, int | float | str | bool] = {}


class SamplingTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How completions are drawn; see `assignment` and `sampling`."""

    temperature: float
    max_tokens: int
    stop_ids: list[int]
    prompts_per_unit: int
    samples_per_prompt: int
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    target_lengths: list[int] = []  # empty: no length is asked for


class LedgerTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contracts that hold stake and record checkpoints and work."""

    chain_id: int
    contracts: dict[str, str]  # contract name -> checksummed address


class KeyTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys whose signatures peers accept."""

    coordinator: str  # receipts and revisions
    publisher: str  # manifests and announcements


class RunTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The immutable part; its hash is the run id."""

    name: str
    protocol: int
    model: ModelTerms
    environments: list[EnvironmentTerms]
    sampling: SamplingTerms
    ledger: LedgerTerms
    keys: KeyTerms


class Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured value above `suspect` goes to a second validator; above `fraud` opens a case."""

    suspect: float
    fraud: float


class Thresholds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of checks 10 to 12, per model and dtype; see `validation.limits` for the defaults."""

    exponent_mismatches: Limit  # count per 32-token chunk, of its 128 entries
    mantissa_mean: Limit  # bf16 mantissa units, per chunk
    mantissa_median: Limit
    sign_mismatches: Limit  # count per chunk
    negative_share: Limit  # share of plausible exponents at indices outside the top-k
    far_share_row: Limit  # share of a row's tokens with distance > far_distance
    far_share_group: Limit
    mean_distance_row: Limit  # over informative positions
    mean_distance_group: Limit
    max_distance: Limit  # hard limit at every position
    inexact_share_group: Limit  # share of informative tokens that differ from the validator's draw
    logprob_drift_row: Limit  # mean |worker - validator| in nats
    far_distance: float = 0.05
    informative_top_probability: float = 0.99
    min_informative: int = 30
    # Median over a unit's chunks of mantissa_mean; the default leaves it off.
    mantissa_mean_unit: Limit = Limit(suspect=127.0, fraud=127.0)


class WindowTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much work is accepted, and until when."""

    async_level: int = 2  # versions older than head - async_level are stale
    units_per_version: int = 64  # per owner
    abandons_per_version: int = 4
    precommit_ttl_s: float = 120.0
    max_submission_bytes: int = 64 << 20


class DetectionRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often a cheat was noticed when the thresholds were calibrated."""

    cheat: str
    units: int  # judged
    chunk: float  # share of its chunks whose commitment was suspect or fraud
    suspect: float  # share of its units that were suspect or fraud
    fraud: float  # share of its units that were fraud


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the thresholds come from: `intellect-coordinator calibrate`.

    The bounds are 95 % upper bounds (Clopper-Pearson) on honest work that took no part in choosing the
    thresholds, several verifiers' scores of one completion counted as independent.
    """

    report_hash: str  # hex SHA-256 of the report that has everything else
    weights_hash: str  # hex SHA-256 over the weight files that were measured
    chunks: int  # honest chunks, both halves
    tested_chunks: int
    false_suspect_chunk: float
    false_fraud_chunk: float
    tested_units: int
    false_suspect_unit: float
    false_fraud_unit: float
    steering_bits: float  # per row, log2 of the completions that a cheat may choose among unsuspected
    detection: list[DetectionRate]


class AuditTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which share of the units gets a forward pass; see `validation.audit_share`."""

    anchor: str  # hex, 32 bytes: end of the coordinator's seed chain
    unit_value: float  # what one accepted unit is worth to its owner at most, in stake tokens
    first_version: int = 0  # units of earlier versions are all audited
    probation_units: int = 16  # accepted units of an owner before its share falls below 1
    min_share: float = 0.1
    safety: float = 2.0  # at least 1 / (probability that an audit catches a cheat)


class RevisionTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part that may change during a run."""

    number: int
    from_version: int
    bootstrap: list[str]  # full multiaddresses with /p2p/
    rpc_urls: list[str]  # chain RPC
    thresholds: Thresholds
    window: WindowTerms = WindowTerms()
    head_poll_s: float = 5.0
    min_publish_interval_s: float = 2.0
    # Left out of the signed bytes where there is none, as before there could be one.
    calibration: Calibration | msgspec.UnsetType = msgspec.UNSET
    # Left out, and then no part of what is signed, where every unit is audited.
    audit: AuditTerms | msgspec.UnsetType = msgspec.UNSET


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Terms, the revision in force, and the coordinator's signature over that revision."""

    terms: RunTerms
    revision: RevisionTerms
    signature: str = ""  # hex, 65 bytes

    @property
    def run_id(self) -> bytes:
        """32 bytes that name the run everywhere."""
        return run_id(self.terms)

    def audit_of(self, version: int) -> AuditTerms | None:
        """The audit terms that hold for a version; None: every unit is audited."""
        audit = self.revision.audit
        return audit if isinstance(audit, AuditTerms) and version >= audit.first_version else None

    def signed(self, signer: Signer) -> RunConfig:
        """The same configuration with the revision signed by the coordinator's key."""
        # An int where a float belongs (`Limit(16, 28)`) would be encoded as an int, read back as a float.
        plain = msgspec.convert(msgspec.to_builtins(self), RunConfig)
        signature = signer.sign_digest(revision_digest(plain.run_id, encode(plain.revision)))
        return msgspec.structs.replace(plain, signature=signature.hex())

    def check(self) -> None:
        """Check values against each other and the revision's signature.

        Raises:
            ConfigError: a value is out of range or the signature is not the coordinator's.
        """
        _check_terms(self.terms)
        if isinstance(self.revision.audit, AuditTerms):
            _check_audit(self.revision.audit)
        digest = revision_digest(self.run_id, encode(self.revision))
        try:
            signature = bytes.fromhex(self.signature)
        except ValueError:
            signature = b""
        if recover_address(digest, signature) != self.terms.keys.coordinator:
            raise ConfigError("run configuration: the revision is not signed by the run's coordinator key")

    def to_toml(self) -> str:
        """Text of `run.toml`."""
        return msgspec.toml.encode(self).decode()


def run_id(terms: RunTerms) -> bytes:
    """SHA-256("intellect/run-config/1" | canonical msgpack of the terms): 32 bytes."""
    return sha256(b"intellect/run-config/1", encode(terms))


def _check_terms(terms: RunTerms) -> None:
    sampling = terms.sampling
    problems = [
        (terms.model.dtype in ("float32", "bfloat16"), "model.dtype must be float32 or bfloat16"),
        (0 < terms.model.vocab_size <= 1 << 22, "model.vocab_size is out of range"),
        (0 < terms.model.hidden_size <= 1 << 16, "model.hidden_size is out of range"),
        (0 < len(terms.environments) <= 64, "at least one and at most 64 environments are needed"),
        (all(0 < e.weight <= 1 << 20 for e in terms.environments), "environment weights must be positive"),
        (0 < sampling.temperature <= 10, "sampling.temperature must be above 0 and at most 10"),
        (0 < sampling.top_p <= 1, "sampling.top_p must be above 0 and at most 1"),
        (sampling.top_k >= 0, "sampling.top_k must not be negative"),
        (0 < sampling.max_tokens < terms.model.max_positions, "sampling.max_tokens is out of range"),
        (bool(sampling.stop_ids), "sampling.stop_ids is empty"),
        (
            all(0 <= i < terms.model.vocab_size for i in sampling.stop_ids),
            "a stop id is not in the vocabulary",
        ),
        (1 <= sampling.prompts_per_unit <= 4096, "sampling.prompts_per_unit is out of range"),
        (2 <= sampling.samples_per_prompt <= 4096, "sampling.samples_per_prompt must be at least 2"),
        (all(t > 0 for t in sampling.target_lengths), "target lengths must be positive"),
    ]
    for ok, text in problems:
        if not ok:
            raise ConfigError(f"run configuration: {text}")


def _check_audit(audit: AuditTerms) -> None:
    problems = [
        (re.fullmatch("[0-9a-f]{64}", audit.anchor), "audit.anchor is not 64 lower-case hex digits"),
        (0 < audit.unit_value < 1e18, "audit.unit_value is out of range"),
        (0 <= audit.first_version < 1 << 63, "audit.first_version is out of range"),
        (0 <= audit.probation_units < 1 << 63, "audit.probation_units must not be negative"),
        (0 <= audit.min_share <= 1, "audit.min_share must lie between 0 and 1"),
        (1 <= audit.safety < 1e9, "audit.safety must be at least 1"),
    ]
    for ok, text in problems:
        if not ok:
            raise ConfigError(f"run configuration: {text}")


def parse_run_config(data: bytes, *, source: str = "run configuration") -> RunConfig:
    """Parse and check untrusted `run.toml` bytes.

    Raises:
        ConfigError: too large, not TOML, unknown or missing keys, bad values or a bad signature.
    """
    if len(data) > MAX_RUN_CONFIG_BYTES:
        raise ConfigError(f"{source}: larger than {MAX_RUN_CONFIG_BYTES} bytes")
    try:
        plain: Any = tomllib.loads(data.decode())
        config = msgspec.convert(plain, RunConfig, strict=True)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{source}: {error}") from error
    config.check()
    return config


def load_run_config(path: Path) -> RunConfig:
    """Read `run.toml`.

    Raises:
        ConfigError: unreadable, or as `parse_run_config`.
    """
    try:
        with path.open("rb") as file:
            return parse_run_config(file.read(MAX_RUN_CONFIG_BYTES + 1), source=str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
