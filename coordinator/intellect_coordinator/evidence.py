"""Evidence bundles: everything a stranger needs to judge a fraud again.

A bundle is canonical msgpack and is named by its SHA-256, which is what the court's case carries. It holds
the file as the node signed it, the verdict as the validator signed it, the run configuration, the signed
manifest of the version, and where its checkpoint hash was recorded. Reading one checks every signature and
that the parts belong together; only the weights themselves and the ledger's word are left to the reader.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from intellect_protocol.checkpoint import (
    Manifest,
    ManifestLimits,
    SignedManifest,
    checkpoint_hash,
    verify_manifest,
)
from intellect_protocol.errors import IntellectError, InvalidDataError
from intellect_protocol.keys import checksum_address, recover_address, verdict_digest, work_digest
from intellect_protocol.messages import JudgeVerdict
from intellect_protocol.run import MAX_RUN_CONFIG_BYTES, RunConfig, parse_run_config
from intellect_protocol.wire import decode_canonical, encode, sha256
from intellect_protocol.work_file import judge_job_id

FORMAT = 1
MAX_EVIDENCE_BYTES = 96 << 20


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bundle."""

    format: int
    run_config: bytes  # run.toml
    manifest: bytes
    manifest_signature: bytes
    block_number: int  # in which the checkpoint hash was recorded
    block_hash: bytes
    node: bytes  # 20 address bytes
    owner: str  # whose stake is at risk
    version: int
    index: int
    file_hash: bytes
    size_bytes: int
    work_signature: bytes
    file: bytes  # the rollout file
    attempt: int  # of judging; with the unit and the file it gives the verdict's job
    validator: str
    verdict: bytes  # canonical msgpack of a JudgeVerdict
    verdict_signature: bytes


@dataclass(frozen=True)
class CheckedEvidence:
    """A bundle whose parts and signatures fit together."""

    evidence: Evidence
    evidence_hash: bytes
    config: RunConfig
    manifest: Manifest
    verdict: JudgeVerdict

    @property
    def checkpoint_hash(self) -> bytes:
        """C of the version, 32 bytes."""
        return checkpoint_hash(self.evidence.manifest)

    @property
    def signed_manifest(self) -> SignedManifest:
        """The manifest with its signature."""
        return SignedManifest(self.evidence.manifest, self.evidence.manifest_signature)


def write_evidence(evidence: Evidence) -> bytes:
    """Canonical bytes of a bundle."""
    return encode(evidence)


def read_evidence(data: bytes) -> CheckedEvidence:
    """Read an untrusted bundle and check all of it that needs neither the weights nor the ledger.

    Raises:
        InvalidDataError: malformed, a signature is wrong, or two parts do not belong together.
    """
    evidence = decode_canonical(data, Evidence, max_bytes=MAX_EVIDENCE_BYTES)
    try:
        if evidence.format != FORMAT:
            raise InvalidDataError(f"evidence format {evidence.format} is not supported")
        if len(evidence.run_config) > MAX_RUN_CONFIG_BYTES:
            raise InvalidDataError("the run configuration is too large")
        config = parse_run_config(evidence.run_config, source="evidence: run.toml")
        run_id = config.run_id
        node = checksum_address(evidence.node)
        manifest = verify_manifest(
            SignedManifest(evidence.manifest, evidence.manifest_signature),
            run_id,
            config.terms.keys.publisher,
            ManifestLimits(max_checkpoint_bytes=1 << 46),
        )
        checkpoint = checkpoint_hash(evidence.manifest)
        if manifest.version != evidence.version:
            raise InvalidDataError("the manifest is of another version than the work")
        if sha256(evidence.file) != evidence.file_hash or len(evidence.file) != evidence.size_bytes:
            raise InvalidDataError("the file is not the one that was signed")
        work = work_digest(
            run_id, evidence.version, checkpoint, evidence.index, evidence.file_hash, evidence.size_bytes
        )
        if recover_address(work, evidence.work_signature) != node:
            raise InvalidDataError("the node key did not sign this file for this unit")
        job_id = judge_job_id(
            run_id, evidence.version, evidence.node, evidence.index, evidence.file_hash, evidence.attempt
        )
        said = verdict_digest(run_id, job_id, evidence.verdict)
        if recover_address(said, evidence.verdict_signature) != evidence.validator:
            raise InvalidDataError("the verdict is not signed by the validator it names")
        verdict = decode_canonical(evidence.verdict, JudgeVerdict)
        if not verdict.fraud:
            raise InvalidDataError("the verdict does not speak of fraud")
    except InvalidDataError:
        raise
    except (IntellectError, ValueError) as error:
        raise InvalidDataError(f"evidence: {error}") from error
    return CheckedEvidence(evidence, sha256(data), config, manifest, verdict)
